//go:build linux

// Package collect reads the counters of a machine at both edges of a window (CPU time, softirqs, backlogs and devices), and the
// facts about a place that affect a result. It changes nothing. internal/worker uses it; internal/experiment computes metrics
// from what it reads.
//
// The roots of file systems are parameters and parsers take bytes, so that tests can pass their own.
package collect

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/ethtool"
	"slipstream.dev/internal/kernelfs"
	"slipstream.dev/internal/nic"
	"slipstream.dev/internal/record"
)

// Options configures a Collector.
type Options struct {
	// Proc is the mount point of procfs, /proc if empty. It shows the devices of the network namespace of the process that
	// opens it.
	Proc string
	// Cgroup is the mount point of cgroups, /sys/fs/cgroup if empty.
	Cgroup string
	// Sys is a sysfs that shows this network namespace. Without it, virtual functions are not sampled.
	Sys fs.FS
	// CPUs adds the machine's CPUs to the devices of this network namespace. It suffices to set it in one place per machine.
	CPUs bool
	// NoEBPF disables the eBPF programs: softirq time then comes from the ticks of /proc/stat.
	NoEBPF bool
}

func (o Options) withDefaults() Options {
	o.Proc, o.Cgroup = cmp.Or(o.Proc, "/proc"), cmp.Or(o.Cgroup, "/sys/fs/cgroup")
	return o
}

// Collector takes snapshots. It keeps its files open between them.
type Collector struct {
	devices *source
	// nics holds the NICs that may have a VF. Each snapshot reads them again from at. ethtool is nil without Options.Sys.
	nics    nic.Snapshot
	at      nic.Source
	ethtool *ethtool.Tool
	// The rest is for Options.CPUs only.
	stat, softirqs, softnet, interrupts, conntrack *source
	limits                                         Limits
	proc                                           fs.FS
	boot                                           string
	exact                                          *softirqTimes // nil with Options.NoEBPF, or if softirqs cannot be traced; reason says why
	reason                                         error
}

// Snapshot holds the values of the counters at one instant.
type Snapshot struct {
	at         int64               // CLOCK_MONOTONIC in ns
	cpus       []cpu               // by number
	interrupts map[string][]uint32 // by number or name, a count for each of cpus
	switches   uint64
	exact      []softirqCPU
	throttled  []throttled // an entry for each of Collector.limits
	devices    []record.Device
	conntrack  conntrack
	nics       nic.Snapshot
}

// New opens the counters. Until Close, eBPF programs measure the time in softirqs, if the kernel and the privileges allow that;
// otherwise Host says why not.
func New(o Options) (*Collector, error) {
	return newCollector(o, openSoftirqTimes)
}

func newCollector(o Options, openSoftirq func() (*softirqTimes, error)) (c *Collector, err error) {
	o = o.withDefaults()
	c = new(Collector)
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("open counters: %w", err), c.Close())
			c = nil
		}
	}()
	if o.Sys != nil {
		if c.ethtool, err = ethtool.Open(); err != nil {
			return c, err
		}
		c.at = nic.Source{Sys: o.Sys, Tool: c.ethtool}
		c.nics = c.at.Read()
	}
	if c.devices, err = openSource(filepath.Join(o.Proc, "net/dev")); err != nil || !o.CPUs {
		return c, err
	}
	if c.stat, err = openSource(filepath.Join(o.Proc, "stat")); err != nil {
		return c, err
	}
	if c.softirqs, err = openSource(filepath.Join(o.Proc, "softirqs")); err != nil {
		return c, err
	}
	if c.softnet, err = openSource(filepath.Join(o.Proc, "net/softnet_stat")); err != nil {
		return c, err
	}
	if c.interrupts, err = openSource(filepath.Join(o.Proc, "interrupts")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return c, err
	}
	// It is absent without connection tracking.
	c.conntrack, err = openSource(filepath.Join(o.Proc, "net/stat/nf_conntrack"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
		return c, err
	}
	if c.limits, err = openLimits(o.Proc, o.Cgroup); err != nil {
		return c, err
	}
	c.proc = os.DirFS(o.Proc)
	if c.boot = kernelfs.Text(c.proc, bootID); c.boot == "" {
		return c, fmt.Errorf("%s/%s is empty or missing", o.Proc, bootID)
	}
	if !o.NoEBPF {
		c.exact, c.reason = openSoftirq()
	}
	return c, nil
}

// Close closes the files and detaches the eBPF programs.
func (c *Collector) Close() error {
	var errs []error
	for _, s := range []*source{c.devices, c.stat, c.softirqs, c.softnet, c.interrupts, c.conntrack} {
		if s != nil {
			errs = append(errs, s.file.Close())
		}
	}
	errs = append(errs, c.limits.Close())
	if c.ethtool != nil {
		c.ethtool.Close()
	}
	if c.exact != nil {
		errs = append(errs, c.exact.Close())
	}
	return errors.Join(errs...)
}

// Snapshot reads the counters in a fixed order, times first, so that the delays between reading the clock and reading each of
// them cancel out over a window.
func (c *Collector) Snapshot() (s Snapshot, err error) {
	if c.exact != nil {
		if s.exact, err = c.exact.Read(); err != nil {
			return s, err
		}
	}
	s.at = monotonic()
	for _, f := range []struct {
		*source
		parse func([]byte) error
	}{
		{c.stat, s.parseStat}, {c.softirqs, s.parseSoftirqs}, {c.softnet, s.parseSoftnet}, {c.devices, s.parseDevices},
		{c.interrupts, s.parseInterrupts}, {c.conntrack, s.parseConntrack},
	} {
		if f.source == nil {
			continue
		}
		if err := f.read(f.parse); err != nil {
			return s, err
		}
	}
	s.nics = c.at.ReadAgain(c.nics)
	limits, err := c.limits.Snapshot()
	s.throttled = limits.throttled
	return s, err
}

// Host returns what the machine's CPUs did between two snapshots of a Collector with Options.CPUs. It omits CPUs that went
// offline or online in between. The caller fills in the names of the nodes.
func (c *Collector) Host(before, after Snapshot) record.Host {
	h := record.Host{
		Boot: c.boot, PhysicalHost: physicalHost(c.proc), Seconds: seconds(after.at - before.at), Source: record.SoftirqTicks,
		Switches: after.switches - before.switches,
	}
	if c.exact != nil {
		h.Source = record.SoftirqEBPF
	}
	for j, a := range after.cpus {
		i, ok := find(before.cpus, a.id)
		if !ok {
			continue
		}
		r := a.since(before.cpus[i])
		r.Interrupts = interrupts(before, after, i, j)
		r.Softirq = r.SoftirqTicks
		if a.id < min(len(before.exact), len(after.exact)) {
			b, a := before.exact[a.id], after.exact[a.id]
			var all uint64
			for v := range a.Ns {
				all += a.Ns[v] - b.Ns[v]
			}
			// A softirq that began before the window and ended in it counts in full.
			within := func(ns uint64) float64 { return min(seconds(int64(ns)), h.Seconds) }
			r.Softirq = within(all)
			r.SoftirqNetRx = within(a.Ns[netRxVector] - b.Ns[netRxVector])
			r.SoftirqNetTx = within(a.Ns[netTxVector] - b.Ns[netTxVector])
		}
		// If the tick stops on idle CPUs, the kernel measures idle time by its clock, without the interrupts that an idle CPU
		// handles (get_cpu_idle_time_us in kernel/time/tick-sched.c). /proc/stat rounds it to ticks, so the error is at most 10
		// ms per edge, and as much again for iowait. cpuidle/state*/time in sysfs is finer, but grows only when a CPU wakes up.
		r.Busy = max(r.Softirq, min(h.Seconds-r.Idle, h.Seconds))
		h.CPUs = append(h.CPUs, r)
	}
	h.Warnings = append(c.limits.Warnings(before, after), after.conntrack.warnings(before.conntrack)...)
	if c.exact == nil && c.reason != nil {
		h.Warnings = append(h.Warnings, record.Warnf(record.WarnNoEBPF,
			"softirq time was measured by clock ticks, which miss most of it on idle cores: %v", c.reason))
	}
	return h
}

// FlowLimited returns how many packets the flow limit dropped between two snapshots of a Collector with Options.CPUs.
func (c *Collector) FlowLimited(before, after Snapshot) (packets uint64) {
	for _, a := range after.cpus {
		if i, ok := find(before.cpus, a.id); ok {
			packets += uint64(a.flowLimited - before.cpus[i].flowLimited)
		}
	}
	return packets
}

// Devices returns what the devices of the network namespace did between two snapshots, sorted by name. It omits devices that
// were created or deleted in between. The caller fills in the place.
func (c *Collector) Devices(before, after Snapshot) []record.Device {
	was := make(map[string]record.Device, len(before.devices))
	for _, d := range before.devices {
		was[d.Name] = d
	}
	var out []record.Device
next:
	for _, a := range after.devices {
		b, ok := was[a.Name]
		if !ok {
			continue
		}
		d := record.Device{Name: a.Name}
		for _, f := range []struct {
			to        *uint64
			now, then uint64
		}{
			{&d.RxPackets, a.RxPackets, b.RxPackets}, {&d.TxPackets, a.TxPackets, b.TxPackets},
			{&d.RxBytes, a.RxBytes, b.RxBytes}, {&d.TxBytes, a.TxBytes, b.TxBytes},
			{&d.RxDropped, a.RxDropped, b.RxDropped}, {&d.TxDropped, a.TxDropped, b.TxDropped},
			{&d.RxErrors, a.RxErrors, b.RxErrors}, {&d.TxErrors, a.TxErrors, b.TxErrors},
		} {
			if f.now < f.then {
				continue next
			}
			*f.to = f.now - f.then
		}
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b record.Device) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// VFs counts, for each NIC that may have a virtual function, all packets between two snapshots, and those that took the virtual
// function. The caller fills in the place.
func (c *Collector) VFs(before, after Snapshot) []record.VFUse {
	return nic.CountUse(before.nics, after.nics)
}

// Numbers of softirqs, as in the enum of include/linux/interrupt.h.
const (
	netTxVector = 2
	netRxVector = 3
)

func seconds(ns int64) float64 { return float64(ns) / 1e9 }

func monotonic() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // fails for clocks that do not exist
	return t.Nano()
}

// source is a file of the kernel that is read again and again from its start.
type source struct {
	file *os.File
	buf  []byte
}

func openSource(path string) (*source, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	return &source{file: f, buf: make([]byte, 4<<10)}, nil
}

// read passes the content to parse, which must not keep it.
func (s *source) read(parse func([]byte) error) error {
	n := 0
	for {
		got, err := s.file.ReadAt(s.buf[n:], int64(n))
		n += got
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err // it names the file
		}
		s.buf = append(s.buf, make([]byte, len(s.buf))...)
	}
	if err := parse(s.buf[:n]); err != nil {
		return fmt.Errorf("parse %s: %w", s.file.Name(), err)
	}
	return nil
}
