//go:build linux

package fastpath

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/bpf"
)

// all is a filter that remembers what it lets through.
type all map[mac]bool

func (a all) Hear(m [6]byte) error   { a[m] = true; return nil }
func (a all) Ignore(m [6]byte) error { delete(a, m); return nil }

const bridge, pod1, pod2, nic, vxlan = 1, 2, 3, 4, 5

// told are the neighbours of a node that two pods are on, whose addresses are a and b, and the
// programs have been told of both.
func told(a, b mac) *neighbours {
	n := newNeighbours(all{})
	n.complete = true
	for i, m := range []mac{a, b} {
		n.apply(false, ipNeighbour(bridge, uint8(i), unix.NUD_REACHABLE, m), time.Time{})
	}
	n.commit(node{
		owners: []bpf.LinkMAC{{Link: pod1, MAC: a}, {Link: pod2, MAC: b}},
		near:   map[int]bool{bridge: true, pod1: true, pod2: true, nic: false, vxlan: false},
		own:    map[mac]bool{{2: 99}: true},
	}, time.Time{})
	return n
}

func about(family byte, device int, state uint16, attrs ...*nl.RtAttr) []byte {
	m := netlink.Ndmsg{Family: family, Index: uint32(device), State: state}
	b := m.Serialize()
	for _, a := range attrs {
		b = append(b, a.Serialize()...)
	}
	return b
}

// ipNeighbour is a message about 10.0.0.last.
func ipNeighbour(device int, last byte, state uint16, m mac) []byte {
	attrs := []*nl.RtAttr{nl.NewRtAttr(unix.NDA_DST, []byte{10, 0, 0, last})}
	if state&usable != 0 {
		attrs = append(attrs, nl.NewRtAttr(unix.NDA_LLADDR, m[:]))
	}
	return about(unix.AF_INET, device, state, attrs...)
}

// entry is a message about what a bridge has learned.
func entry(port int, m mac) []byte {
	return about(unix.AF_BRIDGE, port, unix.NUD_REACHABLE, nl.NewRtAttr(unix.NDA_LLADDR, m[:]), nl.NewRtAttr(unix.NDA_MASTER, nl.Uint32Attr(bridge)))
}

// What is announced of neighbours has all that was seen be void where it could be untrue, and the
// devices be looked at where there may be an owner to find; and nothing else has.
func TestSays(t *testing.T) {
	a, b, c := mac{5: 1}, mac{5: 2}, mac{5: 3}
	for _, tt := range []struct {
		name       string
		gone       bool
		message    []byte
		void, look bool
	}{
		{"a bridge learns an address that nobody has", false, entry(pod1, c), false, false},
		{"a bridge forgets one", true, entry(pod1, c), false, false},
		{"a bridge learns a pod's at another link", false, entry(pod2, a), true, true},
		{"a bridge learns a pod's in another VLAN", false, append(entry(pod1, a), nl.NewRtAttr(unix.NDA_VLAN, nl.Uint16Attr(7)).Serialize()...), true, true},
		{"a bridge forgets a pod's", true, entry(pod1, a), true, true},
		{"a bridge learns a device's of the node", false, entry(pod1, mac{2: 99}), true, true},
		{"an entry of a VXLAN device", false, about(unix.AF_BRIDGE, vxlan, unix.NUD_PERMANENT, nl.NewRtAttr(unix.NDA_LLADDR, c[:])), true, true},
		{"nobody answers for an address", false, ipNeighbour(bridge, 9, unix.NUD_FAILED, c), false, false},
		{"nobody has answered yet", false, ipNeighbour(bridge, 9, unix.NUD_INCOMPLETE, c), false, false},
		{"nobody was there, and is gone", true, ipNeighbour(bridge, 9, unix.NUD_FAILED, c), false, false},
		{"nobody answers at the NIC", false, ipNeighbour(nic, 9, unix.NUD_FAILED, c), false, false},
		{"somebody answers", false, ipNeighbour(bridge, 9, unix.NUD_REACHABLE, c), false, true},
		{"somebody answers at the NIC", false, ipNeighbour(nic, 9, unix.NUD_REACHABLE, c), false, false},
		{"somebody answers at a device that came since", false, ipNeighbour(6, 9, unix.NUD_REACHABLE, c), false, true},
		{"a pod is confirmed", false, ipNeighbour(bridge, 0, unix.NUD_STALE, a), false, false},
		{"a pod answers no more", false, ipNeighbour(bridge, 0, unix.NUD_FAILED, a), true, true},
		{"a pod is gone", true, ipNeighbour(bridge, 0, unix.NUD_STALE, a), true, true},
		{"a pod's address is another's", false, ipNeighbour(bridge, 0, unix.NUD_REACHABLE, b), true, true},
		{"it is cut short", false, entry(pod1, c)[:11], true, true},
		{"an attribute is cut short", false, entry(pod1, c)[:len(entry(pod1, c))-2], true, true},
		{"its master is cut short", false, about(unix.AF_BRIDGE, pod1, 0, nl.NewRtAttr(unix.NDA_LLADDR, c[:]), nl.NewRtAttr(unix.NDA_MASTER, []byte{1})), true, true},
		{"an address of no version of IP", false, about(unix.AF_INET, bridge, unix.NUD_REACHABLE, nl.NewRtAttr(unix.NDA_DST, []byte{1})), true, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := told(a, b)
			if void, look := n.apply(tt.gone, tt.message, time.Time{}); void != tt.void || look != tt.look {
				t.Errorf("void %t, look %t, want %t, %t", void, look, tt.void, tt.look)
			}
			// What is not known matters whatever it is: it may have been usable before.
			n = told(a, b)
			n.overrun()
			if void, _ := n.apply(tt.gone, tt.message, time.Time{}); !void && tt.message[0] != unix.AF_BRIDGE {
				t.Error("not void where others were not heard of")
			}
		})
	}
	// Where nothing is at an address of which something was known.
	n := told(a, b)
	n.commit(node{near: n.near}, time.Time{})
	if void, look := n.apply(false, ipNeighbour(bridge, 0, unix.NUD_REACHABLE, c), time.Time{}); void || !look {
		t.Errorf("a neighbour that is no owner becomes another: void %t, look %t", void, look)
	}
	if void, _ := n.apply(false, ipNeighbour(nic, 9, unix.NUD_REACHABLE, b), time.Time{}); void {
		t.Error("a new neighbour at the NIC voids")
	}
	if void, _ := n.apply(false, ipNeighbour(nic, 9, unix.NUD_REACHABLE, c), time.Time{}); !void {
		t.Error("a neighbour at the NIC may become another")
	}
}

// What bridges learn is heard of the addresses of neighbours, before they are owners, of owners
// until they are not, and of devices.
func TestHeard(t *testing.T) {
	a, b, c, own := mac{5: 1}, mac{5: 2}, mac{5: 3}, mac{2: 99}
	n := told(a, b)
	want := func(what string, macs ...mac) {
		t.Helper()
		heard := n.filter.(all)
		if !cmp.Equal(map[mac]bool(heard), n.subscribed) {
			t.Errorf("%s: the filter has %v, want %v", what, heard, n.subscribed)
		}
		set := make(map[mac]bool)
		for _, m := range macs {
			set[m] = true
		}
		if d := cmp.Diff(set, n.subscribed); d != "" {
			t.Errorf("%s: heard (-want +got):\n%s", what, d)
		}
	}
	want("at first", a, b, own)
	n.apply(false, entry(pod1, mac{5: 7}), time.Time{})
	want("an entry", a, b, own)
	n.apply(false, ipNeighbour(bridge, 9, unix.NUD_STALE, c), time.Time{})
	want("a neighbour", a, b, c, own)
	n.apply(true, ipNeighbour(bridge, 0, unix.NUD_STALE, a), time.Time{})
	want("one goes", a, b, c, own)
	of := node{near: n.near, own: n.own, owners: []bpf.LinkMAC{{Link: pod1, MAC: a}, {Link: pod2, MAC: b}}}
	if n.commit(of, time.Time{}) {
		t.Error("void though all owners stay")
	}
	want("it is an owner still", a, b, c, own)
	of.owners = of.owners[1:]
	n.prepare(of.owners)
	if void, _ := n.apply(false, entry(pod2, a), time.Time{}); !void {
		t.Error("it may be an owner while the programs are told")
	}
	if !n.commit(of, time.Time{}) {
		t.Error("not void though one is no owner any more")
	}
	want("it is none", b, c, own)
}

// While the programs are told of owners what is announced of any matters that they have had, or
// may have; when they have been told, what was seen of those that went is void.
func TestOwn(t *testing.T) {
	a, b, c := mac{5: 1}, mac{5: 2}, mac{5: 3}
	var generation uint32
	ch := &invalidator{neighbours: told(a, b), notify: func(g uint32, _ bool) { generation = g }}
	ch.neighbours.apply(false, ipNeighbour(bridge, 9, unix.NUD_REACHABLE, c), time.Time{})
	of := node{near: ch.neighbours.near, own: ch.neighbours.own, owners: []bpf.LinkMAC{{Link: pod2, MAC: b}, {Link: pod1, MAC: c}, {Link: pod1, MAC: mac{5: 9}}}}
	set := func(owners []bpf.LinkMAC) error {
		if want := of.owners[:2]; !slices.Equal(owners, want) {
			t.Errorf("told of %v, want %v", owners, want)
		}
		for _, m := range []mac{a, b, c} {
			before := generation
			ch.handle(unix.NETLINK_ROUTE, []syscall.NetlinkMessage{{Header: syscall.NlMsghdr{Type: unix.RTM_NEWNEIGH}, Data: entry(pod2, m)}}, time.Now())
			if generation == before {
				t.Errorf("that %v moved meanwhile is not void", m)
			}
		}
		generation = 0
		return nil
	}
	if _, err := ch.setLinkMACs(&of, set); err != nil || generation == 0 {
		t.Errorf("generation %d though one went, error %v", generation, err)
	}
	generation = 0
	if _, err := ch.setLinkMACs(&of, func([]bpf.LinkMAC) error { return nil }); err != nil || generation != 0 {
		t.Errorf("generation %d though none went, error %v", generation, err)
	}
}

// However many addresses there are, few are kept; what finds no room is not taken for what was
// never there.
func TestNeighboursBound(t *testing.T) {
	n := told(mac{5: 1}, mac{5: 2})
	for i := range uint32(3 * neighboursMax) {
		m := mac{1: 2}
		binary.BigEndian.PutUint32(m[2:], i)
		n.apply(false, entry(pod1, m), time.Time{})
		if len(n.subscribed) != 3 {
			t.Fatalf("%d addresses are heard of", len(n.subscribed))
		}
	}
	say := func(i uint32, state uint16) (void bool) {
		m := mac{1: 3}
		binary.BigEndian.PutUint32(m[2:], i)
		ip := binary.BigEndian.AppendUint32(nil, 0x0b000000+i)
		void, _ = n.apply(false, about(unix.AF_INET, bridge, state, nl.NewRtAttr(unix.NDA_DST, ip), nl.NewRtAttr(unix.NDA_LLADDR, m[:])), time.Time{})
		return void
	}
	for i := range uint32(neighboursMax - 2) {
		if say(i, unix.NUD_REACHABLE) {
			t.Fatalf("neighbour %d voids", i)
		}
	}
	for i := uint32(neighboursMax); i < 2*neighboursMax; i++ {
		if !say(i, unix.NUD_REACHABLE) || !say(i, unix.NUD_FAILED) {
			t.Fatalf("neighbour %d, which is not known, does not matter", i)
		}
	}
	if len(n.usable) > neighboursMax {
		t.Errorf("%d neighbours are known", len(n.usable))
	}
	n.overrun()
	n.merge(nil, time.Time{})
	if !n.complete || say(1, unix.NUD_FAILED) {
		t.Error("not complete after a list")
	}
}

// A list completes what was heard, which is newer.
func TestFind(t *testing.T) {
	a, b, c := mac{5: 1}, mac{5: 2}, mac{5: 3}
	n := told(a, b)
	n.overrun()
	n.apply(false, ipNeighbour(bridge, 0, unix.NUD_REACHABLE, c), time.Time{})
	n.merge([]netlink.Neigh{
		{LinkIndex: bridge, IP: []byte{10, 0, 0, 0}, State: unix.NUD_REACHABLE, HardwareAddr: a[:]},
		{LinkIndex: bridge, IP: []byte{10, 0, 0, 1}, State: unix.NUD_STALE, HardwareAddr: b[:]},
		{LinkIndex: bridge, IP: []byte{10, 0, 0, 2}, State: unix.NUD_FAILED},
	}, time.Time{})
	want := map[neighbour]string{
		{bridge, netip.MustParseAddr("10.0.0.0")}: string(c[:]),
		{bridge, netip.MustParseAddr("10.0.0.1")}: string(b[:]),
	}
	if d := cmp.Diff(want, n.usable, cmp.AllowUnexported(neighbour{}), cmp.Comparer(func(a, b neighbour) bool { return a == b })); d != "" || !n.complete {
		t.Errorf("complete %t, usable (-want +got):\n%s", n.complete, d)
	}
	list := n.list(time.Time{})
	if len(list) != 2 || list[0].IP.String() != "10.0.0.0" || list[1].IP.String() != "10.0.0.1" {
		t.Errorf("listed are %v", list)
	}
}

// A link has so many owners and no more, those that are heard of; one where they change all the
// time has none for a while, and the others keep theirs.
func TestAdmit(t *testing.T) {
	a, b := mac{5: 1}, mac{5: 2}
	n := told(a, b)
	var many []bpf.LinkMAC
	for i := range 2 * linkMACsMax {
		m := mac{4: 1, 5: byte(i)}
		n.subscribed[m] = true
		many = append(many, bpf.LinkMAC{Link: pod1, MAC: m})
	}
	other := bpf.LinkMAC{Link: pod2, MAC: b}
	owners := slices.Concat(many, []bpf.LinkMAC{other, other, {Link: pod2, MAC: mac{5: 77}}})
	now := time.Now()
	got, restless := n.admit(owners, now)
	if want := append([]bpf.LinkMAC{other}, many[:linkMACsMax]...); !slices.Equal(got, want) || restless != nil {
		t.Errorf("admitted %v, restless %v, want %v", got, restless, want)
	}
	crowd := append([]bpf.LinkMAC{{Link: pod1, MAC: a}}, owners...)
	slices.Reverse(crowd)
	if got, _ := n.admit(crowd, now); len(got) != linkMACsMax+1 || got[1] != crowd[len(crowd)-1] {
		t.Errorf("one that was there before made room: %v", got)
	}
	for i := range changesMax {
		now = now.Add(time.Millisecond)
		if void, _ := n.apply(false, entry(pod2, a), now); !void {
			t.Fatal("a pod's address moves, and that is not void")
		}
		if _, restless := n.admit(owners, now); restless != nil {
			t.Fatalf("restless %v after %d changes", restless, i+1)
		}
	}
	n.apply(false, entry(pod2, a), now)
	got, restless = n.admit(owners, now)
	if !slices.Equal(got, []bpf.LinkMAC{other}) || !slices.Equal(restless, []int{pod1}) {
		t.Errorf("admitted %v, restless %v after so many changes", got, restless)
	}
	n.commit(node{owners: got, near: n.near}, now)
	if void, _ := n.apply(false, entry(pod2, a), now); void {
		t.Error("what is at a link without owners matters")
	}
	for range 2 * changesMax { // it is heard of as a neighbour's
		if void, look := n.apply(false, entry(pod2, a), now); void || look != n.subscribed[a] {
			t.Fatalf("void %t, look %t, heard of %t", void, look, n.subscribed[a])
		}
		n.commit(node{owners: got, near: n.near}, now)
	}
	if n.subscribed[a] {
		t.Error("an address is heard of that moves all the time and is no owner")
	}
	for _, o := range many {
		n.subscribed[o.MAC] = true
	}
	n.list(now)
	if n.subscribed[a] {
		t.Error("it is heard of again at once")
	}
	now = now.Add(changesWithin + 1)
	n.list(now)
	if got, restless = n.admit(owners, now); len(got) != linkMACsMax+1 || restless != nil {
		t.Errorf("admitted %d, restless %v some time after", len(got), restless)
	}
	n.commit(node{owners: got, near: n.near}, now)
	if !n.subscribed[a] {
		t.Error("it is not heard of again")
	}
	if len(n.changed)+len(n.moved) > 0 {
		t.Errorf("%v, %v are remembered", n.changed, n.moved)
	}
}

// FuzzSays has whatever is announced be gone by or held to matter, and little be kept of it.
func FuzzSays(f *testing.F) {
	f.Add(byte(unix.RTM_NEWNEIGH), entry(pod1, mac{5: 3}))
	f.Add(byte(unix.RTM_DELNEIGH), ipNeighbour(bridge, 1, unix.NUD_STALE, mac{5: 1}))
	f.Add(byte(unix.RTM_NEWLINK), append(make([]byte, 16), nl.NewRtAttr(unix.IFLA_IFNAME, []byte("eth0")).Serialize()...))
	f.Fuzz(func(t *testing.T, kind byte, data []byte) {
		c := &invalidator{links: make(map[string]string), neighbours: told(mac{5: 1}, mac{5: 2}), notify: func(uint32, bool) {}}
		message := syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: uint16(kind)}, Data: data}
		first, _ := c.apply(unix.NETLINK_ROUTE, message, time.Time{})
		if len(c.neighbours.usable) > 3 || len(c.neighbours.subscribed) > 4 || len(c.links) > 1 {
			t.Errorf("it is kept more than once: %v, %v, %v", c.neighbours.usable, c.neighbours.subscribed, c.links)
		}
		// What is known already changes nothing, unless it is about owners or not understood.
		m, err := neighbourOf(data)
		if void, _ := c.apply(unix.NETLINK_ROUTE, message, time.Time{}); void && !first && err == nil && m.family != unix.AF_BRIDGE {
			t.Errorf("%x is void when it is said again", data)
		}
	})
}
