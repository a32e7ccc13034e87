//go:build linux

package fastpath

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/bpf"
)

// overhead of VXLAN over IPv4 (RFC 7348, section 5).
const overhead = 50

// node is what the fast path has to know of one.
type node struct {
	overlays    map[int]bpf.VXLANDevice
	nics, veths []int
	names       map[int]string
	// owners are the Ethernet addresses behind the veths, behind says by which of these which
	// addresses of IP are reached.
	owners []bpf.LinkMAC
	behind map[netip.Addr]int
	// observers are those of all devices. guarded are VXLAN devices and what stands on pods'
	// links: what comes there would be jumped.
	observers observers
	guarded   []int
	// unlanded are NICs whose ingress has observers behind the place of land.
	unlanded []int
	// everywhere is why no device is understood, if so.
	everywhere string
	// near are the devices that pods may be behind: all by which no packet leaves the node; own
	// are the Ethernet addresses of all devices.
	near map[int]bool
	own  map[mac]bool
	// mtu is that of the narrowest device on any way.
	mtu int
	// ports is the range of source ports, the end left out.
	ports [2]uint16
	// skipped says which devices are not understood, and why.
	skipped []string
}

// attachments are the programs of each device, those that see a packet last first, where
// some pods' links have them. If none has, the fast path sleeps: it has the scouts alone, or
// nothing.
func (n node) attachments(links []int, scouts bool) (all []attachment) {
	add := func(device int, programs ...string) {
		for _, p := range programs {
			all = append(all, attachment{device, p})
		}
	}
	awake := len(links) > 0
	if awake {
		for _, device := range n.nics {
			add(device, "observe_nic")
			if !slices.Contains(n.unlanded, device) {
				add(device, "nic_decap")
			}
		}
	}
	if awake || scouts {
		for _, device := range slices.Sorted(maps.Keys(n.overlays)) {
			add(device, "observe_vxlan", "vxlan_ingress")
		}
	}
	for _, device := range n.veths {
		if slices.Contains(links, device) {
			add(device, "observe_pod", "encap")
		}
	}
	return all
}

// look finds out what a node's devices are, in the calling thread's network namespace, whose h
// is, and which of its neighbours, of those that are known, are behind them. Observers of the kinds
// in unseenBy do not count.
func look(h *netlink.Handle, known []netlink.Neigh, unseenBy []string, ours own) (node, error) {
	links, err := dump("links", h.LinkList)
	if err != nil {
		return node{}, err
	}
	routes, err := dump("routes", func() ([]netlink.Route, error) { return h.RouteList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return node{}, err
	}
	observers, err := observersOf(h, links, unseenBy, ours)
	if err != nil {
		return node{}, err
	}
	forwarded, err := learned(h, links, known)
	if err != nil {
		return node{}, err
	}
	var low, high uint16
	if err := scan("net/ipv4/ip_local_port_range", &low, &high); err != nil {
		return node{}, err
	}
	why, err := everywhere(unseenBy)
	if err != nil {
		return node{}, err
	}
	if err := narrowBy6(links); err != nil {
		return node{}, err
	}
	n := understand(links, routes, observers, slices.Concat(known, forwarded))
	n.near, n.own = make(map[int]bool), make(map[mac]bool)
	for _, l := range links {
		a := l.Attrs()
		n.near[a.Index] = l.Type() != "vxlan" && !slices.Contains(n.nics, a.Index)
		if address, ok := macOf(a.HardwareAddr); ok {
			n.own[address] = true
		}
	}
	// As vxlan's: the end is the last port, and left out (udp_flow_src_port).
	n.ports = [2]uint16{low, high}
	if n.everywhere = why; why != "" {
		n.overlays, n.nics, n.veths, n.behind = nil, nil, nil, nil
		n.skipped = append(n.skipped, "all devices: "+why)
	}
	return n, nil
}

// tunnels are the names of the overlays.
func (n node) tunnels() (names []string) {
	for index := range n.overlays {
		names = append(names, n.names[index])
	}
	slices.Sort(names)
	return names
}

// speaksTo lists whom a node speaks to by a link of its own.
func speaksTo(h *netlink.Handle) (all []netlink.Neigh, err error) {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		some, err := dump("neighbours", func() ([]netlink.Neigh, error) { return h.NeighList(0, family) })
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}

// routed is the pod's link that the node's routes lead to an address by, or 0.
func (n node) routed(h *netlink.Handle, address netip.Addr) int {
	routes, err := h.RouteGet(address.AsSlice())
	if err != nil || len(routes) == 0 {
		return 0 // nowhere
	}
	if via, ok := netip.AddrFromSlice(routes[0].Gw); ok {
		if link := n.behind[via.Unmap()]; link != 0 {
			return link
		}
	}
	if slices.Contains(n.veths, routes[0].LinkIndex) {
		return routes[0].LinkIndex
	}
	return 0
}

// narrowBy6 has devices be as narrow as they are to IPv6, which has an MTU of its own of each.
func narrowBy6(links []netlink.Link) error {
	for _, l := range links {
		if t := l.Type(); t != "vxlan" && t != "veth" && t != "bridge" {
			continue
		}
		a := l.Attrs()
		mtu := a.MTU
		// A device that is too narrow for IPv6 has none; so has one that is gone.
		if err := scan("net/ipv6/conf/"+a.Name+"/mtu", &mtu); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		a.MTU = min(a.MTU, mtu)
	}
	return nil
}

// scan reads numbers of a sysctl.
func scan(key string, to ...any) error {
	b, err := os.ReadFile("/proc/sys/" + key)
	if err == nil {
		_, err = fmt.Sscan(string(b), to...)
	}
	if err != nil {
		return fmt.Errorf("read sysctl %s: %w", key, err)
	}
	return nil
}

// dump repeats a listing that changed under the kernel's hands.
func dump[T any](what string, list func() ([]T, error)) ([]T, error) {
	for tries := 1; ; tries++ {
		all, err := list()
		if err == nil {
			return all, nil
		}
		if !errors.Is(err, netlink.ErrDumpInterrupted) || tries == 10 {
			return nil, fmt.Errorf("list %s: %w", what, err)
		}
	}
}

// understand sorts out what devices are for.
func understand(links []netlink.Link, routes []netlink.Route, seen observers, neighbours []netlink.Neigh) node {
	n := node{overlays: make(map[int]bpf.VXLANDevice), behind: make(map[netip.Addr]int), names: make(map[int]string), observers: seen}
	byIndex := make(map[int]netlink.Link)
	for _, l := range links {
		byIndex[l.Attrs().Index] = l
		n.names[l.Attrs().Index] = l.Attrs().Name
	}
	n.addTunnels(links, byIndex, routes, neighbours)
	if len(n.overlays) == 0 {
		return n
	}
	n.addPods(links, byIndex)
	// What the way to another node has learnt of itself the programs ask for (mtu_of_route).
	for _, r := range routes {
		if r.MTU != 0 && slices.Contains(n.nics, r.LinkIndex) {
			n.narrow(r.MTU - overhead)
		}
	}
	for _, at := range neighbours {
		if len(at.HardwareAddr) == 6 && slices.Contains(n.veths, at.LinkIndex) {
			n.owners = append(n.owners, bpf.LinkMAC{Link: at.LinkIndex, MAC: [6]byte(at.HardwareAddr)})
		}
	}
	linksOf := make(map[[6]byte][]int)
	for _, o := range n.owners {
		linksOf[o.MAC] = append(linksOf[o.MAC], o.Link)
	}
	for _, at := range neighbours {
		address, ok := netip.AddrFromSlice(at.IP)
		if !ok || at.Family == unix.AF_BRIDGE || len(at.HardwareAddr) != 6 {
			continue
		}
		for _, link := range linksOf[[6]byte(at.HardwareAddr)] {
			if link == at.LinkIndex || byIndex[link].Attrs().MasterIndex == at.LinkIndex {
				n.behind[address.Unmap()] = link
			}
		}
	}
	return n
}

// skip leaves a device to the slow path.
func (n *node) skip(l netlink.Link, format string, args ...any) {
	n.skipped = append(n.skipped, l.Attrs().Name+": "+fmt.Sprintf(format, args...))
}

// narrow has packets be no larger than a device on their way takes.
func (n *node) narrow(mtu int) {
	if n.mtu == 0 || mtu < n.mtu {
		n.mtu = mtu
	}
}

// bypassed is why a device with an observer is left alone.
const bypassed = "it has %s, which packets would jump"

// vxlanDevicesMax is for how many VXLAN devices the programs have room (overlays in fastpath.c).
const vxlanDevicesMax = 16

// addTunnels finds the VXLAN devices and the NICs that they send by.
func (n *node) addTunnels(links []netlink.Link, byIndex map[int]netlink.Link, routes []netlink.Route, neighbours []netlink.Neigh) {
	for _, l := range links {
		v, ok := l.(*netlink.Vxlan)
		if !ok {
			continue
		}
		nic := byIndex[v.VtepDevIndex]
		if why := odd(v, nic, byIndex, routes, neighbours); why != "" {
			n.skip(l, "%s", why)
			continue
		}
		n.guarded = append(n.guarded, v.Index)
		if what := n.observers.first(both(v.Index)); what != "" {
			n.skip(l, bypassed, what)
			continue
		}
		// What a program sends to a NIC meets all that is there but nftables (nf_skip_egress).
		if what := n.observers.first([]side{{v.VtepDevIndex, true}}, v1alpha1.UnseenByNetdev); what != "" {
			n.skip(l, "it sends by %s, which has %s, which packets would jump", nic.Attrs().Name, what)
			continue
		}
		if len(n.overlays) == vxlanDevicesMax {
			n.skip(l, "%d other VXLAN devices are on the fast path, which has no room for more", vxlanDevicesMax)
			continue
		}
		source, _ := netip.AddrFromSlice(v.SrcAddr)
		n.overlays[v.Index] = bpf.VXLANDevice{NIC: v.VtepDevIndex, Source: source.Unmap(), Port: uint16(v.Port), VNI: uint32(v.VxlanId), MAC: v.HardwareAddr}
		n.narrow(v.MTU)
		n.narrow(nic.Attrs().MTU - overhead)
		if slices.Contains(n.nics, v.VtepDevIndex) {
			continue
		}
		n.nics = append(n.nics, v.VtepDevIndex)
		// What comes by a NIC meets programs of tcx there before land, the last of them.
		if what := n.observers.first([]side{{v.VtepDevIndex, false}}, v1alpha1.UnseenByTC, v1alpha1.UnseenByNetdev); what != "" {
			n.unlanded = append(n.unlanded, v.VtepDevIndex)
			n.skip(nic, bypassed+": the kernel takes them out of the tunnel", what)
		}
	}
}

// addPods finds the links of pods. Those behind a device with an observer are left alone; that
// is said once.
func (n *node) addPods(links []netlink.Link, byIndex map[int]netlink.Link) {
	up := uppers(links)
	observed := make(map[int]bool)
	for _, l := range links {
		a := l.Attrs()
		if l.Type() != "veth" || a.NetNsID < 0 || slices.Contains(n.nics, a.Index) {
			continue
		}
		above := climb(up, a.Index)
		if slices.ContainsFunc(above, func(device int) bool { return slices.Contains(n.nics, device) }) {
			continue // it is of the wire
		}
		behind := false
		for _, device := range above {
			if _, asked := observed[device]; !asked {
				n.guarded = append(n.guarded, device)
				what := n.observers.first(both(device))
				if observed[device] = what != ""; observed[device] {
					n.skip(byIndex[device], "it has %s, which packets of the pods behind it would jump", what)
				}
			}
			behind = behind || observed[device]
		}
		if behind {
			continue
		}
		if what := n.observers.first(both(a.Index)); what != "" {
			n.skip(l, bypassed, what)
			continue
		}
		n.veths = append(n.veths, a.Index)
		n.narrow(a.MTU)
		if master := byIndex[a.MasterIndex]; master != nil {
			n.narrow(master.Attrs().MTU)
		}
	}
}

// uppers are, by a device's index, those that stand on it and take in what it takes in: the
// bridge that it belongs to, VLANs of it.
func uppers(links []netlink.Link) map[int][]int {
	known := make(map[int]bool)
	for _, l := range links {
		known[l.Attrs().Index] = true
	}
	up := make(map[int][]int)
	for _, l := range links {
		a := l.Attrs()
		if known[a.MasterIndex] {
			up[a.Index] = append(up[a.Index], a.MasterIndex)
		}
		switch l.Type() {
		case "vlan", "macvlan", "macvtap", "ipvlan", "ipvtap", "macsec":
			if a.NetNsID < 0 && known[a.ParentIndex] { // else its other device is not of this node
				up[a.ParentIndex] = append(up[a.ParentIndex], a.Index)
			}
		}
	}
	return up
}

// climb lists all devices above one.
func climb(up map[int][]int, device int) []int {
	all := []int{device}
	for i := 0; i < len(all); i++ {
		for _, d := range up[all[i]] {
			if !slices.Contains(all, d) {
				all = append(all, d)
			}
		}
	}
	return all[1:]
}

// odd says what is odd about a VXLAN device, if anything: the programs write what
// flannel's and Calico's write. What it sends by may be a device on top of others, such as a
// bond, a VLAN or a bridge: their hooks are on the way of all packets. What is on top of that
// again would be jumped.
func odd(v *netlink.Vxlan, nic netlink.Link, byIndex map[int]netlink.Link, routes []netlink.Route, neighbours []netlink.Neigh) string {
	switch {
	case v.FlowBased:
		return "each packet brings its own tunnel (external)"
	case len(v.Group) > 0 && !v.Group.IsUnspecified():
		return "it has a default destination or a multicast group"
	case v.SrcAddr.To4() == nil:
		return "it does not say which IPv4 address it sends from"
	case nic == nil:
		return "it does not say which device it sends by"
	case nic.Attrs().Flags&net.FlagUp == 0 || v.Flags&net.FlagUp == 0:
		return "it, or the device that it sends by, is down"
	case nic.Attrs().EncapType != "ether":
		return fmt.Sprintf("it sends by %s, whose packets have no Ethernet header", nic.Attrs().Name)
	case byIndex[nic.Attrs().MasterIndex] != nil:
		return fmt.Sprintf("it sends by %s, which belongs to %s: packets that come would jump that", nic.Attrs().Name, byIndex[nic.Attrs().MasterIndex].Attrs().Name)
	case v.Learning:
		return "it learns where addresses are from packets"
	case v.TOS != 0:
		return "it sets a type of service"
	case v.TTL != 0:
		return "it sets a hop limit"
	case v.GBP:
		return "it carries a group policy"
	case v.PortLow != 0 || v.PortHigh != 0:
		return "it has a range of source ports of its own"
	case len(v.HardwareAddr) != 6:
		return "it has no Ethernet address"
	}
	for _, r := range routes {
		if r.LinkIndex == v.Index && r.MTU != 0 {
			return fmt.Sprintf("the route to %s has an MTU of its own", r.Dst)
		}
	}
	for _, at := range neighbours {
		if at.LinkIndex == v.Index && bytes.Equal(at.HardwareAddr, make([]byte, 6)) {
			return "it sends copies of what it knows no destination of"
		}
	}
	if strings.HasPrefix(nic.Type(), "vxlan") {
		return "it sends by another overlay"
	}
	return ""
}
