package doctor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"

	mdlayher "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/kernelfs"
	"slipstream.dev/internal/netns"
)

// pod is a network namespace behind a veth, with a process in it.
type pod struct {
	name      string // of the veth, and of the process
	veth      string
	namespace int    // the number by which this network namespace knows it
	process   string // below /proc
	ns        string // what identifies the namespace
	index     int    // of the pod's end of the veth
	// failed means that nobody had answered for the pod's gateway when the window began, and asked that the kernel was asking.
	failed, asked bool
}

// own is the folder below /proc of this thread. /proc/net describes the namespace of the process's first thread, which may
// be another one.
const own = "thread-self"

// namespace identifies the network namespace of a process; "" if this process may not see it.
func (l looker) namespace(process string) string {
	target, _ := fs.ReadLink(l.proc, path.Join(process, "ns/net"))
	return target
}

// pods finds the network namespaces that links lead to and that have a process. A pod is named after a process in it,
// and after pause only if there is no other.
func (l looker) pods(links []netlink.Link) (all []pod) {
	veths := make(map[int][]*netlink.LinkAttrs)
	for _, link := range links {
		if a := link.Attrs(); a.NetNsID >= 0 {
			veths[a.NetNsID] = append(veths[a.NetNsID], a)
		}
	}
	if len(veths) == 0 {
		return nil
	}
	seen := map[string]int{l.namespace(own): -1, "": -1}
	processes, _ := fs.Glob(l.proc, "[0-9]*")
	for _, process := range processes {
		ns := l.namespace(process)
		if i, known := seen[ns]; known {
			if comm := kernelfs.Text(l.proc, process+"/comm"); i >= 0 && comm != "" && strings.HasSuffix(all[i].name, "(pause)") {
				all[i].name = fmt.Sprintf("%s (%s)", all[i].veth, comm)
			}
			continue
		}
		seen[ns] = -1
		number, err := strconv.Atoi(process)
		if err != nil {
			continue
		}
		id, err := netlink.GetNetNsIdByPid(number)
		p := pod{namespace: id, process: process, ns: ns}
		if err == nil && len(veths[id]) > 0 && l.isIn(p) {
			seen[ns] = len(all)
			p = l.behind(veths[id], p)
			p.name = fmt.Sprintf("%s (%s)", p.veth, kernelfs.Text(l.proc, process+"/comm"))
			all = append(all, p)
		}
	}
	return all
}

// behind returns a pod with the veth of its default route, or with the first veth if it has no such route. Several
// veths lead to a container that is on several networks.
func (l looker) behind(veths []*netlink.LinkAttrs, p pod) pod {
	for _, v := range veths {
		p.veth, p.index = v.Name, v.ParentIndex
		if end, err := l.podEnd(p); err == nil { // the pod may be gone
			p.failed, p.asked = end.GatewayFailed, end.GatewayAsked
			return p
		}
	}
	p.veth, p.index = veths[0].Name, veths[0].ParentIndex
	return p
}

// isIn reports whether the process of a pod is still in the pod's network namespace. A network plugin, for example,
// enters it only for a moment.
func (l looker) isIn(p pod) bool { return l.namespace(p.process) == p.ns }

// podStack reads the counters of a pod; nil if its process left the network namespace meanwhile.
func (l looker) podStack(p pod) map[string]uint64 {
	if !l.isIn(p) {
		return nil
	}
	counts := l.stack(p.process)
	if !l.isIn(p) {
		return nil
	}
	return counts
}

// stack reads the counters of the network namespace of a process.
func (l looker) stack(process string) map[string]uint64 {
	counts := make(map[string]uint64)
	at := process + "/net/"
	parseGroups(kernelfs.Text(l.proc, at+"snmp"), counts)
	parseGroups(kernelfs.Text(l.proc, at+"netstat"), counts)
	parseNamed(kernelfs.Text(l.proc, at+"snmp6"), counts)
	parseNamed(kernelfs.Text(l.proc, at+"xfrm_stat"), counts)
	_ = l.conntrack(process, counts) // ReadFacts says why
	return counts
}

// conntrack reads the counters of conntrack in the network namespace of a process into counts.
func (l looker) conntrack(process string, counts map[string]uint64) error {
	if text := kernelfs.Text(l.proc, process+"/net/stat/nf_conntrack"); text != "" {
		parsePerCPU(text, "nf_conntrack", counts)
		return nil
	}
	if kernelfs.Text(l.proc, "sys/net/netfilter/nf_conntrack_count") == "" {
		return nil // a request would load conntrack
	}
	read := func() error { return askConntrack(counts) } // a kernel without CONFIG_NF_CONNTRACK_PROCFS, as Ubuntu's
	if process == own {
		return read()
	}
	return netns.DoAt(procDir+"/"+process+"/ns/net", read)
}

// conntrackCounters are the counters of conntrack that rules judge, by their attributes (enum ctattr_stats_cpu in
// include/uapi/linux/netfilter/nfnetlink_conntrack.h).
var conntrackCounters = map[uint16]string{4: "invalid", 9: "insert_failed", 10: "drop", 11: "early_drop"}

// askConntrack asks the kernel for the counters of conntrack in this network namespace, as conntrack -S does, and adds them to counts.
func askConntrack(counts map[string]uint64) error {
	const statsOfCPUs = 4 // IPCTNL_MSG_CT_GET_STATS_CPU
	messages, err := netns.Dump("counters of conntrack", func() ([][]byte, error) {
		request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|statsOfCPUs, unix.NLM_F_DUMP)
		request.AddData(&nl.Nfgenmsg{NfgenFamily: unix.NFPROTO_UNSPEC, Version: nl.NFNETLINK_V0})
		return request.Execute(unix.NETLINK_NETFILTER, 0)
	})
	if err != nil {
		return err
	}
	for _, m := range messages {
		if len(m) < nl.SizeofNfgenmsg {
			continue
		}
		a, err := mdlayher.NewAttributeDecoder(m[nl.SizeofNfgenmsg:])
		if err != nil {
			return err
		}
		a.ByteOrder = binary.BigEndian
		for a.Next() {
			if name, judged := conntrackCounters[a.Type()]; judged {
				counts["nf_conntrack."+name] += uint64(a.Uint32())
			}
		}
		if err := a.Err(); err != nil {
			return err
		}
	}
	return nil
}

// neighbourFulls reads how often the table of neighbours was full. The machine has one table, and only the first network
// namespace shows it.
func (l looker) neighbourFulls() map[string]uint64 {
	all := make(map[string]uint64)
	for _, name := range []string{"arp_cache", "ndisc_cache"} {
		for _, process := range []string{own, "1"} {
			if text := kernelfs.Text(l.proc, process+"/net/stat/"+name); text != "" {
				counts := make(map[string]uint64)
				parsePerCPU(text, name, counts)
				all[name] = counts[name+".table_fulls"]
				break
			}
		}
	}
	return all
}

// settings are the sysctls that rules judge.
var settings = []string{
	"net.bridge.bridge-nf-call-iptables",
	"net.ipv4.conf.all.rp_filter",
	"net.ipv4.ip_forward",
	"net.ipv4.neigh.default.gc_thresh3",
	"net.ipv6.conf.all.forwarding",
	"net.ipv6.neigh.default.gc_thresh3",
}

func (l looker) settings() map[string]string {
	all := make(map[string]string)
	for _, name := range settings {
		if value := kernelfs.Text(l.proc, "sys/"+strings.ReplaceAll(name, ".", "/")); value != "" {
			all[name] = value
		}
	}
	return all
}

// tables are the tables of the kernel that say where the packets of a device go.
type tables struct {
	addresses  map[int][]netip.Prefix
	routes     map[int]int
	families   map[int]families // of the addresses of devices, and of the routes through them
	fdb        map[int][]FDBEntry
	neighbours map[int][]Neighbour
	unresolved map[int][]netip.Addr
	gateway    int // of the default route
	blackholes []netip.Prefix
}

func (l looker) tables() (t tables, err error) {
	t = tables{make(map[int][]netip.Prefix), make(map[int]int), make(map[int]families), make(map[int][]FDBEntry), make(map[int][]Neighbour), make(map[int][]netip.Addr), 0, nil}
	addresses, err := netns.Dump("addresses", func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return t, err
	}
	for _, a := range addresses {
		if ip, ok := netip.AddrFromSlice(a.IP); ok && a.Scope == unix.RT_SCOPE_UNIVERSE {
			ones, _ := a.Mask.Size()
			t.addresses[a.LinkIndex] = append(t.addresses[a.LinkIndex], netip.PrefixFrom(ip.Unmap(), ones))
			t.families[a.LinkIndex] = t.families[a.LinkIndex].with(ip)
		}
	}
	routes, err := netns.Dump("routes", func() ([]netlink.Route, error) { return netlink.RouteList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return t, err
	}
	for _, r := range routes {
		if to, ok := prefixOf(r.Dst); ok && slices.Contains([]int{unix.RTN_BLACKHOLE, unix.RTN_UNREACHABLE, unix.RTN_PROHIBIT}, r.Type) {
			t.blackholes = append(t.blackholes, to)
		}
		if r.Protocol != unix.RTPROT_KERNEL { // those that come with an address lead to no other node
			t.routes[r.LinkIndex]++
			if to, ok := prefixOf(r.Dst); ok {
				t.families[r.LinkIndex] = t.families[r.LinkIndex].with(to.Addr())
			}
		}
		if netns.IsDefaultRoute(r) && r.LinkIndex != 0 && t.gateway == 0 {
			t.gateway = r.LinkIndex
		}
	}
	entries, err := netns.Dump("forwarding entries", func() ([]netlink.Neigh, error) { return netlink.NeighList(0, unix.AF_BRIDGE) })
	if err != nil {
		return t, err
	}
	for _, e := range entries {
		if to, ok := netip.AddrFromSlice(e.IP); ok && e.Flags&netlink.NTF_SELF != 0 {
			t.fdb[e.LinkIndex] = append(t.fdb[e.LinkIndex], FDBEntry{e.HardwareAddr.String(), to.Unmap()})
		}
	}
	entries, err = netns.Dump("neighbours", func() ([]netlink.Neigh, error) { return netlink.NeighList(0, netlink.FAMILY_ALL) })
	if err != nil {
		return t, err
	}
	for _, e := range entries {
		ip, ok := netip.AddrFromSlice(e.IP)
		switch {
		case !ok:
		case e.State&(netlink.NUD_FAILED|netlink.NUD_INCOMPLETE) != 0:
			if slices.ContainsFunc(routes, func(r netlink.Route) bool { return r.LinkIndex == e.LinkIndex && r.Gw.Equal(e.IP) }) {
				t.unresolved[e.LinkIndex] = append(t.unresolved[e.LinkIndex], ip.Unmap())
			}
		case len(e.HardwareAddr) == 6 && e.State&netlink.NUD_NOARP == 0:
			t.neighbours[e.LinkIndex] = append(t.neighbours[e.LinkIndex], Neighbour{ip.Unmap(), e.HardwareAddr.String()})
		}
	}
	return t, nil
}

// families are the kinds of IP that a device uses.
type families struct{ four, six bool }

func (f families) with(ip netip.Addr) families {
	return families{f.four || ip.Unmap().Is4(), f.six || !ip.Unmap().Is4()}
}

// stillUnresolved leaves out the neighbours that answered by a second reading.
func (t tables) stillUnresolved(last tables) {
	for device := range t.unresolved {
		t.unresolved[device] = slices.DeleteFunc(t.unresolved[device], func(ip netip.Addr) bool { return !slices.Contains(last.unresolved[device], ip) })
	}
}

func prefixOf(n *net.IPNet) (p netip.Prefix, ok bool) {
	if n == nil {
		return p, false
	}
	ip, ok := netip.AddrFromSlice(n.IP)
	ones, _ := n.Mask.Size()
	return netip.PrefixFrom(ip.Unmap(), ones), ok
}

// otherHost counts, by index, the packets that devices received for other machines. It is empty before Linux 5.19.
func otherHost() (map[int]uint64, error) {
	// struct if_stats_msg: family, padding, index, mask of IFLA_STATS_LINK_64; then struct rtnl_link_stats64, of which this is
	// the last field (include/uapi/linux/if_link.h).
	const head, offset = 12, 24 * 8
	messages, err := netns.Dump("statistics", func() ([][]byte, error) {
		request := nl.NewNetlinkRequest(unix.RTM_GETSTATS, unix.NLM_F_DUMP)
		request.AddRawData([]byte{0, 0, 0, 0, 0, 0, 0, 0, 1 << (unix.IFLA_STATS_LINK_64 - 1), 0, 0, 0})
		return request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWSTATS)
	})
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
		return nil, nil // before Linux 4.7
	}
	if err != nil {
		return nil, err
	}
	all := make(map[int]uint64)
	for _, m := range messages {
		const attribute = 4 // its head
		if len(m) >= head+attribute+offset+8 {
			all[int(binary.NativeEndian.Uint32(m[4:]))] = binary.NativeEndian.Uint64(m[head+attribute+offset:])
		}
	}
	return all, nil
}

// qdiscs lists the queueing disciplines.
func qdiscs() ([]netlink.Qdisc, error) {
	return netns.Dump("queueing disciplines", func() ([]netlink.Qdisc, error) { return netlink.QdiscList(nil) })
}

// emulates reports whether a queueing discipline of a device emulates a network.
func emulates(device int, all []netlink.Qdisc) bool {
	return slices.ContainsFunc(all, func(q netlink.Qdisc) bool { return q.Attrs().LinkIndex == device && q.Type() == "netem" })
}

// qdiscsSince returns the counts of a device's queueing disciplines between two readings. It leaves out those with
// children, which count their children's packets again. An mq is left out by its kind: if the kernel attached it, no
// handle identifies its children.
func qdiscsSince(device int, before, after []netlink.Qdisc) (all []Qdisc) {
	is := func(a, b netlink.Qdisc) bool {
		return a.Attrs().LinkIndex == b.Attrs().LinkIndex && a.Attrs().Handle == b.Attrs().Handle && a.Attrs().Parent == b.Attrs().Parent && a.Type() == b.Type()
	}
	for _, q := range after {
		a := q.Attrs()
		if a.LinkIndex != device || q.Type() == "mq" || q.Type() == "mqprio" || a.Statistics == nil || a.Statistics.Queue == nil || a.Statistics.Basic == nil {
			continue
		}
		if slices.ContainsFunc(after, func(c netlink.Qdisc) bool {
			return c.Attrs().LinkIndex == device && a.Handle != 0 && c.Attrs().Parent != a.Parent && c.Attrs().Parent>>16 == a.Handle>>16
		}) {
			continue
		}
		i := slices.IndexFunc(before, func(b netlink.Qdisc) bool { return is(b, q) })
		if i < 0 || before[i].Attrs().Statistics == nil || before[i].Attrs().Statistics.Queue == nil || before[i].Attrs().Statistics.Basic == nil {
			continue
		}
		was := before[i].Attrs().Statistics
		// The kernel's counters have 32 bits.
		dropped, sent := a.Statistics.Queue.Drops-was.Queue.Drops, a.Statistics.Basic.Packets-was.Basic.Packets
		if dropped > 0 {
			all = append(all, Qdisc{q.Type(), netlink.HandleStr(a.Handle), uint64(sent), uint64(dropped)})
		}
	}
	return all
}

// notForwarding returns the settings that keep packets which arrive at a device from being forwarded. Those of a family that
// the device does not use are left out: a node of an IPv6-only cluster need not forward IPv4.
func (l looker) notForwarding(device string, uses families) (files []string) {
	for family, counts := range map[string]bool{"ipv4": uses.four || !uses.six, "ipv6": uses.six} {
		file := "sys/net/" + family + "/conf/" + device + "/forwarding"
		if counts && kernelfs.Text(l.proc, file) == "0" {
			files = append(files, procDir+"/"+file)
		}
	}
	slices.Sort(files)
	return files
}

// isPod reports whether a device leads to a pod. A veth with the address of a network, such as the NIC of a lab's node, leads
// to another machine.
func (d Device) isPod() bool {
	return (d.Class == v1alpha1.DeviceHostVeth || d.Kind == "netkit") && !slices.ContainsFunc(d.Addresses, func(p netip.Prefix) bool { return !p.IsSingleIP() })
}

// podEnd reads the default route of a pod.
func (l looker) podEnd(p pod) (end PodEnd, err error) {
	ns, err := netns.Open(procDir + "/" + p.process + "/ns/net")
	if err != nil {
		return end, err
	}
	defer ns.Close()
	if !l.isIn(p) {
		return end, errors.New("its process left the network namespace")
	}
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return end, err
	}
	defer h.Close()
	routes, err := netns.Dump("routes of a pod", func() ([]netlink.Route, error) { return h.RouteList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return end, err
	}
	i := slices.IndexFunc(routes, func(r netlink.Route) bool { return netns.IsDefaultRoute(r) && r.LinkIndex == p.index })
	if i < 0 {
		return end, errors.New("no default route")
	}
	link, err := h.LinkByIndex(p.index)
	if err != nil {
		return end, err
	}
	end.Device, end.MTU = link.Attrs().Name, link.Attrs().MTU
	if qdiscs, err := netns.Dump("queueing disciplines of a pod", func() ([]netlink.Qdisc, error) { return h.QdiscList(link) }); err == nil {
		end.Emulates = emulates(p.index, qdiscs)
	}
	if routes[i].MTU > 0 {
		end.MTU = min(end.MTU, routes[i].MTU)
	}
	gateway, ok := netip.AddrFromSlice(routes[i].Gw)
	if !ok {
		return end, nil
	}
	end.Gateway = gateway.Unmap()
	neighbours, err := netns.Dump("neighbours of a pod", func() ([]netlink.Neigh, error) { return h.NeighList(p.index, netlink.FAMILY_ALL) })
	for _, n := range neighbours {
		if n.IP.Equal(routes[i].Gw) {
			end.GatewayFailed = n.State&(netlink.NUD_FAILED|netlink.NUD_INCOMPLETE) != 0
			end.GatewayAsked = n.State&netlink.NUD_INCOMPLETE != 0
			// A device without ARP, such as a netkit device of layer 3, has entries with its own MAC address.
			if len(n.HardwareAddr) > 0 && n.State&netlink.NUD_NOARP == 0 && !end.GatewayFailed {
				end.GatewayMAC = n.HardwareAddr.String()
			}
		}
	}
	return end, err
}

// manager is a program that manages network devices.
type manager struct {
	name string
	root string // of the program, below /proc
}

// managers finds the programs that manage devices of this network namespace.
func (l looker) managers() (all []manager) {
	comms, _ := fs.Glob(l.proc, "[0-9]*/comm")
	for _, file := range comms {
		// The kernel cuts names off after 15 bytes.
		name := map[string]string{"NetworkManager": "NetworkManager", "systemd-network": "systemd-networkd"}[kernelfs.Text(l.proc, file)]
		process := path.Dir(file)
		if name != "" && l.namespace(process) == l.namespace(own) {
			all = append(all, manager{name, process + "/root/"})
		}
	}
	return all
}

// manages returns the file of a manager about the device with an index; "" if it does not manage the device. Sources:
// NM_CONFIG_DEVICE_STATE_DIR of NetworkManager, link_save of systemd-networkd.
func (l looker) manages(m manager, index int) string {
	file := fmt.Sprintf("run/NetworkManager/devices/%d", index)
	if m.name == "systemd-networkd" {
		file = fmt.Sprintf("run/systemd/netif/links/%d", index)
	}
	for line := range strings.Lines(kernelfs.Text(l.proc, m.root+file)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		if key == "managed" && value == "true" || key == "ADMIN_STATE" && slices.Contains([]string{"configuring", "configured", "failed"}, value) {
			return "/" + file
		}
	}
	return ""
}

// local returns the source address that a VXLAN device is configured with, if any. It ignores a device that was moved
// here, which sends from another network namespace.
func local(vxlan *netlink.Vxlan) netip.Addr {
	ip, ok := netip.AddrFromSlice(vxlan.SrcAddr)
	if ip = ip.Unmap(); !ok || vxlan.NetNsID >= 0 || !ip.IsGlobalUnicast() {
		return netip.Addr{}
	}
	return ip
}

// elsewhere returns the name of the device that the routes to the remote addresses of a VXLAN device use, if it is not
// the device that the VXLAN device is bound to. It is empty if one of these routes uses that device, its master or
// parent, or a device of which it is the master or parent.
func elsewhere(vxlan *netlink.Vxlan, fdb []FDBEntry, links map[string]netlink.Link) (name string) {
	if vxlan.VtepDevIndex == 0 || vxlan.NetNsID >= 0 {
		return ""
	}
	at := func(index int) (string, *netlink.LinkAttrs) {
		for name, l := range links {
			if l.Attrs().Index == index {
				return name, l.Attrs()
			}
		}
		return "", nil
	}
	_, bound := at(vxlan.VtepDevIndex)
	for _, e := range fdb {
		routes, err := netlink.RouteGetWithOptions(e.To.AsSlice(), &netlink.RouteGetOptions{SrcAddr: vxlan.SrcAddr, OifIndex: vrfOf(vxlan.VtepDevIndex, links)})
		if e.To.IsUnspecified() || e.To.IsMulticast() || err != nil || len(routes) == 0 {
			continue
		}
		by, via := at(routes[0].LinkIndex)
		if bound == nil || via == nil || via.Flags&net.FlagLoopback != 0 || via.Index == bound.Index || via.Index == bound.MasterIndex || bound.Index == via.MasterIndex ||
			via.ParentIndex == bound.Index || bound.ParentIndex == via.Index {
			return ""
		}
		name = by
	}
	return name
}

// vrfOf returns the index of the VRF whose routes the packets of a device take: the device itself, or its master, or that one's
// master; 0 if there is none.
func vrfOf(device int, links map[string]netlink.Link) int {
	for range 3 {
		var master int
		for _, l := range links {
			if l.Attrs().Index != device {
				continue
			}
			if l.Type() == "vrf" {
				return device
			}
			master = l.Attrs().MasterIndex
		}
		device = master
	}
	return 0
}

// egress returns the index of the device that sends packets to an address; 0 if there is none.
func egress(ip net.IP) int {
	if ip == nil || ip.IsUnspecified() {
		return 0
	}
	routes, err := netlink.RouteGet(ip)
	if err != nil || len(routes) == 0 {
		return 0
	}
	return routes[0].LinkIndex
}
