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

	"slipstream.dev/bpf"
)

// overhead of VXLAN over IPv4 (RFC 7348, section 5).
const overhead = 50

// node is what the fast path has to know of one.
type node struct {
	overlays    map[int]bpf.Overlay
	nics, veths []int
	names       map[int]string
	// owners are the Ethernet addresses behind the veths, behind says by which of these which
	// addresses of IP are reached.
	owners []bpf.Owner
	behind map[netip.Addr]int
	// near are the devices that pods may be behind: all by which no packet leaves the node; own
	// are the Ethernet addresses of all devices.
	near map[int]bool
	own  map[mac]bool
	// filtered says of devices where they have filters of classic tc. These run behind the
	// programs, and a packet of the fast path would jump them.
	filtered map[int]filtered
	// mtu is that of the narrowest device on any way.
	mtu int
	// ports is the range of source ports, the end left out.
	ports [2]uint16
	// refused says which devices are not understood, and why.
	refused []string
}

// filtered is where a device has filters.
type filtered struct{ ingress, egress bool }

const hasFilters = "it has filters of tc, which packets would jump"

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
			add(device, "wire")
			if !n.filtered[device].ingress {
				add(device, "land")
			}
		}
	}
	if awake || scouts {
		for _, device := range slices.Sorted(maps.Keys(n.overlays)) {
			add(device, "tunnel", "arrive")
		}
	}
	for _, device := range n.veths {
		if slices.Contains(links, device) {
			add(device, "deliver", "leave")
		}
	}
	return all
}

// look finds out what a node's devices are, in the calling thread's network namespace, whose h
// is, and which of its neighbours, of those that are known, are behind them.
func look(h *netlink.Handle, known []netlink.Neigh) (node, error) {
	links, err := dump("links", h.LinkList)
	if err != nil {
		return node{}, err
	}
	routes, err := dump("routes", func() ([]netlink.Route, error) { return h.RouteList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return node{}, err
	}
	qdiscs, err := dump("queueing disciplines", func() ([]netlink.Qdisc, error) { return h.QdiscList(nil) })
	if err != nil {
		return node{}, err
	}
	filters, err := filtersOf(h, links, qdiscs)
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
	var pathMTU int
	if err := scan("net/ipv4/ip_forward_use_pmtu", &pathMTU); err != nil {
		return node{}, err
	}
	if err := narrowBy6(links); err != nil {
		return node{}, err
	}
	n := understand(links, routes, qdiscs, filters, slices.Concat(known, forwarded))
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
	if pathMTU != 0 {
		n.overlays, n.nics, n.veths, n.behind = nil, nil, nil, nil
		n.refused = append(n.refused, "all devices: net.ipv4.ip_forward_use_pmtu is set, so each destination has an MTU of its own")
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

// filtersOf finds the devices that have filters of tc.
func filtersOf(h *netlink.Handle, links []netlink.Link, qdiscs []netlink.Qdisc) (map[int]filtered, error) {
	all := make(map[int]filtered)
	for _, q := range qdiscs {
		if t := q.Type(); t != "clsact" && t != "ingress" {
			continue
		}
		index := q.Attrs().LinkIndex
		i := slices.IndexFunc(links, func(l netlink.Link) bool { return l.Attrs().Index == index })
		if i < 0 {
			continue // it came since; a change will tell
		}
		has := func(parent uint32, block *uint32) (bool, error) {
			if block != nil {
				return true, nil // shared with other devices
			}
			filters, err := dump("filters", func() ([]netlink.Filter, error) { return h.FilterList(links[i], parent) })
			return len(filters) > 0, err
		}
		ingress, err := has(netlink.HANDLE_MIN_INGRESS, q.Attrs().IngressBlock)
		if err != nil {
			return nil, err
		}
		egress := false
		if q.Type() == "clsact" {
			if egress, err = has(netlink.HANDLE_MIN_EGRESS, nil); err != nil {
				return nil, err
			}
		}
		all[index] = filtered{ingress, egress}
	}
	return all, nil
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
func understand(links []netlink.Link, routes []netlink.Route, qdiscs []netlink.Qdisc, filters map[int]filtered, neighbours []netlink.Neigh) node {
	n := node{overlays: make(map[int]bpf.Overlay), behind: make(map[netip.Addr]int), names: make(map[int]string), filtered: filters}
	byIndex := make(map[int]netlink.Link)
	for _, l := range links {
		byIndex[l.Attrs().Index] = l
		n.names[l.Attrs().Index] = l.Attrs().Name
	}
	refuse := func(l netlink.Link, format string, args ...any) {
		n.refused = append(n.refused, l.Attrs().Name+": "+fmt.Sprintf(format, args...))
	}
	narrow := func(mtu int) {
		if n.mtu == 0 || mtu < n.mtu {
			n.mtu = mtu
		}
	}
	for _, l := range links {
		v, ok := l.(*netlink.Vxlan)
		if !ok {
			continue
		}
		nic := byIndex[v.VtepDevIndex]
		if why := odd(v, nic, routes, neighbours); why != "" {
			refuse(l, "%s", why)
			continue
		}
		if filters[v.Index] != (filtered{}) {
			refuse(l, hasFilters)
			continue
		}
		source, _ := netip.AddrFromSlice(v.SrcAddr)
		n.overlays[v.Index] = bpf.Overlay{NIC: v.VtepDevIndex, Source: source.Unmap(), Port: uint16(v.Port), VNI: uint32(v.VxlanId), MAC: v.HardwareAddr}
		if !slices.Contains(n.nics, v.VtepDevIndex) {
			n.nics = append(n.nics, v.VtepDevIndex)
		}
		narrow(v.MTU)
		narrow(nic.Attrs().MTU - overhead)
	}
	if len(n.overlays) == 0 {
		return n
	}
	shaped := make(map[int]string)
	for _, q := range qdiscs {
		if t := q.Type(); t != "noqueue" && t != "clsact" && t != "ingress" {
			shaped[q.Attrs().LinkIndex] = t
		}
	}
	for _, l := range links {
		a := l.Attrs()
		if l.Type() != "veth" || a.NetNsID < 0 || slices.Contains(n.nics, a.Index) {
			continue
		}
		if q := shaped[a.Index]; q != "" {
			refuse(l, "it has a queue (%s), which packets would jump", q)
			continue
		}
		if filters[a.Index] != (filtered{}) {
			refuse(l, hasFilters)
			continue
		}
		n.veths = append(n.veths, a.Index)
		narrow(a.MTU)
		if master := byIndex[a.MasterIndex]; master != nil {
			narrow(master.Attrs().MTU)
		}
	}
	for _, at := range neighbours {
		if len(at.HardwareAddr) == 6 && slices.Contains(n.veths, at.LinkIndex) {
			n.owners = append(n.owners, bpf.Owner{Link: at.LinkIndex, MAC: [6]byte(at.HardwareAddr)})
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

// odd says what is odd about a VXLAN device, if anything: the programs write what
// flannel's and Calico's write.
func odd(v *netlink.Vxlan, nic netlink.Link, routes []netlink.Route, neighbours []netlink.Neigh) string {
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
