//go:build linux

package fastpath

import (
	"bytes"
	"cmp"
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
	"slipstream.dev/internal/fastpath/datapath"
	"slipstream.dev/internal/netns"
)

// overhead is the number of bytes that VXLAN over IPv4 adds to a packet (RFC 7348, section 5).
const overhead = 50

// node is the result of a scan of the devices.
type node struct {
	// overlays holds the supported VXLAN devices, by index.
	overlays map[int]datapath.VXLANDevice
	// nics holds the NICs of the overlays and all routers. A router is a NIC over which the node routes packets of pods without
	// encapsulation. veths holds the links of pods.
	nics, routers, veths []int
	names                map[int]string
	// remotes holds the remote nodes of the overlays.
	remotes []datapath.Remote
	// podDevices holds the devices over which the node reaches its pods: their links, and the upper devices of the links.
	podDevices []int
	// owners holds the MAC addresses of pods, each with its veth; podLinks maps each IP address of a pod to its veth.
	owners   []datapath.LinkMAC
	podLinks map[netip.Addr]int
	// observers holds the observers of all devices. monitored holds the VXLAN devices and the upper devices of pods' links: the
	// fast path bypasses their hooks, so inspect polls them.
	observers observers
	monitored []int
	// noDecap holds the NICs that do not get decap_nic, because it would bypass an observer that runs after it.
	noDecap []int
	// unsupported says why the fast path skips all devices, or is empty.
	unsupported string
	// near holds the devices behind which the node's own pods may be: all but NICs and VXLAN devices. own holds the MAC
	// addresses of all devices.
	near map[int]bool
	own  map[mac]bool
	// mtu is the smallest MTU of all paths.
	mtu int
	// ports is the range of source ports. The first is included, the second is not.
	ports [2]uint16
	// mtus6 holds the IPv6 MTU of each device for which it limits the MTU, 0 if it has none.
	mtus6 map[int]int
	// skipped has the devices that are skipped, and why.
	skipped []skip
}

// attachments returns the programs that each device needs, given the links of the active pods. They are in reverse packet
// order: when a program is attached, those that see the packet after it are attached already. Without active pods the fast path
// is idle. Then only the detectors need programs: at VXLAN devices and routers if detecting is set, and at the links in
// sampling.
func (n node) attachments(links []int, detecting bool, sampling []int) (all []attachment) {
	add := func(device int, programs ...string) {
		for _, p := range programs {
			all = append(all, attachment{device, p})
		}
	}
	active := len(links) > 0
	if active {
		for _, device := range n.nics {
			if !slices.Contains(n.routers, device) {
				add(device, "observe_nic")
			}
			if n.encapsulates(device) && !slices.Contains(n.noDecap, device) {
				add(device, "decap_nic")
			}
		}
	}
	if active || detecting {
		for _, device := range n.routers {
			add(device, "observe_router", "redirect_nic")
		}
		for _, device := range slices.Sorted(maps.Keys(n.overlays)) {
			add(device, "observe_vxlan", "redirect_vxlan")
		}
	}
	for _, device := range n.veths {
		if slices.Contains(links, device) {
			add(device, "observe_pod", "redirect_pod")
		} else if slices.Contains(sampling, device) {
			add(device, "redirect_pod")
		}
	}
	return all
}

// encapsulates reports whether a VXLAN device sends its packets over a NIC.
func (n node) encapsulates(nic int) bool {
	for _, v := range n.overlays {
		if v.NIC == nic {
			return true
		}
	}
	return false
}

// scanDevices scans the devices of the calling thread's network namespace, to which h must belong, and looks up behind which
// devices the known neighbours are. It ignores observers of the kinds in unseenBy and the programs that ours selects. There may
// be hundreds of devices, and each query may wait for the RTNL lock, so scanDevices calls renew, which renews the lease, before
// the queries of a device or an address.
func scanDevices(h *netlink.Handle, known []netlink.Neigh, unseenBy []string, ours isOurs, renew func() error) (node, error) {
	links, err := netns.Dump("links", h.LinkList)
	if err != nil {
		return node{}, err
	}
	// All tables: some CNIs have one for each NIC.
	routes, err := netns.Dump("routes", func() ([]netlink.Route, error) {
		return h.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return node{}, err
	}
	observers, err := observersOf(h, links, routes, unseenBy, ours, renew)
	if err != nil {
		return node{}, err
	}
	forwarded, err := fdbEntries(h, links, known, renew)
	if err != nil {
		return node{}, err
	}
	ports, err := sourcePorts()
	if err != nil {
		return node{}, err
	}
	reason, why, err := unsupportedNode(unseenBy)
	if err != nil {
		return node{}, err
	}
	mtus6, err := limitMTUsByIPv6(links)
	if err != nil {
		return node{}, err
	}
	n := classify(links, routes, observers, slices.Concat(known, forwarded))
	n.near, n.own = make(map[int]bool), make(map[mac]bool)
	for _, l := range links {
		a := l.Attrs()
		n.near[a.Index] = l.Type() != "vxlan" && !slices.Contains(n.nics, a.Index)
		if address, ok := macOf(a.HardwareAddr); ok {
			n.own[address] = true
		}
	}
	n.ports, n.mtus6 = ports, mtus6
	if n.unsupported = why; why != "" {
		n.overlays, n.nics, n.routers, n.veths, n.podDevices, n.podLinks = nil, nil, nil, nil, nil, nil
		n.skipAll(reason, why)
	}
	if n.remotes, err = remotesOf(n.overlays); err != nil {
		return node{}, err
	}
	return n, nil
}

// supported returns the sorted names of the devices over which the fast path can connect pods with other nodes: VXLAN devices
// and routers.
func (n node) supported() (names []string) {
	for index := range n.overlays {
		names = append(names, n.names[index])
	}
	for _, index := range n.routers {
		names = append(names, n.names[index])
	}
	slices.Sort(names)
	return names
}

// listNeighbours lists the ARP and NDP neighbours of a node.
func listNeighbours(h *netlink.Handle) (all []netlink.Neigh, err error) {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		some, err := netns.Dump("neighbours", func() ([]netlink.Neigh, error) { return h.NeighList(0, family) })
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}

// linkByRoute returns the pod's link to which the node routes an address. If the route leads to a bridge of pods, the link is 0
// until the node knows the MAC address behind the address. If the node does not know that, unresolved is the device at which the
// kernel has to resolve it.
func (n node) linkByRoute(h *netlink.Handle, address netip.Addr) (link, unresolved int) {
	routes, err := h.RouteGet(address.AsSlice())
	if err != nil || len(routes) == 0 {
		return 0, 0 // no route
	}
	device := routes[0].LinkIndex
	via, indirect := netip.AddrFromSlice(routes[0].Gw)
	if indirect {
		link = n.podLinks[via.Unmap()]
		if link == 0 && slices.Contains(n.veths, device) {
			link = device
		}
		return link, 0
	}
	known := n.podLinks[address]
	switch {
	case slices.Contains(n.veths, device):
		link = device
	case slices.Contains(n.podDevices, device):
		link = known
	default:
		return 0, 0
	}
	if known == 0 {
		unresolved = device
	}
	return link, unresolved
}

// sourcePorts returns the range of source ports. As in udp_flow_src_port, the second is the last port of the range, and the
// kernel never chooses it.
func sourcePorts() (ports [2]uint16, err error) {
	return ports, readSysctl("net/ipv4/ip_local_port_range", &ports[0], &ports[1])
}

// limitMTUsByIPv6 lowers the MTU of each device in links to its IPv6 MTU, which is a sysctl of its own. It returns the IPv6 MTUs.
func limitMTUsByIPv6(links []netlink.Link) (map[int]int, error) {
	all := make(map[int]int)
	for _, l := range links {
		if t := l.Type(); t != "vxlan" && t != "veth" && t != "bridge" {
			continue
		}
		a := l.Attrs()
		mtu, err := mtu6(a.Name)
		if err != nil {
			return nil, err
		}
		if all[a.Index] = mtu; mtu != 0 {
			a.MTU = min(a.MTU, mtu)
		}
	}
	return all, nil
}

// mtu6 returns the IPv6 MTU of a device. It is 0 if the device's MTU is too small for IPv6, or the device is gone.
func mtu6(device string) (mtu int, err error) {
	err = readSysctl("net/ipv6/conf/"+device+"/mtu", &mtu)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return mtu, err
}

func readSysctl(key string, to ...any) error {
	b, err := os.ReadFile("/proc/sys/" + key)
	if err == nil {
		_, err = fmt.Sscan(string(b), to...)
	}
	if err != nil {
		return fmt.Errorf("read sysctl %s: %w", key, err)
	}
	return nil
}

// classify finds VXLAN devices, NICs and pods' links among the devices.
func classify(links []netlink.Link, routes []netlink.Route, o observers, neighbours []netlink.Neigh) node {
	n := node{overlays: make(map[int]datapath.VXLANDevice), podLinks: make(map[netip.Addr]int), names: make(map[int]string), observers: o}
	byIndex := make(map[int]netlink.Link)
	for _, l := range links {
		byIndex[l.Attrs().Index] = l
		n.names[l.Attrs().Index] = l.Attrs().Name
	}
	if o.cilium != "" {
		// Its programs are the network policy, and usually forward the packets themselves, before the fast path sees them.
		n.skipAll(byCilium, fmt.Sprintf("Cilium's programs already handle the packets of pods (%s)", o.cilium))
		return n
	}
	n.addVXLANDevices(links, byIndex, routes, neighbours)
	n.addRouters(links, byIndex, routes)
	n.addPods(links, byIndex)
	n.addRouteMTUs(routes)
	for _, at := range neighbours {
		if len(at.HardwareAddr) == 6 && slices.Contains(n.veths, at.LinkIndex) {
			n.owners = append(n.owners, datapath.LinkMAC{Link: at.LinkIndex, MAC: [6]byte(at.HardwareAddr)})
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
				n.podLinks[address.Unmap()] = link
			}
		}
	}
	return n
}

// limitMTU lowers the MTU of the fast path to that of a device on its path.
func (n *node) limitMTU(mtu int) {
	if n.mtu == 0 || mtu < n.mtu {
		n.mtu = mtu
	}
}

// bypassed is the reason for which a device with an observer is skipped.
const bypassed = "it has %s, which the fast path would bypass"

// vxlanDevicesMax is the size of the map vxlan_devices in bpf/fastpath/vxlan.h.
const vxlanDevicesMax = 16

// addVXLANDevices finds the supported VXLAN devices and their NICs.
func (n *node) addVXLANDevices(links []netlink.Link, byIndex map[int]netlink.Link, routes []netlink.Route, neighbours []netlink.Neigh) {
	for _, l := range links {
		v, ok := l.(*netlink.Vxlan)
		if !ok {
			continue
		}
		nic := byIndex[v.VtepDevIndex]
		if why := unsupportedVXLAN(v, nic, byIndex, routes, neighbours); why != "" {
			n.skip(l.Attrs().Name, byConfiguration, "%s", why)
			continue
		}
		n.monitored = append(n.monitored, v.Index)
		if other := n.observers.first(both(v.Index)); other != nil {
			n.skip(l.Attrs().Name, other.kind, bypassed, other.name)
			continue
		}
		// A redirected packet passes all egress hooks of the NIC except nftables (nf_skip_egress), but no route.
		if other := n.observers.first([]attachPoint{{v.VtepDevIndex, true}}, v1alpha1.UnseenByNetdev, byRoute); other != nil {
			n.skip(l.Attrs().Name, other.kind, "its NIC %s has %s, which the fast path would bypass", nic.Attrs().Name, other.name)
			continue
		}
		if len(n.overlays) == vxlanDevicesMax {
			n.skip(l.Attrs().Name, byConfiguration, "the fast path supports %d VXLAN devices, and there are more", vxlanDevicesMax)
			continue
		}
		source, _ := netip.AddrFromSlice(v.SrcAddr)
		n.overlays[v.Index] = datapath.VXLANDevice{NIC: v.VtepDevIndex, Source: source.Unmap(), Port: uint16(v.Port), VNI: uint32(v.VxlanId), MAC: v.HardwareAddr}
		n.limitMTU(v.MTU)
		n.limitMTU(nic.Attrs().MTU - overhead)
		if slices.Contains(n.nics, v.VtepDevIndex) {
			continue
		}
		n.nics = append(n.nics, v.VtepDevIndex)
		// decap_nic is the last tcx program: the others run before it, while tc filters and nftables
		// would run after it.
		if other := n.observers.first([]attachPoint{{v.VtepDevIndex, false}}, v1alpha1.UnseenByTC, v1alpha1.UnseenByNetdev); other != nil {
			n.noDecap = append(n.noDecap, v.VtepDevIndex)
			n.skip(nic.Attrs().Name, other.kind, bypassed+": the kernel decapsulates its packets", other.name)
		}
	}
}

// addRouteMTUs applies the MTUs that are configured on routes. The programs look up path MTUs (route_mtu). But bpf_fib_lookup
// ignores the MTU of an IPv4 route unless it is locked, while the kernel respects it when it forwards.
func (n *node) addRouteMTUs(routes []netlink.Route) {
	for _, r := range routes {
		if r.MTU == 0 {
			continue
		}
		devices := netns.RouteLinks(r)
		if slices.ContainsFunc(devices, n.encapsulates) {
			n.limitMTU(r.MTU - overhead)
		}
		if slices.ContainsFunc(devices, func(device int) bool {
			return slices.Contains(n.routers, device) || slices.Contains(n.podDevices, device)
		}) {
			n.limitMTU(r.MTU)
		}
	}
}

// routersMax is the size of the map routers in bpf/fastpath/vxlan.h.
const routersMax = 16

// addRouters finds the routers: the NICs with a route through a gateway. On a node with an overlay, default routes and
// announced routes, such as the one to a cloud's metadata server, do not count: they are for packets that leave the cluster.
func (n *node) addRouters(links []netlink.Link, byIndex map[int]netlink.Link, routes []netlink.Route) {
	gateways := make(map[int][]net.IP)
	encapsulated := slices.ContainsFunc(links, isOverlay)
	for _, r := range routes {
		if r.Type != unix.RTN_UNICAST || encapsulated && (netns.IsDefaultRoute(r) || isAnnounced(r)) {
			continue
		}
		for _, hop := range append(slices.Clip(r.MultiPath), &netlink.NexthopInfo{LinkIndex: r.LinkIndex, Gw: r.Gw, Via: r.Via}) {
			gateway := hop.Gw
			if via, ok := hop.Via.(*netlink.Via); ok {
				gateway = via.Addr // a next hop of the other IP version
			}
			if gateway != nil {
				gateways[hop.LinkIndex] = append(gateways[hop.LinkIndex], gateway)
			}
		}
	}
	for _, l := range links {
		a := l.Attrs()
		if len(gateways[a.Index]) == 0 || a.EncapType != "ether" || a.Flags&net.FlagUp == 0 || !mayRoute(l, links, routes, gateways[a.Index]) {
			continue
		}
		if master := byIndex[a.MasterIndex]; master != nil {
			n.skip(l.Attrs().Name, byConfiguration, "it has the master %s, which the fast path would bypass", master.Attrs().Name)
			continue
		}
		// A redirected packet passes all egress hooks of the NIC except nftables, but no route. At its ingress, redirect_nic bypasses
		// whatever runs after tcx.
		if other := cmp.Or(n.observers.first([]attachPoint{{a.Index, true}}, v1alpha1.UnseenByNetdev, byRoute),
			n.observers.first([]attachPoint{{a.Index, false}}, v1alpha1.UnseenByTC, v1alpha1.UnseenByNetdev)); other != nil {
			n.skip(l.Attrs().Name, other.kind, bypassed, other.name)
			continue
		}
		if len(n.routers) == routersMax {
			n.skip(l.Attrs().Name, byConfiguration, "the fast path supports %d NICs that route packets of pods, and there are more", routersMax)
			continue
		}
		n.routers = append(n.routers, a.Index)
		if !slices.Contains(n.nics, a.Index) {
			n.nics = append(n.nics, a.Index)
		}
	}
}

// mayRoute reports whether a device with routes through gateways may be a NIC, and not a tunnel or a device that leads to pods.
// A veth is a NIC if its subnet contains a gateway: the link of a pod has no subnet. A bridge is one unless a pod's link is its
// port.
func mayRoute(l netlink.Link, links []netlink.Link, routes []netlink.Route, gateways []net.IP) bool {
	index := l.Attrs().Index
	switch l.Type() {
	case "device", "bond", "team":
		return true
	case "vlan", "macvlan":
		lower := slices.IndexFunc(links, func(o netlink.Link) bool { return o.Attrs().Index == l.Attrs().ParentIndex })
		return l.Attrs().NetNsID >= 0 || lower < 0 || links[lower].Type() == "veth" || mayRoute(links[lower], links, routes, gateways)
	case "veth":
		return slices.ContainsFunc(routes, func(r netlink.Route) bool {
			return r.LinkIndex == index && r.Gw == nil && !netns.IsDefaultRoute(r) && !isHost(r) && !r.Dst.IP.IsLinkLocalUnicast() && slices.ContainsFunc(gateways, r.Dst.Contains)
		})
	case "bridge":
		return !slices.ContainsFunc(links, func(port netlink.Link) bool {
			return port.Attrs().MasterIndex == index && port.Type() == "veth" && port.Attrs().NetNsID >= 0
		})
	}
	return false
}

// isOverlay reports whether a device encapsulates packets of pods, even if the fast path does not support it.
func isOverlay(l netlink.Link) bool {
	return (l.Type() == "vxlan" || l.Type() == "geneve") && l.Attrs().Flags&net.FlagUp != 0
}

// isAnnounced reports whether a route comes from DHCP, a router advertisement or an ICMP redirect.
func isAnnounced(r netlink.Route) bool {
	return slices.Contains([]netlink.RouteProtocol{unix.RTPROT_DHCP, unix.RTPROT_RA, unix.RTPROT_REDIRECT}, r.Protocol)
}

func isHost(r netlink.Route) bool {
	ones, bits := r.Dst.Mask.Size()
	return ones == bits
}

// addPods finds the links of pods. If their upper device has an observer, it skips all of them and records one reason.
func (n *node) addPods(links []netlink.Link, byIndex map[int]netlink.Link) {
	up := uppers(links)
	observed := make(map[int]bool)
	for _, l := range links {
		a := l.Attrs()
		if l.Type() != "veth" || a.NetNsID < 0 || slices.Contains(n.nics, a.Index) {
			continue
		}
		above := allUppers(up, a.Index)
		if slices.ContainsFunc(above, func(device int) bool { return slices.Contains(n.nics, device) }) {
			continue // it carries the underlay
		}
		skip := false
		for _, device := range above {
			if _, known := observed[device]; !known {
				n.monitored = append(n.monitored, device)
				other := n.observers.first(both(device))
				if observed[device] = other != nil; observed[device] {
					n.skip(byIndex[device].Attrs().Name, other.kind, "it has %s, which packets of the pods behind it would bypass", other.name)
				}
			}
			skip = skip || observed[device]
		}
		if skip {
			continue
		}
		if other := n.observers.first(both(a.Index)); other != nil {
			n.skipLink(l, other)
			continue
		}
		n.veths = append(n.veths, a.Index)
		n.podDevices = append(n.podDevices, a.Index)
		for _, device := range above {
			if !slices.Contains(n.podDevices, device) {
				n.podDevices = append(n.podDevices, device)
			}
		}
		n.limitMTU(a.MTU)
		if master := byIndex[a.MasterIndex]; master != nil {
			n.limitMTU(master.Attrs().MTU)
		}
	}
}

// uppers maps each device to its upper devices, such as its bridge and its VLAN devices: what it receives, they receive too.
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
			if a.NetNsID < 0 && known[a.ParentIndex] { // otherwise its lower device is in another namespace
				up[a.ParentIndex] = append(up[a.ParentIndex], a.Index)
			}
		}
	}
	return up
}

// allUppers returns all devices above a device: its upper devices, their upper devices, and so on.
func allUppers(up map[int][]int, device int) []int {
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

// unsupportedVXLAN returns why the fast path does not support a VXLAN device, or "". The programs write the same headers as the
// VXLAN devices of flannel and Calico. The NIC may be an upper device itself, such as a bond, a VLAN device or a bridge:
// accelerated packets still pass the hooks of its lower devices. But it must not have a master, whose hooks they would bypass.
func unsupportedVXLAN(v *netlink.Vxlan, nic netlink.Link, byIndex map[int]netlink.Link, routes []netlink.Route, neighbours []netlink.Neigh) string {
	switch {
	case v.FlowBased:
		return "each packet has its own tunnel key (external)"
	case len(v.Group) > 0 && !v.Group.IsUnspecified():
		return "it has a default destination or a multicast group"
	case v.SrcAddr.To4() == nil:
		return "it has no local IPv4 address (local)"
	case nic == nil:
		return "it has no underlying device (dev)"
	case nic.Attrs().Flags&net.FlagUp == 0 || v.Flags&net.FlagUp == 0:
		return "it or its NIC is down"
	case nic.Attrs().EncapType != "ether":
		return fmt.Sprintf("its NIC %s has no Ethernet header", nic.Attrs().Name)
	case byIndex[nic.Attrs().MasterIndex] != nil:
		return fmt.Sprintf("its NIC %s has the master %s, which the fast path would bypass", nic.Attrs().Name, byIndex[nic.Attrs().MasterIndex].Attrs().Name)
	case v.Learning:
		return "it learns addresses from packets (learning)"
	case v.TOS != 0:
		return "it sets a TOS (tos)"
	case v.TTL != 0:
		return "it sets a TTL (ttl)"
	case v.GBP:
		return "it has a group policy (gbp)"
	case v.PortLow != 0 || v.PortHigh != 0:
		return "it has its own range of source ports (srcport)"
	case len(v.HardwareAddr) != 6:
		return "it has no MAC address"
	}
	for _, r := range routes {
		if r.LinkIndex == v.Index && r.MTU != 0 {
			return fmt.Sprintf("the route to %s has its own MTU", r.Dst)
		}
	}
	for _, at := range neighbours {
		if at.LinkIndex == v.Index && bytes.Equal(at.HardwareAddr, make([]byte, 6)) {
			return "it floods packets with unknown destinations"
		}
	}
	if strings.HasPrefix(nic.Type(), "vxlan") {
		return "its NIC is another VXLAN device"
	}
	return ""
}
