package doctor

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/collect"
	"slipstream.dev/internal/ethtool"
	"slipstream.dev/internal/fastpath"
	"slipstream.dev/internal/kernelfs"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/nic"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/traffic/tools"
)

// procDir is where procfs is mounted.
const procDir = "/proc"

// looker reads facts in the network namespace of the calling thread.
type looker struct {
	proc      fs.FS
	sys       *os.Root
	tool      *ethtool.Tool
	collector *collect.Collector
}

// ReadFacts reads the facts of this machine and of the calling thread's network namespace. It reads the counters twice,
// a window apart, and changes nothing. With probe it also tries the fast path, in temporary network namespaces.
func ReadFacts(ctx context.Context, window time.Duration, probe bool) (f Facts, err error) {
	l := looker{proc: os.DirFS(procDir)}
	if l.sys, err = netns.Sysfs(); err != nil {
		return f, err
	}
	defer l.sys.Close()
	if l.tool, err = ethtool.Open(); err != nil {
		return f, err
	}
	defer l.tool.Close()
	if l.collector, err = collect.New(collect.Options{Proc: procDir, Sys: l.sys.FS(), CPUs: true, NoEBPF: true}); err != nil {
		return f, err
	}
	defer l.collector.Close()

	if f, err = l.machine(ctx); err != nil {
		return f, err
	}
	t, err := l.tables()
	if err != nil {
		return f, err
	}
	links, err := netns.Dump("links", netlink.LinkList)
	if err != nil {
		return f, err
	}
	pods := l.pods(podLinks(f.Node.Links, links, t))
	filtered := l.filters(podDevices(f.Node.Links))
	f.Blackholes = t.blackholes
	f.Rules, f.KubeProxy, f.Settings = filtered.rules, filtered.kubeProxy, l.settings()
	before, err := l.count(pods)
	if err != nil {
		return f, err
	}
	if err := sleep(ctx, window); err != nil {
		return f, err
	}
	after, err := l.count(pods)
	if err != nil {
		return f, err
	}
	last := l.filters(podDevices(f.Node.Links))
	f.Unread = last.unread
	if err := l.conntrack(own, make(map[string]uint64)); err != nil {
		f.Unread = append(f.Unread, evidence("counters of conntrack were not read", "%v", err))
	}
	lastTables, err := l.tables()
	if err != nil {
		return f, err
	}
	t.stillUnresolved(lastTables)
	f.Chains = chainsSince(filtered.chains, last.chains)
	host := l.collector.Host(before.collected, after.collected)
	f.Window, f.CPUs = time.Duration(host.Seconds*float64(time.Second)), host.CPUs
	f.FlowLimited = l.collector.FlowLimited(before.collected, after.collected)
	f.Stacks = stacksSince(before.stacks, after.stacks)
	f.NeighbourFulls = grown(before.neighbourFulls, after.neighbourFulls)
	f.Gone = gone(f.Node.Links, before.links, after.links)
	f.Throttled = throttledSince(before.throttled, after.throttled)
	if f.Devices, err = l.devices(f.Node.Links, before, after, t, pods); err != nil || !probe {
		return f, err
	}
	f.FastPath = probeFastPath(ctx)
	return f, context.Cause(ctx)
}

// probeFastPath returns why the fast path cannot run. On a busy machine the probe's own packets may be late, so
// only a check that fails every time counts.
func probeFastPath(ctx context.Context) string {
	var err error
	for range tries {
		if err = accel.Probe(ctx)(v1alpha1.Accelerator{Fastpath: &v1alpha1.Fastpath{}}); err == nil || ctx.Err() != nil {
			return ""
		}
		if errors.Is(err, fs.ErrPermission) {
			break
		}
	}
	return err.Error()
}

// sleep waits for d, or until ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// machine reads the facts that do not depend on the window.
func (l looker) machine(ctx context.Context) (f Facts, err error) {
	if f.Node, err = collect.Describe(ctx, l.proc, l.sys.FS()); err != nil {
		return f, err
	}
	if err := accel.Classify(f.Node.Links, false); err != nil {
		return f, err
	}
	_, err = fs.Stat(l.sys.FS(), "kernel/btf/vmlinux")
	f.BTF = err == nil
	f.Lacks = accel.Lacks(kernelfs.Text(l.proc, "thread-self/status"))
	f.Conntrack = kernelfs.Number(l.proc, "sys/net/netfilter/nf_conntrack_count")
	f.ConntrackMax = kernelfs.Number(l.proc, "sys/net/netfilter/nf_conntrack_max")
	f.Tools, f.NoTools = installed(os.Getenv("PATH"))
	if f.Flowtables, err = flowtables(f.Node.Links); err != nil {
		return f, err
	}
	names, _ := fs.Glob(l.proc, "[0-9]*/comm")
	f.IRQBalance = slices.ContainsFunc(names, func(name string) bool { return kernelfs.Text(l.proc, name) == "irqbalance" })
	return f, nil
}

// flowtables lists the flowtables of nftables with their devices. It returns none if this process may not list
// them.
func flowtables(links []record.Link) (all []Flowtable, err error) {
	tables, err := fastpath.Flowtables()
	if errors.Is(err, fs.ErrPermission) {
		return nil, nil
	}
	for _, t := range tables {
		f := Flowtable{Name: t.Name}
		for _, l := range links {
			if t.At(l.Name) {
				f.Devices = append(f.Devices, l.Name)
			}
		}
		all = append(all, f)
	}
	return all, err
}

// installed divides the tools that an experiment may name into those in the folders of path, and the missing ones.
func installed(path string) (there, missing []string) {
	for name, programs := range tools.Programs() {
		if slices.ContainsFunc(programs, func(p string) bool { return tools.Find(path, p) == "" }) {
			missing = append(missing, name)
		} else {
			there = append(there, name)
		}
	}
	slices.Sort(there)
	slices.Sort(missing)
	return there, missing
}

// counts are the counters at one moment.
type counts struct {
	collected      collect.Snapshot
	links          map[string]netlink.Link
	stacks         map[string]map[string]uint64 // by Stack.Pod
	neighbourFulls map[string]uint64
	qdiscs         []netlink.Qdisc
	otherHost      map[int]uint64
	carrierDowns   map[string]uint64
	throttled      map[string]collect.Throttling
	// caps holds Device.Caps for each device.
	caps map[string]map[string]uint64
}

func (l looker) count(pods []pod) (c counts, err error) {
	if c.collected, err = l.collector.Snapshot(); err != nil {
		return c, err
	}
	c.stacks = map[string]map[string]uint64{"": l.stack(own)}
	for _, p := range pods {
		c.stacks[p.name] = l.podStack(p)
	}
	c.neighbourFulls = l.neighbourFulls()
	if c.qdiscs, err = qdiscs(); err != nil {
		return c, err
	}
	if c.otherHost, err = otherHost(); err != nil {
		return c, err
	}
	links, err := netns.Dump("links", netlink.LinkList)
	if err != nil {
		return c, err
	}
	c.links, c.caps, c.carrierDowns = make(map[string]netlink.Link, len(links)), make(map[string]map[string]uint64), make(map[string]uint64)
	for _, link := range links {
		name := link.Attrs().Name
		c.links[name] = link
		if link.Type() == "device" && name != "lo" {
			c.caps[name] = l.caps(name)
			c.carrierDowns[name] = kernelfs.Number(l.sys.FS(), "class/net/"+name+"/carrier_down_count") // absent before Linux 4.16
		}
	}
	c.throttled = collect.Throttled(l.cgroups())
	return c, nil
}

// isCap reports whether a driver's counter counts packets that a limit of the cloud delayed or dropped: one of
// ena's, or hv_netvsc's count of how often the host's ring was full.
func isCap(counter string) bool {
	return strings.HasSuffix(counter, "_allowance_exceeded") || counter == stopQueue
}

func (l looker) caps(device string) map[string]uint64 {
	all, err := l.tool.Counters(device)
	if err != nil {
		return nil // gone, or without counters
	}
	maps.DeleteFunc(all, func(name string, _ uint64) bool { return !isCap(name) })
	return all
}

// cgroups returns where the machine's cgroups are mounted. In a pod, the mount of the node's first process shows
// all of them.
func (l looker) cgroups() string {
	const mount = "sys/fs/cgroup"
	if all := filepath.Join(procDir, "1/root", mount); isFolder(all) {
		return all
	}
	return "/" + mount
}

func isFolder(name string) bool {
	info, err := os.Stat(name)
	return err == nil && info.IsDir()
}

// throttledSince returns how CPU limits throttled cgroups between two readings, the worst first.
func throttledSince(before, after map[string]collect.Throttling) (all []Throttled) {
	for cgroup, now := range after {
		was := before[cgroup]
		if now.Times > was.Times && now.Time >= was.Time {
			all = append(all, Throttled{cgroup, now.Times - was.Times, now.Time - was.Time})
		}
	}
	slices.SortFunc(all, func(a, b Throttled) int {
		return cmp.Or(cmp.Compare(b.Time, a.Time), cmp.Compare(a.Cgroup, b.Cgroup))
	})
	return all
}

// stacksSince returns what each stack counted between two readings, this network namespace's first.
func stacksSince(before, after map[string]map[string]uint64) (all []Stack) {
	for _, name := range slices.Sorted(maps.Keys(after)) {
		if grew := grown(before[name], after[name]); len(grew) > 0 || name == "" {
			all = append(all, Stack{name, grew})
		}
	}
	return all
}

// chainsSince returns the chains of the second reading, with the packets that they dropped since the first.
func chainsSince(before, after []Chain) []Chain {
	since := func(was, is uint64) uint64 { return is - min(was, is) } // counters may be reset
	for i, c := range after {
		b := slices.IndexFunc(before, func(b Chain) bool { return b.Name == c.Name })
		if b < 0 {
			after[i].Dropped, after[i].RuleDropped = 0, 0 // new
			continue
		}
		after[i].Dropped, after[i].RuleDropped = since(before[b].Dropped, c.Dropped), since(before[b].RuleDropped, c.RuleDropped)
	}
	return after
}

// gone returns the names of NICs that went away or were replaced.
func gone(links []record.Link, before, after map[string]netlink.Link) (names []string) {
	for _, l := range links {
		was, is := before[l.Name], after[l.Name]
		if l.NIC != nil && was != nil && (is == nil || is.Attrs().Index != was.Attrs().Index) {
			names = append(names, l.Name)
		}
	}
	return names
}

// podLinks returns the links that lead to pods.
func podLinks(links []record.Link, all []netlink.Link, t tables) (to []netlink.Link) {
	for _, link := range all {
		i := slices.IndexFunc(links, func(l record.Link) bool { return l.Name == link.Attrs().Name })
		if i >= 0 && (Device{Link: links[i], Addresses: t.addresses[link.Attrs().Index]}).isPod() {
			to = append(to, link)
		}
	}
	return to
}

// podDevices returns a function that reports whether packets of pods may cross a device. It takes the name of the
// device as in a rule, which may be a prefix and *.
func podDevices(links []record.Link) func(string) bool {
	return func(name string) bool {
		prefix, short := strings.CutSuffix(name, "*")
		return slices.ContainsFunc(links, func(l record.Link) bool {
			return (l.Name == name || short && strings.HasPrefix(l.Name, prefix)) && l.Name != "lo" && !isDocker(l.Name) && l.Class != v1alpha1.DeviceNIC
		})
	}
}

// devices collects the facts about each device.
func (l looker) devices(links []record.Link, before, after counts, t tables, pods []pod) (all []Device, err error) {
	managers := l.managers()
	for _, link := range links {
		was, is := before.links[link.Name], after.links[link.Name]
		if was == nil || is == nil || was.Attrs().Index != is.Attrs().Index {
			continue // came or went during the window
		}
		d := Device{Link: link, Up: is.Attrs().Flags&net.FlagUp != 0}
		l.place(&d, is, after.links, t, pods)
		d.Under, d.Overhead, d.Tunnelling = encapsulation(is, after.links, func(to []net.IP) int { return under(to, t.fdb[is.Attrs().Index], t.gateway) })
		if vxlan, ok := is.(*netlink.Vxlan); ok {
			d.VXLANPort, d.VNI = uint16(vxlan.Port), vxlan.VxlanId
			d.Local = local(vxlan)
			d.Elsewhere = elsewhere(vxlan, d.FDB, after.links)
		}
		d.CarrierDowns = after.carrierDowns[d.Name] - min(before.carrierDowns[d.Name], after.carrierDowns[d.Name])
		d.Qdiscs, d.Emulates = qdiscsSince(is.Attrs().Index, before.qdiscs, after.qdiscs), emulates(is.Attrs().Index, after.qdiscs)
		for _, m := range managers {
			if file := l.manages(m, is.Attrs().Index); file != "" {
				d.Manager, d.ManagerFile = m.name, file
			}
		}
		d.Boot = packets(is)
		d.Boot.OtherHost = after.otherHost[is.Attrs().Index]
		then := packets(was)
		then.OtherHost = before.otherHost[is.Attrs().Index]
		d.Window = d.Boot.since(then)
		if d.NIC != nil {
			l.wire(&d, before.caps[d.Name], after.caps[d.Name])
		}
		d.RPFilter = max(l.rpFilter("all"), l.rpFilter(d.Name))
		if d.Off, err = l.off(d.Name); err != nil {
			return nil, err
		}
		irq, err := accel.IRQCPUs(l.sys, procDir, d.Name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		d.IRQ = irq.String()
		all = append(all, d)
	}
	for _, use := range l.collector.VFs(before.collected, after.collected) {
		for i := range all {
			if all[i].Name == use.NIC {
				all[i].VF = &use
			}
		}
	}
	return all, nil
}

// place fills in where a device is: its addresses, its neighbours, and what it leads to.
func (l looker) place(d *Device, link netlink.Link, links map[string]netlink.Link, t tables, pods []pod) {
	a := link.Attrs()
	d.MAC, d.NoCarrier = a.HardwareAddr.String(), d.Up && a.OperState == netlink.OperDown || a.OperState == netlink.OperLowerLayerDown
	d.Addresses, d.Routes, d.FDB = t.addresses[a.Index], t.routes[a.Index], t.fdb[a.Index]
	d.Neighbours, d.Unresolved = t.neighbours[a.Index], t.unresolved[a.Index]
	stacked := a.NetNsID < 0 && slices.Contains([]string{"vlan", "macvlan"}, link.Type())
	for name, master := range links {
		if stacked && master.Attrs().Index == a.ParentIndex {
			d.Parent = name
		}
		if a.MasterIndex != 0 && master.Attrs().Index == a.MasterIndex {
			d.Master = name
			// A bridge in promiscuous mode receives its own packets, and routes them back.
			d.NoHairpin = kernelfs.Text(l.sys.FS(), "class/net/"+d.Name+"/brport/hairpin_mode") == "0" && master.Attrs().Promisc == 0
		}
	}
	d.NotForwarding = l.notForwarding(d.Name, t.families[a.Index])
	if !d.isPod() {
		return
	}
	d.Pod = new(PodEnd)
	if i := slices.IndexFunc(pods, func(p pod) bool { return p.namespace == a.NetNsID && p.index == a.ParentIndex }); i >= 0 {
		if end, err := l.podEnd(pods[i]); err == nil { // the pod may be gone
			end.GatewayFailed = end.GatewayFailed && pods[i].failed // a first request may be lost, and is repeated after a second
			end.GatewayAsked = end.GatewayFailed && (end.GatewayAsked || pods[i].asked)
			d.Pod = &end
		}
	}
}

// wire reads the facts that only a NIC has.
func (l looker) wire(d *Device, before, after map[string]uint64) {
	if size, most, err := l.tool.Ring(d.Name); err == nil {
		d.Ring, d.RingMax = size, most
	}
	d.Speed = nic.Speed(l.sys.FS(), d.Name)
	for name, now := range after {
		if now > before[name] {
			if d.Caps == nil {
				d.Caps = make(map[string]uint64)
			}
			d.Caps[name] = now - before[name]
		}
	}
}

// rpFilter reads the setting of a device, or of conf/all.
func (l looker) rpFilter(device string) int {
	return int(kernelfs.Number(l.proc, "sys/net/ipv4/conf/"+device+"/rp_filter"))
}

// off returns the supported offloads of a device that are switched off.
func (l looker) off(device string) (names []string, err error) {
	features, err := l.tool.Features(device)
	if err != nil {
		return nil, nil // gone, or without offloads
	}
	for name, f := range features {
		if f.Available && !f.Active {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

func packets(l netlink.Link) Packets {
	s := l.Attrs().Statistics
	if s == nil {
		return Packets{}
	}
	return Packets{Rx: s.RxPackets, Tx: s.TxPackets, RxBytes: s.RxBytes, TxBytes: s.TxBytes, Missed: s.RxMissedErrors, Damaged: s.RxErrors, TxDropped: s.TxDropped}
}

// under returns the index of the device that sends packets to the other ends of a tunnel. If no end is known, it is
// gateway, the device of the default route.
func under(to []net.IP, fdb []FDBEntry, gateway int) int {
	for _, t := range fdb {
		to = append(to, t.To.AsSlice())
	}
	for _, ip := range to {
		if index := egress(ip); index != 0 {
			return index
		}
	}
	return gateway
}

// encapsulation returns the device that sends the encapsulated packets, and how many bytes encapsulation adds to
// an IP packet. tunnelling is false for a device that does not encapsulate. under is "" for a device that leaves the
// rest to each packet's route, such as Cilium's VXLAN device: its MTU limits nothing. For a device that is not bound to
// another one, via returns the index of the device by which packets to its remote addresses leave.
func encapsulation(l netlink.Link, links map[string]netlink.Link, via func(to []net.IP) int) (under string, overhead int, tunnelling bool) {
	const ip4, ip6, udp, vxlan, ethernet, gre, wireguard = 20, 40, 8, 8, 14, 4, 32
	lower, external := 0, false
	var to []net.IP // remote addresses
	outer := func(local, remote net.IP) int {
		to = append(to, remote)
		if isIPv6(local) || isIPv6(remote) {
			return ip6
		}
		return ip4
	}
	switch l := l.(type) {
	case *netlink.Vxlan:
		lower, overhead, external = l.VtepDevIndex, outer(l.SrcAddr, l.Group)+udp+vxlan+ethernet, l.FlowBased // RFC 7348, section 5
		lower = cmp.Or(lower, holder(l.SrcAddr))
	case *netlink.Geneve:
		lower, overhead, external = int(l.Link), outer(nil, l.Remote)+udp+8+ethernet, l.FlowBased // RFC 8926, section 3
	case *netlink.Iptun:
		lower, overhead, external = int(l.Link), outer(l.Local, l.Remote), l.FlowBased
		lower = cmp.Or(lower, holder(l.Local))
	case *netlink.Sittun:
		lower, overhead = int(l.Link), outer(l.Local, l.Remote)
		lower = cmp.Or(lower, holder(l.Local))
	case *netlink.Ip6tnl:
		lower, overhead, external = int(l.Link), ip6, l.FlowBased
		to = append(to, l.Remote)
		lower = cmp.Or(lower, holder(l.Local))
	case *netlink.Gretap:
		lower, overhead, external = int(l.Link), outer(l.Local, l.Remote)+gre+ethernet, l.FlowBased
		lower = cmp.Or(lower, holder(l.Local))
	case *netlink.Gretun:
		lower, overhead, external = int(l.Link), outer(l.Local, l.Remote)+gre, l.FlowBased
		lower = cmp.Or(lower, holder(l.Local))
	case *netlink.Wireguard: // header and tag; the outer packet may be of IPv4
		overhead = ip4 + udp + wireguard
	default:
		return "", 0, false
	}
	if external || isFallback(l) {
		return "", 0, external
	}
	if lower == 0 {
		lower = via(to)
	}
	for name, u := range links {
		if lower != 0 && u.Attrs().Index == lower && name != l.Attrs().Name && u.Attrs().Flags&net.FlagLoopback == 0 {
			return name, overhead, true
		}
	}
	return "", 0, true // in another network namespace, or no route
}

// isFallback reports whether a device is an unused fallback device. The kernel makes tunl0, gre0 and so on in each
// network namespace, and they are down until somebody uses them.
func isFallback(l netlink.Link) bool {
	return l.Attrs().Flags&net.FlagUp == 0 && slices.Contains([]string{"tunl0", "gre0", "gretap0", "sit0", "ip6tnl0", "ip6gre0", "erspan0", "ip_vti0", "ip6_vti0"}, l.Attrs().Name)
}

// holder returns the index of the device that has an address; 0 if none has.
func holder(ip net.IP) int {
	if ip == nil || ip.IsUnspecified() {
		return 0
	}
	addresses, err := netns.Dump("addresses", func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return 0
	}
	for _, a := range addresses {
		if a.IP.Equal(ip) {
			return a.LinkIndex
		}
	}
	return 0
}

func isIPv6(ip net.IP) bool { return ip != nil && ip.To4() == nil }
