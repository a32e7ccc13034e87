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
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/collect"
	"slipstream.dev/internal/ethtool"
	"slipstream.dev/internal/fastpath"
	"slipstream.dev/internal/netns"
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
	before, err := l.count()
	if err != nil {
		return f, err
	}
	if err := sleep(ctx, window); err != nil {
		return f, err
	}
	after, err := l.count()
	if err != nil {
		return f, err
	}
	host := l.collector.Host(before.collected, after.collected)
	f.Window, f.CPUs = time.Duration(host.Seconds*float64(time.Second)), host.CPUs
	f.FlowLimited = l.collector.FlowLimited(before.collected, after.collected)
	f.RPFiltered = after.rpFiltered - before.rpFiltered
	f.Throttled = throttledSince(before.throttled, after.throttled)
	if f.Devices, err = l.devices(f.Node.Links, before, after); err != nil || !probe {
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
	f.Lacks = accel.Lacks(l.line("thread-self/status"))
	f.Conntrack = l.number("sys/net/netfilter/nf_conntrack_count")
	f.ConntrackMax = l.number("sys/net/netfilter/nf_conntrack_max")
	f.Tools, f.NoTools = installed(os.Getenv("PATH"))
	if f.Flowtables, err = flowtables(f.Node.Links); err != nil {
		return f, err
	}
	names, _ := fs.Glob(l.proc, "[0-9]*/comm")
	f.IRQBalance = slices.ContainsFunc(names, func(name string) bool { return l.line(name) == "irqbalance" })
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

// installed sorts the tools that an experiment may name into those that are in the folders of path, and those that
// are not.
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
	collected  collect.Snapshot
	links      map[string]netlink.Link
	rpFiltered uint64
	throttled  map[string]collect.Throttling
	// caps holds Device.Caps for each device.
	caps map[string]map[string]uint64
}

func (l looker) count() (c counts, err error) {
	if c.collected, err = l.collector.Snapshot(); err != nil {
		return c, err
	}
	// /proc/net describes the namespace of the process's first thread, which may be another one.
	c.rpFiltered = parseCounter(l.line("thread-self/net/netstat"), "TcpExt", "IPReversePathFilter")
	links, err := netns.Dump("links", netlink.LinkList)
	if err != nil {
		return c, err
	}
	c.links, c.caps = make(map[string]netlink.Link, len(links)), make(map[string]map[string]uint64)
	for _, link := range links {
		name := link.Attrs().Name
		c.links[name] = link
		if link.Type() == "device" && name != "lo" {
			c.caps[name] = l.caps(name)
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

// devices collects the facts about each device.
func (l looker) devices(links []record.Link, before, after counts) (all []Device, err error) {
	for _, link := range links {
		was, is := before.links[link.Name], after.links[link.Name]
		if was == nil || is == nil || was.Attrs().Index != is.Attrs().Index {
			continue // came or went during the window
		}
		d := Device{Link: link, Up: is.Attrs().Flags&net.FlagUp != 0}
		d.Under, d.Overhead = encapsulation(is, after.links)
		if vxlan, ok := is.(*netlink.Vxlan); ok {
			d.VXLANPort = uint16(vxlan.Port)
		}
		d.Boot = packets(is)
		d.Window = d.Boot.since(packets(was))
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

// wire reads the facts that only a NIC has.
func (l looker) wire(d *Device, before, after map[string]uint64) {
	if size, most, err := l.tool.Ring(d.Name); err == nil {
		d.Ring, d.RingMax = size, most
	}
	b, _ := fs.ReadFile(l.sys.FS(), "class/net/"+d.Name+"/speed") // this fails if the link is down
	if mbit, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && mbit > 0 {
		d.Speed = float64(mbit) * 1e6
	}
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
	return int(l.number("sys/net/ipv4/conf/" + device + "/rp_filter"))
}

// off returns the offloads that a device supports and that are switched off.
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

// encapsulation returns the device that sends the encapsulated packets, and how many bytes encapsulation adds to
// an IP packet. It returns "" for a device that does not encapsulate, and for one that leaves both to each
// packet's route, such as Cilium's VXLAN device: its MTU limits nothing.
func encapsulation(l netlink.Link, links map[string]netlink.Link) (under string, overhead int) {
	const ip4, ip6, udp, vxlan, ethernet, gre = 20, 40, 8, 8, 14, 4
	var lower int
	switch l := l.(type) {
	case *netlink.Vxlan:
		if l.FlowBased {
			return "", 0
		}
		lower, overhead = l.VtepDevIndex, ip4+udp+vxlan+ethernet // RFC 7348, section 5
		if isIPv6(l.SrcAddr) || isIPv6(l.Group) {
			overhead += ip6 - ip4
		}
	case *netlink.Iptun:
		lower, overhead = int(l.Link), ip4
	case *netlink.Gretap:
		lower, overhead = int(l.Link), ip4+gre+ethernet
	default:
		return "", 0
	}
	for name, u := range links {
		if lower != 0 && u.Attrs().Index == lower {
			return name, overhead
		}
	}
	return "", 0 // not bound to a device: each packet's route chooses one
}

func isIPv6(ip net.IP) bool { return ip != nil && ip.To4() == nil }

// line returns the content of a file, or "" if it cannot be read.
func (l looker) line(name string) string {
	b, _ := fs.ReadFile(l.proc, name)
	return strings.TrimSpace(string(b))
}

// number returns the number in a file, or 0 if there is none.
func (l looker) number(name string) uint64 {
	n, _ := strconv.ParseUint(l.line(name), 10, 64)
	return n
}
