//go:build linux

// Package collect reads what a machine counts of itself: CPU time, softirqs,
// backlogs and devices at the two edges of a measured window, and the facts of
// the place that bear on a result. It changes nothing and judges nothing:
// internal/worker asks, internal/experiment works out what the figures mean,
// internal/accel changes settings.
//
// Files are found below roots that are passed in. Parsers take bytes.
package collect

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/record"
)

// Options of a Collector.
type Options struct {
	// Proc is where procfs is, /proc unless set. Devices are those of the
	// network namespace of the process that opens it.
	Proc string
	// Cgroup is where the cgroup hierarchies are, /sys/fs/cgroup unless set.
	Cgroup string
	// CPUs takes the machine's counters too, and not only this network
	// namespace's devices. Of several places on a machine one is enough.
	CPUs bool
}

func (o Options) withDefaults() Options {
	o.Proc, o.Cgroup = cmp.Or(o.Proc, "/proc"), cmp.Or(o.Cgroup, "/sys/fs/cgroup")
	return o
}

// Collector takes snapshots. What it reads stays open between them.
type Collector struct {
	devices *source
	// What follows is for Options.CPUs only.
	stat, softirqs, softnet *source
	limits                  Limits
	boot                    string
	exact                   *softirqTimes // nil where softirqs cannot be traced, for reason:
	reason                  error
}

// Snapshot is what the counters show at one instant.
type Snapshot struct {
	at        int64 // CLOCK_MONOTONIC in ns
	cpus      []cpu // by number
	exact     []softirqCPU
	throttled []throttled // an entry for each of Collector.limits
	devices   []record.Device
}

// New opens the counters. Softirqs are timed by eBPF where the kernel and the
// privileges allow it, until Close; else Host says that they were not, and why.
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
	if c.limits, err = openLimits(o.Proc, o.Cgroup); err != nil {
		return c, err
	}
	if c.boot = line(os.DirFS(o.Proc), bootID); c.boot == "" {
		return c, fmt.Errorf("%s/%s is empty or missing", o.Proc, bootID)
	}
	c.exact, c.reason = openSoftirq()
	return c, nil
}

// Close lets go of the files and detaches the eBPF programs.
func (c *Collector) Close() error {
	var errs []error
	for _, s := range []*source{c.devices, c.stat, c.softirqs, c.softnet} {
		if s != nil {
			errs = append(errs, s.file.Close())
		}
	}
	errs = append(errs, c.limits.Close())
	if c.exact != nil {
		errs = append(errs, c.exact.Close())
	}
	return errors.Join(errs...)
}

// Snapshot reads the counters: times first, next to the clock, and all always in
// the same order, so that what one lags the clock by cancels over a window.
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
	} {
		if f.source == nil {
			continue
		}
		if err := f.read(f.parse); err != nil {
			return s, err
		}
	}
	limits, err := c.limits.Snapshot()
	s.throttled = limits.throttled
	return s, err
}

// Host is what the machine's CPUs did between two snapshots of a collector that
// has Options.CPUs. CPUs that went off or came online in between are left out.
// The nodes' names are the caller's to fill in.
func (c *Collector) Host(before, after Snapshot) record.Host {
	h := record.Host{Boot: c.boot, Seconds: seconds(after.at - before.at), Source: record.SoftirqTicks}
	if c.exact != nil {
		h.Source = record.SoftirqEBPF
	}
	for _, a := range after.cpus {
		i, ok := find(before.cpus, a.id)
		if !ok {
			continue
		}
		r := a.since(before.cpus[i])
		r.Softirq = r.SoftirqTicks
		if a.id < min(len(before.exact), len(after.exact)) {
			b, a := before.exact[a.id], after.exact[a.id]
			var all uint64
			for v := range a.Ns {
				all += a.Ns[v] - b.Ns[v]
			}
			// One that began before the window and ended in it counts whole.
			within := func(ns uint64) float64 { return min(seconds(int64(ns)), h.Seconds) }
			r.Softirq = within(all)
			r.SoftirqNetRx = within(a.Ns[netRxVector] - b.Ns[netRxVector])
			r.SoftirqNetTx = within(a.Ns[netTxVector] - b.Ns[netTxVector])
		}
		// The kernel adds up idle time by its clock where the tick stops on
		// idle CPUs (get_cpu_idle_time_us in kernel/time/tick-sched.c), and
		// interrupts that an idle CPU takes are not part of it. /proc/stat
		// shows it in ticks, so this is off by 10 ms at most an edge and for
		// iowait another. The finer cpuidle/state*/time in sysfs is worse: it
		// grows only when a CPU wakes up.
		r.Busy = max(r.Softirq, min(h.Seconds-r.Idle, h.Seconds))
		h.CPUs = append(h.CPUs, r)
	}
	h.Warnings = c.limits.Warnings(before, after)
	if c.exact == nil {
		h.Warnings = append(h.Warnings, record.Warnf(record.WarnNoEBPF,
			"softirq time is from clock ticks, which lose most of it on idle cores: %v", c.reason))
	}
	return h
}

// Devices is what the devices of the network namespace did between two
// snapshots, in the order of their names. Those that came, went or were made
// anew in between are left out. The place is the caller's to fill in.
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

// Softirqs by number, as in enum of include/linux/interrupt.h.
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

// source is a file that the kernel writes anew for whoever reads its start.
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

// read gives the content to a parser, which must not keep it.
func (s *source) read(parse func([]byte) error) error {
	n := 0
	for {
		got, err := s.file.ReadAt(s.buf[n:], int64(n))
		n += got
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err // names the file
		}
		s.buf = append(s.buf, make([]byte, len(s.buf))...)
	}
	if err := parse(s.buf[:n]); err != nil {
		return fmt.Errorf("parse %s: %w", s.file.Name(), err)
	}
	return nil
}
