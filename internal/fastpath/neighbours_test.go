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

	"slipstream.dev/internal/fastpath/datapath"
)

// all is a MAC filter that records the addresses that it passes.
type all map[mac]bool

func (a all) Subscribe(m [6]byte) error   { a[m] = true; return nil }
func (a all) Unsubscribe(m [6]byte) error { delete(a, m); return nil }

const bridge, pod1, pod2, nic, vxlan = 1, 2, 3, 4, 5

// knownPods returns the neighbours of a node with two pods, whose MAC addresses are a and b; the
// programs have both.
func knownPods(a, b mac) *neighbours {
	n := newNeighbours(all{})
	n.complete = true
	for i, m := range []mac{a, b} {
		n.apply(false, ipNeighbour(bridge, uint8(i), unix.NUD_REACHABLE, m), time.Time{})
	}
	n.commit(node{
		owners: []datapath.LinkMAC{{Link: pod1, MAC: a}, {Link: pod2, MAC: b}},
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

// ipNeighbour returns a message about the neighbour 10.0.0.last.
func ipNeighbour(device int, last byte, state uint16, m mac) []byte {
	attrs := []*nl.RtAttr{nl.NewRtAttr(unix.NDA_DST, []byte{10, 0, 0, last})}
	if state&usableStates != 0 {
		attrs = append(attrs, nl.NewRtAttr(unix.NDA_LLADDR, m[:]))
	}
	return about(unix.AF_INET, device, state, attrs...)
}

// entry returns a message about an FDB entry of the bridge.
func entry(port int, m mac) []byte {
	return about(unix.AF_BRIDGE, port, unix.NUD_REACHABLE, nl.NewRtAttr(unix.NDA_LLADDR, m[:]), nl.NewRtAttr(unix.NDA_MASTER, nl.Uint32Attr(bridge)))
}

// TestNeighbourMessages checks which neighbour notifications invalidate the flows, because they may contradict them, and which
// cause a scan of the devices, because a MAC address may have a new owner.
func TestNeighbourMessages(t *testing.T) {
	a, b, c := mac{5: 1}, mac{5: 2}, mac{5: 3}
	for _, tt := range []struct {
		name             string
		gone             bool
		message          []byte
		invalidate, look bool
	}{
		{"bridge learns an unknown MAC", false, entry(pod1, c), false, false},
		{"bridge deletes an unknown MAC", true, entry(pod1, c), false, false},
		{"bridge learns a pod's MAC at another link", false, entry(pod2, a), true, true},
		{"bridge learns a pod's MAC in another VLAN", false, append(entry(pod1, a), nl.NewRtAttr(unix.NDA_VLAN, nl.Uint16Attr(7)).Serialize()...), true, true},
		{"bridge deletes a pod's MAC", true, entry(pod1, a), true, true},
		{"bridge learns the MAC of a device of the node", false, entry(pod1, mac{2: 99}), true, true},
		{"FDB entry of a VXLAN device", false, about(unix.AF_BRIDGE, vxlan, unix.NUD_PERMANENT, nl.NewRtAttr(unix.NDA_LLADDR, c[:])), true, true},
		{"NUD_FAILED", false, ipNeighbour(bridge, 9, unix.NUD_FAILED, c), false, false},
		{"NUD_INCOMPLETE", false, ipNeighbour(bridge, 9, unix.NUD_INCOMPLETE, c), false, false},
		{"NUD_FAILED deleted", true, ipNeighbour(bridge, 9, unix.NUD_FAILED, c), false, false},
		{"NUD_FAILED at the NIC", false, ipNeighbour(nic, 9, unix.NUD_FAILED, c), false, false},
		{"new neighbour", false, ipNeighbour(bridge, 9, unix.NUD_REACHABLE, c), false, true},
		{"new neighbour at the NIC", false, ipNeighbour(nic, 9, unix.NUD_REACHABLE, c), false, false},
		{"new neighbour at a new device", false, ipNeighbour(6, 9, unix.NUD_REACHABLE, c), false, true},
		{"pod confirmed", false, ipNeighbour(bridge, 0, unix.NUD_STALE, a), false, false},
		{"pod NUD_FAILED", false, ipNeighbour(bridge, 0, unix.NUD_FAILED, a), true, true},
		{"pod deleted", true, ipNeighbour(bridge, 0, unix.NUD_STALE, a), true, true},
		{"pod's address at another MAC", false, ipNeighbour(bridge, 0, unix.NUD_REACHABLE, b), true, true},
		{"truncated message", false, entry(pod1, c)[:11], true, true},
		{"truncated attribute", false, entry(pod1, c)[:len(entry(pod1, c))-2], true, true},
		{"truncated master", false, about(unix.AF_BRIDGE, pod1, 0, nl.NewRtAttr(unix.NDA_LLADDR, c[:]), nl.NewRtAttr(unix.NDA_MASTER, []byte{1})), true, true},
		{"address of another length", false, about(unix.AF_INET, bridge, unix.NUD_REACHABLE, nl.NewRtAttr(unix.NDA_DST, []byte{1})), true, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := knownPods(a, b)
			if invalidate, look := n.apply(tt.gone, tt.message, time.Time{}); invalidate != tt.invalidate || look != tt.look {
				t.Errorf("invalidate %t, resync %t, want %t, %t", invalidate, look, tt.invalidate, tt.look)
			}
			// A notification about an unknown neighbour always invalidates: it may have been usable
			// before.
			n = knownPods(a, b)
			n.overrun()
			if invalidate, _ := n.apply(tt.gone, tt.message, time.Time{}); !invalidate && tt.message[0] != unix.AF_BRIDGE {
				t.Error("no invalidation after lost notifications")
			}
		})
	}
	// A known IP neighbour without an owner.
	n := knownPods(a, b)
	n.commit(node{near: n.near}, time.Time{})
	if invalidate, look := n.apply(false, ipNeighbour(bridge, 0, unix.NUD_REACHABLE, c), time.Time{}); invalidate || !look {
		t.Errorf("a neighbour without an owner changes its MAC: invalidate %t, resync %t", invalidate, look)
	}
	if invalidate, _ := n.apply(false, ipNeighbour(nic, 9, unix.NUD_REACHABLE, b), time.Time{}); invalidate {
		t.Error("a new neighbour at the NIC invalidates")
	}
	if invalidate, _ := n.apply(false, ipNeighbour(nic, 9, unix.NUD_REACHABLE, c), time.Time{}); !invalidate {
		t.Error("a neighbour at the NIC that changes its MAC does not invalidate")
	}
}

// TestSubscribedMACs checks the subscriptions to FDB notifications: for the MAC addresses of
// neighbours, even before they are owners; of owners, as long as they are; and of devices.
func TestSubscribedMACs(t *testing.T) {
	a, b, c, own := mac{5: 1}, mac{5: 2}, mac{5: 3}, mac{2: 99}
	n := knownPods(a, b)
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
			t.Errorf("%s: subscribed (-want +got):\n%s", what, d)
		}
	}
	want("at first", a, b, own)
	n.apply(false, entry(pod1, mac{5: 7}), time.Time{})
	want("an FDB entry", a, b, own)
	n.apply(false, ipNeighbour(bridge, 9, unix.NUD_STALE, c), time.Time{})
	want("a neighbour", a, b, c, own)
	n.apply(true, ipNeighbour(bridge, 0, unix.NUD_STALE, a), time.Time{})
	want("neighbour deleted", a, b, c, own)
	of := node{near: n.near, own: n.own, owners: []datapath.LinkMAC{{Link: pod1, MAC: a}, {Link: pod2, MAC: b}}}
	if n.commit(of, time.Time{}) {
		t.Error("invalidated though all owners stay")
	}
	want("still an owner", a, b, c, own)
	of.owners = of.owners[1:]
	n.prepare(of.owners)
	if invalidate, _ := n.apply(false, entry(pod2, a), time.Time{}); !invalidate {
		t.Error("an old owner does not invalidate while the maps are updated")
	}
	if !n.commit(of, time.Time{}) {
		t.Error("not invalidated though an owner has gone")
	}
	want("no longer an owner", b, c, own)
}

// TestOwnersUpdate checks that while the maps of owners are updated, a notification about any old
// or new owner invalidates the flows, and that the flows are invalidated afterwards if an owner has
// gone.
func TestOwnersUpdate(t *testing.T) {
	a, b, c := mac{5: 1}, mac{5: 2}, mac{5: 3}
	var generation uint32
	ch := &invalidator{neighbours: knownPods(a, b), notify: func(g uint32, _ bool) { generation = g }}
	ch.neighbours.apply(false, ipNeighbour(bridge, 9, unix.NUD_REACHABLE, c), time.Time{})
	of := node{near: ch.neighbours.near, own: ch.neighbours.own, owners: []datapath.LinkMAC{{Link: pod2, MAC: b}, {Link: pod1, MAC: c}, {Link: pod1, MAC: mac{5: 9}}}}
	set := func(owners []datapath.LinkMAC) error {
		if want := of.owners[:2]; !slices.Equal(owners, want) {
			t.Errorf("owners are %v, want %v", owners, want)
		}
		for _, m := range []mac{a, b, c} {
			before := generation
			ch.handle(unix.NETLINK_ROUTE, []syscall.NetlinkMessage{{Header: syscall.NlMsghdr{Type: unix.RTM_NEWNEIGH}, Data: entry(pod2, m)}}, time.Now())
			if generation == before {
				t.Errorf("a move of %v meanwhile does not invalidate", m)
			}
		}
		generation = 0
		return nil
	}
	if _, err := ch.setLinkMACs(&of, set); err != nil || generation == 0 {
		t.Errorf("generation %d though an owner has gone, error %v", generation, err)
	}
	generation = 0
	if _, err := ch.setLinkMACs(&of, func([]datapath.LinkMAC) error { return nil }); err != nil || generation != 0 {
		t.Errorf("generation %d though no owner has gone, error %v", generation, err)
	}
}

// TestNeighboursBound checks that the number of stored addresses is limited, and that an address for which there is no room is
// not mistaken for an unknown one.
func TestNeighboursBound(t *testing.T) {
	n := knownPods(mac{5: 1}, mac{5: 2})
	for i := range uint32(3 * neighboursMax) {
		m := mac{1: 2}
		binary.BigEndian.PutUint32(m[2:], i)
		n.apply(false, entry(pod1, m), time.Time{})
		if len(n.subscribed) != 3 {
			t.Fatalf("%d addresses are subscribed to", len(n.subscribed))
		}
	}
	say := func(i uint32, state uint16) (invalidate bool) {
		m := mac{1: 3}
		binary.BigEndian.PutUint32(m[2:], i)
		ip := binary.BigEndian.AppendUint32(nil, 0x0b000000+i)
		invalidate, _ = n.apply(false, about(unix.AF_INET, bridge, state, nl.NewRtAttr(unix.NDA_DST, ip), nl.NewRtAttr(unix.NDA_LLADDR, m[:])), time.Time{})
		return invalidate
	}
	for i := range uint32(neighboursMax - 2) {
		if say(i, unix.NUD_REACHABLE) {
			t.Fatalf("neighbour %d invalidates", i)
		}
	}
	for i := uint32(neighboursMax); i < 2*neighboursMax; i++ {
		if !say(i, unix.NUD_REACHABLE) || !say(i, unix.NUD_FAILED) {
			t.Fatalf("neighbour %d, which is unknown, does not invalidate", i)
		}
	}
	if len(n.usable) > neighboursMax {
		t.Errorf("%d neighbours are stored", len(n.usable))
	}
	n.overrun()
	n.merge(nil, time.Time{})
	if !n.complete || say(1, unix.NUD_FAILED) {
		t.Error("not complete after a list")
	}
}

// TestNeighbourList checks that a dump adds to the neighbours of notifications that came after the request, and does not
// replace them.
func TestNeighbourList(t *testing.T) {
	a, b, c := mac{5: 1}, mac{5: 2}, mac{5: 3}
	n := knownPods(a, b)
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
		t.Errorf("list returns %v", list)
	}
}

// TestOwnersPerLink checks that a link has a bounded number of owners, all of them subscribed to,
// and that a link whose owners change all the time has none for a while, without affecting other
// links.
func TestOwnersPerLink(t *testing.T) {
	a, b := mac{5: 1}, mac{5: 2}
	n := knownPods(a, b)
	var many []datapath.LinkMAC
	for i := range 2 * linkMACsMax {
		m := mac{4: 1, 5: byte(i)}
		n.subscribed[m] = true
		many = append(many, datapath.LinkMAC{Link: pod1, MAC: m})
	}
	other := datapath.LinkMAC{Link: pod2, MAC: b}
	owners := slices.Concat(many, []datapath.LinkMAC{other, other, {Link: pod2, MAC: mac{5: 77}}})
	now := time.Now()
	got, restless := n.admit(owners, now)
	if want := append([]datapath.LinkMAC{other}, many[:linkMACsMax]...); !slices.Equal(got, want) || restless != nil {
		t.Errorf("admitted %v, restless %v, want %v", got, restless, want)
	}
	reordered := append([]datapath.LinkMAC{{Link: pod1, MAC: a}}, owners...)
	slices.Reverse(reordered)
	if got, _ := n.admit(reordered, now); len(got) != linkMACsMax+1 || got[1] != reordered[len(reordered)-1] {
		t.Errorf("an earlier owner was evicted: %v", got)
	}
	for i := range changesMax {
		now = now.Add(time.Millisecond)
		if invalidate, _ := n.apply(false, entry(pod2, a), now); !invalidate {
			t.Fatal("a move of a pod's MAC does not invalidate")
		}
		if _, restless := n.admit(owners, now); restless != nil {
			t.Fatalf("restless %v after %d changes", restless, i+1)
		}
	}
	n.apply(false, entry(pod2, a), now)
	got, restless = n.admit(owners, now)
	if !slices.Equal(got, []datapath.LinkMAC{other}) || !slices.Equal(restless, []int{pod1}) {
		t.Errorf("admitted %v, restless %v after so many changes", got, restless)
	}
	n.commit(node{owners: got, near: n.near}, now)
	if invalidate, _ := n.apply(false, entry(pod2, a), now); invalidate {
		t.Error("a MAC at a link without owners invalidates")
	}
	for range 2 * changesMax { // subscribed to as a neighbour's MAC
		if invalidate, look := n.apply(false, entry(pod2, a), now); invalidate || look != n.subscribed[a] {
			t.Fatalf("invalidate %t, resync %t, subscribed %t", invalidate, look, n.subscribed[a])
		}
		n.commit(node{owners: got, near: n.near}, now)
	}
	if n.subscribed[a] {
		t.Error("a MAC that moves all the time and is no owner is subscribed to")
	}
	for _, o := range many {
		n.subscribed[o.MAC] = true
	}
	n.list(now)
	if n.subscribed[a] {
		t.Error("subscribed to again at once")
	}
	now = now.Add(changesWithin + 1)
	n.list(now)
	if got, restless = n.admit(owners, now); len(got) != linkMACsMax+1 || restless != nil {
		t.Errorf("admitted %d, restless %v some time after", len(got), restless)
	}
	n.commit(node{owners: got, near: n.near}, now)
	if !n.subscribed[a] {
		t.Error("not subscribed to again")
	}
	if len(n.changed)+len(n.moved) > 0 {
		t.Errorf("%v, %v are still stored", n.changed, n.moved)
	}
}

// FuzzNeighbourMessages checks that any message is either ignored or acted on, and that it stores
// little.
func FuzzNeighbourMessages(f *testing.F) {
	f.Add(byte(unix.RTM_NEWNEIGH), entry(pod1, mac{5: 3}))
	f.Add(byte(unix.RTM_DELNEIGH), ipNeighbour(bridge, 1, unix.NUD_STALE, mac{5: 1}))
	f.Add(byte(unix.RTM_NEWLINK), append(make([]byte, 16), nl.NewRtAttr(unix.IFLA_IFNAME, []byte("eth0")).Serialize()...))
	f.Fuzz(func(t *testing.T, kind byte, data []byte) {
		c := &invalidator{links: make(map[string]string), neighbours: knownPods(mac{5: 1}, mac{5: 2}), notify: func(uint32, bool) {}}
		message := syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: uint16(kind)}, Data: data}
		first, _ := c.apply(unix.NETLINK_ROUTE, message, time.Time{})
		if len(c.neighbours.usable) > 3 || len(c.neighbours.subscribed) > 4 || len(c.links) > 1 {
			t.Errorf("stored more than once: %v, %v, %v", c.neighbours.usable, c.neighbours.subscribed, c.links)
		}
		// Repeating a message changes nothing, unless it is about owners or cannot be parsed.
		m, err := neighbourOf(data)
		if invalidate, _ := c.apply(unix.NETLINK_ROUTE, message, time.Time{}); invalidate && !first && err == nil && m.family != unix.AF_BRIDGE {
			t.Errorf("%x invalidates when repeated", data)
		}
	})
}
