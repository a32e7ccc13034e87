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

	"slipstream.dev/internal/fastpath/datapath"
	"slipstream.dev/internal/netns"
)

// A pod can send frames from any number of spoofed MAC addresses, answer ARP and NDP for addresses of others, and make the node
// resolve neighbours that do not exist. The kernel announces all of that, but only a few of these notifications may invalidate
// flows:
//
//   - A flow into a pod is validated only for a MAC address that is known to be behind the pod's link (an owner; see observe_pod in
//     bpf/fastpath/fastpath.c). So FDB changes of all other addresses are irrelevant. A socket filter drops
//     their notifications.
//   - Owners are MAC addresses of IP neighbours, because those are where the node sends routed
//     packets. So FDB changes matter for these addresses only.
//   - No packet was sent to an unusable IP neighbour. When one becomes usable, earlier packets
//     took another path, which is still valid.
//   - On the pods' side, a neighbour may change its MAC address unless the old one is an owner.
//     There are no owners behind NICs and VXLAN devices: every change of a neighbour there matters.
//
// A pod can cause relevant changes too, for example by spoofing another pod's MAC address: the kernel then delivers the other
// pod's packets to it, and so must the fast path. A link where that happens too often is throttled: it has no owners for a
// while, so the changes no longer matter. An address that is not an owner is throttled by unsubscribing from it for a while.

const (
	// neighboursMax limits the number of known neighbours. By default the kernel keeps 1,024 for
	// each version of IP (net.ipv4.neigh.default.gc_thresh3).
	neighboursMax = 32768
	// linkMACsMax limits the number of owners of a link, so that no pod can fill the map.
	linkMACsMax = 32
	// A link or an address with more than changesMax changes within changesWithin is throttled for changesWithin.
	changesMax = 8
)

// changesWithin is a variable because tests shorten it.
var changesWithin = 10 * time.Second

type mac [6]byte

// macOf returns b as a MAC address; ok is false if it has another length.
func macOf(b []byte) (m mac, ok bool) { return m, copy(m[:], b) == len(m) && len(b) == len(m) }

// neighbour is the key of an ARP or NDP neighbour.
type neighbour struct {
	device int
	ip     netip.Addr
}

// fdbFilter selects the MAC addresses whose FDB notifications pass: see datapath.NeighbourFilter.
type fdbFilter interface {
	Subscribe(address [6]byte) error
	Unsubscribe(address [6]byte) error
}

// neighbours tracks the neighbours of a node. It is not safe for concurrent use.
type neighbours struct {
	filter fdbFilter
	// usable holds the link-layer addresses of usable neighbours. complete means that none is missing.
	usable   map[neighbour]string
	complete bool
	// subscribed holds the addresses that the filter passes: those in usable, those in owners, and those of devices.
	subscribed map[mac]bool
	// owners maps each MAC address that may be in the programs' map to its links.
	owners map[mac][]int
	// near and own are those of the last scan: see node.
	near map[int]bool
	own  map[mac]bool
	// changed counts changes of owners by link, and moved counts FDB changes by subscribed address.
	changed rates[int]
	moved   rates[mac]
}

// rates counts recent events by key.
type rates[K comparable] map[K]struct {
	times int
	since time.Time
}

func (f rates[K]) count(k K, now time.Time) {
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

// exceeded reports whether a key recently had more than changesMax events.
func (f rates[K]) exceeded(k K, now time.Time) bool {
	at := f[k]
	return at.times > changesMax && now.Sub(at.since) <= changesWithin
}

// anyExceeded reports whether any key had more than changesMax events, even if that was some time
// ago.
func (f rates[K]) anyExceeded() bool {
	for _, at := range f {
		if at.times > changesMax {
			return true
		}
	}
	return false
}

// expire deletes the counts of old events.
func (f rates[K]) expire(now time.Time) {
	for k, at := range f {
		if now.Sub(at.since) > changesWithin {
			delete(f, k)
		}
	}
}

func newNeighbours(filter fdbFilter) *neighbours {
	return &neighbours{filter: filter, usable: make(map[neighbour]string), subscribed: make(map[mac]bool), changed: make(rates[int]), moved: make(rates[mac])}
}

// apply applies a neighbour or FDB notification. It returns whether it invalidates flows, and whether
// the devices must be scanned.
func (n *neighbours) apply(gone bool, data []byte, now time.Time) (invalidated, devices bool) {
	m, err := neighbourOf(data)
	if err != nil {
		return true, true
	}
	if m.family == unix.AF_BRIDGE {
		address, ok := macOf(m.address)
		if m.master == 0 || !ok {
			return true, true // an entry of a VXLAN device
		}
		if !n.subscribed[address] {
			return false, false // sent before the filter was attached or changed
		}
		// Stay subscribed to an owner: it stops being one when its link is throttled.
		if n.moved.count(address, now); n.moved.exceeded(address, now) && len(n.owners[address]) == 0 {
			n.unsubscribe(address)
		}
		return n.invalidates(address, now), true
	}
	ip, ok := netip.AddrFromSlice(m.destination)
	if !ok {
		return true, true
	}
	key, is := neighbour{m.device, ip}, ""
	if !gone && m.state&usableStates != 0 {
		is = string(m.address)
	}
	was := n.usable[key]
	switch {
	case is == was:
		return !n.complete, false
	case is == "":
		delete(n.usable, key)
	default:
		n.add(key, is, now)
	}
	near, known := n.near[m.device]
	devices = near || !known
	if was == "" {
		return !n.complete, devices
	}
	address, ok := macOf([]byte(was))
	return !ok || !near || n.invalidates(address, now), devices
}

// invalidates counts a change of a MAC address, and reports whether it invalidates flows. It does if the address may be an owner,
// or belongs to a device of the node.
func (n *neighbours) invalidates(address mac, now time.Time) bool {
	for _, link := range n.owners[address] {
		n.changed.count(link, now)
	}
	return len(n.owners[address]) > 0 || n.own[address]
}

// add adds a usable neighbour if there is room. It subscribes to the MAC address at once, before a
// scan looks it up in the FDB, so that no change in between is missed.
func (n *neighbours) add(key neighbour, address string, now time.Time) {
	if _, known := n.usable[key]; !known && len(n.usable) >= neighboursMax {
		n.complete = false
		return
	}
	n.usable[key] = address
	if m, ok := macOf([]byte(address)); ok {
		n.subscribe(m, now)
	}
}

// subscribe makes the filter pass FDB notifications of a MAC address. If the filter is full, the
// address does not become an owner.
func (n *neighbours) subscribe(m mac, now time.Time) {
	if !n.subscribed[m] && !n.moved.exceeded(m, now) && n.filter.Subscribe(m) == nil {
		n.subscribed[m] = true
	}
}

func (n *neighbours) unsubscribe(m mac) {
	if n.filter.Unsubscribe(m) == nil {
		delete(n.subscribed, m)
	}
}

// overrun forgets all neighbours, because notifications were lost.
func (n *neighbours) overrun() {
	clear(n.usable)
	n.complete = false
}

// merge adds the unknown neighbours of a dump. The dump may be older than the last notifications
// and contain neighbours that have gone; their next change then invalidates flows needlessly.
func (n *neighbours) merge(all []netlink.Neigh, now time.Time) {
	n.complete = true
	for _, at := range all {
		ip, ok := netip.AddrFromSlice(at.IP)
		if key := (neighbour{at.LinkIndex, ip}); ok && at.State&usableStates != 0 && n.usable[key] == "" {
			n.add(key, string(at.HardwareAddr), now)
		}
	}
}

// list returns the known neighbours in a stable order. It subscribes again to addresses that are no
// longer throttled.
func (n *neighbours) list(now time.Time) (all []netlink.Neigh) {
	for key, address := range n.usable {
		n.add(key, address, now)
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

// admit selects at most linkMACsMax owners for each link, present owners first. It leaves out
// addresses that are not subscribed, and all owners of throttled links; it returns these links.
func (n *neighbours) admit(owners []datapath.LinkMAC, now time.Time) (admitted []datapath.LinkMAC, throttled []int) {
	seen := make(map[datapath.LinkMAC]bool)
	of := make(map[int]int)
	for _, known := range []bool{true, false} {
		for _, o := range owners {
			switch {
			case n.changed.exceeded(o.Link, now):
				throttled = append(throttled, o.Link)
			case slices.Contains(n.owners[o.MAC], o.Link) == known && !seen[o] && n.subscribed[o.MAC] && of[o.Link] < linkMACsMax:
				seen[o] = true
				of[o.Link]++
				admitted = append(admitted, o)
			}
		}
	}
	slices.Sort(throttled)
	return admitted, slices.Compact(throttled)
}

// prepare adds the owners that are about to be written to the programs' map.
func (n *neighbours) prepare(owners []datapath.LinkMAC) {
	all := make(map[mac][]int)
	maps.Copy(all, n.owners)
	for _, o := range owners {
		if !slices.Contains(all[o.MAC], o.Link) {
			all[o.MAC] = append(slices.Clip(all[o.MAC]), o.Link)
		}
	}
	n.owners = all
}

// commit applies a scan whose owners were written to the programs' map, and adjusts the subscriptions. It returns whether
// owners were removed, which invalidates flows: see invalidator.setLinkMACs.
func (n *neighbours) commit(of node, now time.Time) (invalidated bool) {
	before := n.owners
	n.owners, n.near, n.own = nil, of.near, of.own
	n.prepare(of.owners)
	for address, links := range before {
		for _, link := range links {
			invalidated = invalidated || !slices.Contains(n.owners[address], link)
		}
	}
	n.changed.expire(now)
	n.moved.expire(now)
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
		n.subscribe(address, now)
	}
	for address := range n.subscribed {
		if !keep[address] {
			n.unsubscribe(address)
		}
	}
	return invalidated
}

// usableStates are the states in which the kernel sends to a neighbour without resolving it first (NUD_VALID in
// include/net/neighbour.h).
const usableStates = unix.NUD_PERMANENT | unix.NUD_NOARP | unix.NUD_REACHABLE | unix.NUD_PROBE | unix.NUD_STALE | unix.NUD_DELAY

// neighbourUpdate is a parsed neighbour or FDB message.
type neighbourUpdate struct {
	family               byte
	device, master       int
	state                uint16
	destination, address []byte
}

// neighbourOf parses a neighbour or FDB message.
func neighbourOf(data []byte) (m neighbourUpdate, err error) {
	// struct ndmsg: family, 3 of padding, index, state, flags, type.
	if len(data) < unix.SizeofNdMsg {
		return m, errors.New("the message is truncated")
	}
	m.family = data[0]
	m.device = int(int32(binary.NativeEndian.Uint32(data[4:])))
	m.state = binary.NativeEndian.Uint16(data[8:])
	err = netns.Attributes(data[unix.SizeofNdMsg:], func(kind uint16, value []byte) {
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

// fdbEntries looks up the bridge ports of known neighbours, and the default entries of VXLAN devices
// (all-zero MAC address), in the calling thread's network namespace. It queries single addresses
// instead of dumping the FDB, which a pod can fill with any number of spoofed addresses.
func fdbEntries(h *netlink.Handle, links []netlink.Link, known []netlink.Neigh, renew func() error) (all []netlink.Neigh, err error) {
	socket, err := nl.GetNetlinkSocketAt(-1, -1, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer socket.Close()
	f := fdbLookup{socket: map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: socket}}, done: make(map[fdbQuery]bool), renew: renew}
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
			if err := f.query(fdbQuery{master: b.index, vlan: b.vlan, address: address}); err != nil {
				return nil, err
			}
		}
	}
	for _, l := range links {
		if l.Type() == "vxlan" {
			if err := f.query(fdbQuery{device: l.Attrs().Index}); err != nil {
				return nil, err
			}
		}
	}
	return f.answers, nil
}

// remotesOf lists the remote nodes of VXLAN devices: their FDB entries, in the calling thread's network
// namespace. These devices do not learn, so no packet can add an entry.
func remotesOf(overlays map[int]datapath.VXLANDevice) ([]datapath.Remote, error) {
	socket, err := nl.GetNetlinkSocketAt(-1, -1, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer socket.Close()
	// Otherwise the kernel dumps the entries of all devices, and a pod can add any number of entries to a
	// bridge (valid_fdb_dump_legacy in net/core/rtnetlink.c).
	if err := unix.SetsockoptInt(socket.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1); err != nil {
		return nil, fmt.Errorf("enable strict checking of netlink requests: %w", err)
	}
	var all []datapath.Remote
	for device := range overlays {
		some, err := netns.Dump("FDB entries", func() ([]datapath.Remote, error) { return remotesOfDevice(socket, device) })
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}

func remotesOfDevice(socket *nl.NetlinkSocket, device int) (all []datapath.Remote, err error) {
	r := nl.NewNetlinkRequest(unix.RTM_GETNEIGH, unix.NLM_F_DUMP)
	r.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: socket}}
	// struct ndmsg, in which all but family and index must be 0; netlink.Ndmsg has arbitrary bytes between its fields.
	about := make([]byte, unix.SizeofNdMsg)
	about[0] = unix.AF_BRIDGE
	binary.NativeEndian.PutUint32(about[4:], uint32(device))
	r.AddRawData(about)
	replies, err := r.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNEIGH)
	if err != nil {
		return nil, err
	}
	for _, data := range replies {
		m, err := neighbourOf(data)
		if err != nil {
			return nil, err
		}
		address, isMAC := macOf(m.address)
		if to, ok := netip.AddrFromSlice(m.destination); ok && to.Is4() && isMAC && m.device == device {
			all = append(all, datapath.Remote{Device: device, MAC: address, Address: to})
		}
	}
	return all, nil
}

// fdbLookup queries FDB entries of bridges and VXLAN devices, each once.
type fdbLookup struct {
	socket  map[int]*nl.SocketHandle
	renew   func() error
	done    map[fdbQuery]bool
	answers []netlink.Neigh
}

// fdbQuery asks for an address at a bridge, optionally in one of its VLANs, or at a device.
type fdbQuery struct {
	master, device int
	vlan           uint16
	address        mac
}

// query adds the matching FDB entry, if there is one, to the answers.
func (f *fdbLookup) query(q fdbQuery) error {
	if f.done[q] {
		return nil
	}
	f.done[q] = true
	if err := f.renew(); err != nil {
		return err
	}
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
	// There is no entry, or the device is gone: a notification follows.
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("query the FDB entry of %s: %w", net.HardwareAddr(q.address[:]), err)
	}
	for _, data := range replies {
		m, err := neighbourOf(data)
		if err != nil {
			return fmt.Errorf("parse the FDB entry of %s: %w", net.HardwareAddr(q.address[:]), err)
		}
		f.answers = append(f.answers, netlink.Neigh{LinkIndex: m.device, Family: unix.AF_BRIDGE, MasterIndex: m.master, HardwareAddr: m.address})
	}
	return nil
}

// domain is a bridge, or one VLAN of a bridge with VLAN filtering.
type domain struct {
	index int
	vlan  uint16
}

// bridgesOf maps each device to the bridges that may forward to its neighbours: a bridge to itself, a VLAN device to the bridge
// below it, and a device of any other kind to all bridges. NICs, VXLAN devices and routed veths of pods have no bridge.
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
			vlans, err := netns.Dump("VLANs of bridges", func() ([]domain, error) { return pvidOf(h, b.Index) })
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
		bridge, onBridge := bridges[a.ParentIndex]
		switch v, isVLAN := l.(*netlink.Vlan); {
		case l.Type() == "bridge":
			of[a.Index] = []domain{bridges[a.Index]}
		case isVLAN && onBridge:
			if filtering[bridge.index] {
				bridge.vlan = uint16(v.VlanId)
			}
			of[a.Index] = []domain{bridge}
		case l.Type() == "vxlan" || l.Type() == "device" || a.MasterIndex == 0 && a.NetNsID >= 0:
		default:
			of[a.Index] = all
		}
	}
	return of, nil
}

// pvidOf returns the PVID of a bridge, the VLAN of the untagged packets that it sends itself, if there is one.
func pvidOf(h *netlink.Handle, bridge int) (own []domain, err error) {
	vlans, err := h.BridgeVlanList()
	for _, v := range vlans[int32(bridge)] {
		if v.PortVID() {
			own = append(own, domain{bridge, v.Vid})
		}
	}
	return own, err
}
