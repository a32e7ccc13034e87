//go:build linux

package fastpath

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/bpf"
)

// A pod may send frames from any number of made-up Ethernet addresses, answer for addresses of
// others, and have the node look for neighbours that are not there. All of it is announced, and
// little of it matters:
//
//   - What was seen of packets to a pod is believed of an owner alone, which is an Ethernet address
//     at a link (see deliver in bpf/fastpath.c). So what a bridge learns of any other address makes
//     nothing untrue. It is not even heard: a filter keeps it from the socket.
//   - Owners are addresses that neighbours of IP have, as it is to them that a node sends what it
//     routes. So what a bridge learns of these is to be looked at, and no more than these.
//   - A neighbour of IP that packets could not be sent to was on nobody's way. Where one becomes
//     usable, what was sent until then went another way, which is as good as before.
//   - A neighbour by whose Ethernet address nothing is believed to be reached may become another.
//     That holds for links of pods. By NICs and VXLAN devices packets leave, of which there are no
//     owners: of their neighbours all matters.
//
// What does matter a pod can cause too, by taking another's Ethernet address, say: the kernel
// then sends it what is for the other, and packets have to follow. A link where that happens
// again and again has no owners for a while, so that it matters no more, and an address that is no
// owner is not heard of for a while.

const (
	// neighboursMax bounds how many neighbours are known. The kernel keeps 1,024 of a version of
	// IP if not told otherwise (net.ipv4.neigh.default.gc_thresh3).
	neighboursMax = 32768
	// linkMACsMax bounds the owners of a link: no pod is to fill the table.
	linkMACsMax = 32
	// changesMax is after how many changes within changesWithin a link has no owners for as long,
	// and an address is not heard of.
	changesMax = 8
)

// Tests have less patience.
var changesWithin = 10 * time.Second

type mac [6]byte

// macOf is an Ethernet address, if it is one.
func macOf(b []byte) (m mac, ok bool) { return m, copy(m[:], b) == len(m) && len(b) == len(m) }

// neighbour is whom a node speaks to by one of its devices.
type neighbour struct {
	device int
	ip     netip.Addr
}

// hearing is what a filter lets through: see bpf.Neighbours.
type hearing interface {
	Hear(address [6]byte) error
	Ignore(address [6]byte) error
}

// neighbours are those of a node. It is not safe for concurrent use.
type neighbours struct {
	hearing hearing
	// usable are those that packets are sent to at once, by their link-layer addresses; if
	// complete, all.
	usable   map[neighbour]string
	complete bool
	// heard are the addresses of which is heard what bridges learn: those of usable, and more.
	heard map[mac]bool
	// owners are at which links there may be owners in the programs' table.
	owners map[mac][]int
	// near are the devices that pods may be behind, own the addresses of devices, as of the last look.
	near map[int]bool
	own  map[mac]bool
	// changed counts what has changed of the owners of links, and moved what bridges have learned
	// of addresses that are heard of.
	changed frequencies[int]
	moved   frequencies[mac]
}

// frequencies are how often something happened to each of some things lately, and since when.
type frequencies[K comparable] map[K]struct {
	times int
	since time.Time
}

func (f frequencies[K]) count(k K, now time.Time) {
	at := f[k]
	if at.times == 0 || now.Sub(at.since) > changesWithin {
		at.times, at.since = 0, now
	}
	at.times++
	if at.times == changesMax+1 {
		at.since = now
	}
	f[k] = at
}

// often tells whether something happens too often.
func (f frequencies[K]) often(k K, now time.Time) bool {
	at := f[k]
	return at.times > changesMax && now.Sub(at.since) <= changesWithin
}

// any tells whether it did for anything.
func (f frequencies[K]) any() bool {
	for _, at := range f {
		if at.times > changesMax {
			return true
		}
	}
	return false
}

// forget forgets what happened long ago.
func (f frequencies[K]) forget(now time.Time) {
	for k, at := range f {
		if now.Sub(at.since) > changesWithin {
			delete(f, k)
		}
	}
}

func newNeighbours(h hearing) *neighbours {
	return &neighbours{hearing: h, usable: make(map[neighbour]string), heard: make(map[mac]bool), changed: make(frequencies[int]), moved: make(frequencies[mac])}
}

// says tells of a message about a neighbour whether something that was seen may not be so any
// more, and whether the devices are to be looked at.
func (n *neighbours) says(gone bool, data []byte, now time.Time) (void, look bool) {
	m, err := neighbourOf(data)
	if err != nil {
		return true, true
	}
	if m.family == unix.AF_BRIDGE {
		address, ok := macOf(m.address)
		if m.master == 0 || !ok {
			return true, true // of a VXLAN device
		}
		if !n.heard[address] {
			return false, false // the filter was not there yet, or was just told
		}
		// Of an owner all is heard, which ends when its link has none.
		if n.moved.count(address, now); n.moved.often(address, now) && len(n.owners[address]) == 0 {
			n.ignore(address)
		}
		return n.matters(address, now), true
	}
	ip, ok := netip.AddrFromSlice(m.destination)
	if !ok {
		return true, true
	}
	key, is := neighbour{m.device, ip}, ""
	if !gone && m.state&usable != 0 {
		is = string(m.address)
	}
	was := n.usable[key]
	switch {
	case is == was:
		return !n.complete, false
	case is == "":
		delete(n.usable, key)
	default:
		n.know(key, is, now)
	}
	near, seen := n.near[m.device]
	look = near || !seen
	if was == "" {
		return !n.complete, look
	}
	address, ok := macOf([]byte(was))
	return !ok || !near || n.matters(address, now), look
}

// matters tells whether there may be an owner of an address, of which something has changed.
func (n *neighbours) matters(address mac, now time.Time) bool {
	for _, link := range n.owners[address] {
		n.changed.count(link, now)
	}
	return len(n.owners[address]) > 0 || n.own[address]
}

// know notes a neighbour that is usable, if there is room. What bridges learn of its address is
// heard from then on, before anybody asks them where it is.
func (n *neighbours) know(key neighbour, address string, now time.Time) {
	if _, known := n.usable[key]; !known && len(n.usable) >= neighboursMax {
		n.complete = false
		return
	}
	n.usable[key] = address
	if m, ok := macOf([]byte(address)); ok {
		n.hear(m, now)
	}
}

// hear has it be heard what bridges learn of an address. If there is no room it becomes no owner.
func (n *neighbours) hear(m mac, now time.Time) {
	if !n.heard[m] && !n.moved.often(m, now) && n.hearing.Hear(m) == nil {
		n.heard[m] = true
	}
}

func (n *neighbours) ignore(m mac) {
	if n.hearing.Ignore(m) == nil {
		delete(n.heard, m)
	}
}

// lose has nothing be known of neighbours: not all of what was announced was heard.
func (n *neighbours) lose() {
	clear(n.usable)
	n.complete = false
}

// find adds those of a list that are not known. A list may be older than what was heard: what has
// gone since it has still, and is wrong at its next change about there having been something to change.
func (n *neighbours) find(all []netlink.Neigh, now time.Time) {
	n.complete = true
	for _, at := range all {
		ip, ok := netip.AddrFromSlice(at.IP)
		if key := (neighbour{at.LinkIndex, ip}); ok && at.State&usable != 0 && n.usable[key] == "" {
			n.know(key, string(at.HardwareAddr), now)
		}
	}
}

// list returns those that are known, in an order that stays. Of those that were not heard of for a
// while it is heard again from then on.
func (n *neighbours) list(now time.Time) (all []netlink.Neigh) {
	for key, address := range n.usable {
		n.know(key, address, now)
		family := netlink.FAMILY_V6
		if key.ip.Is4() {
			family = netlink.FAMILY_V4
		}
		all = append(all, netlink.Neigh{LinkIndex: key.device, Family: family, IP: key.ip.AsSlice(), HardwareAddr: net.HardwareAddr(address)})
	}
	slices.SortFunc(all, func(a, b netlink.Neigh) int {
		return cmp.Or(a.LinkIndex-b.LinkIndex, slices.Compare(a.IP, b.IP))
	})
	return all
}

// admit leaves out owners that are too many for their link, those that were there before going
// first, or not heard of, and all of links where they change too often, which it returns.
func (n *neighbours) admit(owners []bpf.LinkMAC, now time.Time) (admitted []bpf.LinkMAC, restless []int) {
	seen := make(map[bpf.LinkMAC]bool)
	of := make(map[int]int)
	for _, known := range []bool{true, false} {
		for _, o := range owners {
			switch {
			case n.changed.often(o.Link, now):
				restless = append(restless, o.Link)
			case slices.Contains(n.owners[o.MAC], o.Link) == known && !seen[o] && n.heard[o.MAC] && of[o.Link] < linkMACsMax:
				seen[o] = true
				of[o.Link]++
				admitted = append(admitted, o)
			}
		}
	}
	slices.Sort(restless)
	return admitted, slices.Compact(restless)
}

// expect notes owners that the programs are about to be told of, beside those that they know.
func (n *neighbours) expect(owners []bpf.LinkMAC) {
	all := make(map[mac][]int)
	maps.Copy(all, n.owners)
	for _, o := range owners {
		if !slices.Contains(all[o.MAC], o.Link) {
			all[o.MAC] = append(slices.Clip(all[o.MAC]), o.Link)
		}
	}
	n.owners = all
}

// settle notes what a node was seen to have: its owners are those alone that the programs were
// told of. It tells whether some are not any more, so that what was seen of them is to be void:
// what will be announced of them is not heard.
func (n *neighbours) settle(of node, now time.Time) (void bool) {
	before := n.owners
	n.owners, n.near, n.own = nil, of.near, of.own
	n.expect(of.owners)
	for address, links := range before {
		for _, link := range links {
			void = void || !slices.Contains(n.owners[address], link)
		}
	}
	n.changed.forget(now)
	n.moved.forget(now)
	keep := make(map[mac]bool)
	maps.Copy(keep, of.own)
	for address := range n.owners {
		keep[address] = true
	}
	for _, address := range n.usable {
		if m, ok := macOf([]byte(address)); ok {
			keep[m] = true
		}
	}
	for address := range keep {
		n.hear(address, now)
	}
	for address := range n.heard {
		if !keep[address] {
			n.ignore(address)
		}
	}
	return void
}

// States of a neighbour in which packets are sent to it at once (NUD_VALID in
// include/net/neighbour.h, less those without an address).
const usable = unix.NUD_PERMANENT | unix.NUD_NOARP | unix.NUD_REACHABLE | unix.NUD_PROBE | unix.NUD_STALE | unix.NUD_DELAY

// neighbourUpdate is what a message says of a neighbour.
type neighbourUpdate struct {
	family               byte
	device, master       int
	state                uint16
	destination, address []byte
}

// neighbourOf reads a message about a neighbour.
func neighbourOf(data []byte) (m neighbourUpdate, err error) {
	// struct ndmsg: family, 3 of padding, index, state, flags, type.
	if len(data) < unix.SizeofNdMsg {
		return m, errors.New("it is cut short")
	}
	m.family = data[0]
	m.device = int(int32(binary.NativeEndian.Uint32(data[4:])))
	m.state = binary.NativeEndian.Uint16(data[8:])
	err = attributes(data[unix.SizeofNdMsg:], func(kind uint16, value []byte) {
		switch kind {
		case unix.NDA_DST:
			m.destination = value
		case unix.NDA_LLADDR:
			m.address = value
		case unix.NDA_MASTER:
			if len(value) == 4 {
				m.master = int(int32(binary.NativeEndian.Uint32(value)))
			}
		}
	})
	return m, err
}

// attributes calls take for each attribute of a message, until one is cut short. That of the
// netlink package fails where the last one is not padded.
func attributes(b []byte, take func(kind uint16, value []byte)) error {
	for len(b) >= unix.SizeofNlAttr {
		length := int(binary.NativeEndian.Uint16(b))
		if length < unix.SizeofNlAttr || length > len(b) {
			return errors.New("an attribute is cut short")
		}
		take(binary.NativeEndian.Uint16(b[2:])&^unix.NLA_F_NESTED, b[unix.SizeofNlAttr:length])
		b = b[min(len(b), (length+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1)):]
	}
	return nil
}

// learned asks bridges by which of their links they reach neighbours, and VXLAN devices whether
// they send copies of what they know no destination of: in the calling thread's network
// namespace. It asks for one address after the other: a pod may have a bridge learn any number of
// others, among which they would be listed.
func learned(h *netlink.Handle, links []netlink.Link, known []netlink.Neigh) (all []netlink.Neigh, err error) {
	socket, err := nl.GetNetlinkSocketAt(-1, -1, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer socket.Close()
	f := forwarding{socket: map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: socket}}, asked: make(map[question]bool)}
	of, err := bridgesOf(h, links)
	if err != nil {
		return nil, err
	}
	for _, at := range known {
		address, ok := macOf(at.HardwareAddr)
		if !ok {
			continue
		}
		for _, b := range of[at.LinkIndex] {
			if err := f.ask(question{master: b.index, vlan: b.vlan, address: address}); err != nil {
				return nil, err
			}
		}
	}
	for _, l := range links {
		if l.Type() == "vxlan" {
			if err := f.ask(question{device: l.Attrs().Index}); err != nil {
				return nil, err
			}
		}
	}
	return f.answers, nil
}

// forwarding asks the kernel for entries of bridges and of VXLAN devices.
type forwarding struct {
	socket  map[int]*nl.SocketHandle
	asked   map[question]bool
	answers []netlink.Neigh
}

// question is for an address at a bridge and in a VLAN of it, or at a device.
type question struct {
	master, device int
	vlan           uint16
	address        mac
}

// ask has what the kernel knows be among the answers.
func (f *forwarding) ask(q question) error {
	if f.asked[q] {
		return nil
	}
	f.asked[q] = true
	r := nl.NewNetlinkRequest(unix.RTM_GETNEIGH, 0)
	r.Sockets = f.socket
	about := netlink.Ndmsg{Family: unix.AF_BRIDGE, Index: uint32(q.device)}
	if q.device != 0 {
		about.Flags = unix.NTF_SELF
	}
	r.AddData(&about)
	r.AddData(nl.NewRtAttr(unix.NDA_LLADDR, q.address[:]))
	if q.master != 0 {
		r.AddData(nl.NewRtAttr(unix.NDA_MASTER, nl.Uint32Attr(uint32(q.master))))
	}
	if q.vlan != 0 {
		r.AddData(nl.NewRtAttr(unix.NDA_VLAN, nl.Uint16Attr(q.vlan)))
	}
	replies, err := r.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNEIGH)
	// There is none, or the device has gone since: a change will tell.
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("ask where %s is forwarded to: %w", net.HardwareAddr(q.address[:]), err)
	}
	for _, data := range replies {
		m, err := neighbourOf(data)
		if err != nil {
			return fmt.Errorf("read where %s is forwarded to: %w", net.HardwareAddr(q.address[:]), err)
		}
		f.answers = append(f.answers, netlink.Neigh{LinkIndex: m.device, Family: unix.AF_BRIDGE, MasterIndex: m.master, HardwareAddr: m.address})
	}
	return nil
}

// domain is a bridge, or a VLAN of one that tells them apart.
type domain struct {
	index int
	vlan  uint16
}

// bridgesOf are the bridges that packets may pass to neighbours by a device: the device itself, the
// one that it is a VLAN of, or any. Those of pods that are linked to their node alone pass none.
func bridgesOf(h *netlink.Handle, links []netlink.Link) (map[int][]domain, error) {
	bridges := make(map[int]domain)
	filtering := make(map[int]bool)
	var all []domain
	for _, l := range links {
		b, ok := l.(*netlink.Bridge)
		if !ok {
			continue
		}
		d := domain{index: b.Index}
		if b.VlanFiltering != nil && *b.VlanFiltering {
			filtering[b.Index] = true
			vlans, err := dump("VLANs of bridges", func() ([]domain, error) { return ownVLAN(h, b.Index) })
			if err != nil {
				return nil, err
			}
			if len(vlans) > 0 {
				d = vlans[0]
			}
		}
		bridges[b.Index] = d
		all = append(all, d)
	}
	of := make(map[int][]domain)
	for _, l := range links {
		a := l.Attrs()
		under, over := bridges[a.ParentIndex]
		switch v, isVLAN := l.(*netlink.Vlan); {
		case l.Type() == "bridge":
			of[a.Index] = []domain{bridges[a.Index]}
		case isVLAN && over:
			if filtering[under.index] {
				under.vlan = uint16(v.VlanId)
			}
			of[a.Index] = []domain{under}
		case l.Type() == "vxlan" || l.Type() == "device" || a.MasterIndex == 0 && a.NetNsID >= 0:
		default:
			of[a.Index] = all
		}
	}
	return of, nil
}

// ownVLAN is the VLAN that a bridge's own packets are in that bear no mark of one.
func ownVLAN(h *netlink.Handle, bridge int) (own []domain, err error) {
	vlans, err := h.BridgeVlanList()
	for _, v := range vlans[int32(bridge)] {
		if v.PortVID() {
			own = append(own, domain{bridge, v.Vid})
		}
	}
	return own, err
}
