//go:build linux

package collect

import (
	"slices"
	"time"

	"slipstream.dev/internal/record"
)

// seriesInterval is the time between the readings of a Series.
const seriesInterval = 100 * time.Millisecond

// mostReadings limits the readings that a Series keeps: those of two minutes. It is odd, so that thinning keeps the last one.
const mostReadings = 1201

// Series reads, at intervals within a window, the bytes of NICs and the times of CPUs. From its first snapshot until End it
// allocates nothing, because it runs while traffic is measured.
type Series struct {
	c        *Collector
	from     int64
	interval int64
	nics     []string
	cpus     []int  // their numbers; empty without Options.CPUs
	offline  []bool // whether each of cpus was offline at any reading
	// at holds the times of the readings, and counters a row of columns for each of them.
	at       []int64
	counters []uint64
	columns  int
	snapshot Snapshot // reused by every reading
}

// Series begins the series of a window with its first snapshot. It covers the named NICs and their virtual functions.
func (c *Collector) Series(nics []string, from, to int64, first Snapshot) *Series {
	s := &Series{c: c, from: from, interval: int64(seriesInterval)}
	vfs := c.VFs(first, first)
	for _, d := range first.devices {
		below := func(u record.VFUse) bool { return u.VF == d.Name && slices.Contains(nics, u.NIC) }
		if slices.Contains(nics, d.Name) || slices.ContainsFunc(vfs, below) {
			s.nics = append(s.nics, d.Name)
		}
	}
	for _, cpu := range first.cpus {
		s.cpus = append(s.cpus, cpu.id)
	}
	s.offline = make([]bool, len(s.cpus))
	s.columns = 2 * (len(s.nics) + len(s.cpus))
	readings := int(min((to-from)/s.interval+2, mostReadings))
	s.at = make([]int64, 0, readings)
	s.counters = make([]uint64, 0, readings*s.columns)
	s.snapshot.cpus, s.snapshot.devices = slices.Clone(first.cpus), slices.Clone(first.devices)
	s.add(first)
	return s
}

// Due returns when the next reading is due: at a multiple of the interval, at least half an interval after the last reading. In
// a shorter interval, the time between reading the clock and reading the counters would distort a rate.
func (s *Series) Due() int64 {
	last := s.at[len(s.at)-1]
	return s.from + ((last-s.from+s.interval/2)/s.interval+1)*s.interval
}

// Read takes a reading.
func (s *Series) Read() error {
	now := &s.snapshot
	now.at = monotonic()
	if s.c.stat != nil {
		if err := s.c.stat.read(now.parseStat); err != nil {
			return err
		}
	}
	if err := s.c.devices.read(now.parseDevices); err != nil {
		return err
	}
	s.add(*now)
	return nil
}

func (s *Series) add(now Snapshot) {
	s.at = append(s.at, now.at)
	for i, name := range s.nics {
		rx, tx := s.last(2*i), s.last(2*i+1)
		for _, d := range now.devices {
			if d.Name == name {
				rx, tx = d.RxBytes, d.TxBytes
				break
			}
		}
		s.counters = append(s.counters, rx, tx)
	}
	for i, id := range s.cpus {
		var read cpu
		if at, ok := find(now.cpus, id); ok {
			read = now.cpus[at]
		} else {
			s.offline[i] = true
		}
		s.counters = append(s.counters, read.idle, read.softirq)
	}
	if len(s.at) == mostReadings {
		s.thin()
	}
}

// last returns a counter of the previous reading, for a device that is gone.
func (s *Series) last(column int) uint64 {
	if row := len(s.at) - 2; row >= 0 {
		return s.counters[row*s.columns+column]
	}
	return 0
}

// thin drops every second reading and doubles the interval, so that a long window has no more readings than a short one.
func (s *Series) thin() {
	kept := 0
	for i := 0; i < len(s.at); i += 2 {
		s.at[kept] = s.at[i]
		copy(s.counters[kept*s.columns:], s.counters[i*s.columns:(i+1)*s.columns])
		kept++
	}
	s.at, s.counters = s.at[:kept], s.counters[:kept*s.columns]
	s.interval *= 2
}

// End returns the series up to the window's last snapshot. It omits CPUs that went offline in between, as
// Host does: without idle time they would seem busy.
func (s *Series) End(last Snapshot) record.Series {
	// The last snapshot replaces a reading right before it.
	if n := len(s.at) - 1; n > 0 && last.at-s.at[n] < s.interval/2 {
		s.at, s.counters = s.at[:n], s.counters[:n*s.columns]
	}
	s.add(last)
	var out record.Series
	for _, at := range s.at {
		out.At = append(out.At, max(0, at-s.from)/int64(time.Microsecond))
	}
	for i, name := range s.nics {
		out.NICs = append(out.NICs, record.NICSeries{Name: name, Rx: s.column(2 * i), Tx: s.column(2*i + 1)})
	}
	for i, id := range s.cpus {
		if s.offline[i] {
			continue
		}
		column := 2 * (len(s.nics) + i)
		out.CPUs = append(out.CPUs, record.CPUSeries{ID: id, Idle: s.column(column), Softirq: s.column(column + 1)})
	}
	return out
}

// column returns the increases of a counter between readings. A counter that fell has no increase: the device was replaced, or
// the kernel corrected iowait (proc_stat(5)).
func (s *Series) column(column int) []uint64 {
	values := make([]uint64, len(s.at)-1)
	for i := range values {
		before, after := s.counters[i*s.columns+column], s.counters[(i+1)*s.columns+column]
		if after > before {
			values[i] = after - before
		}
	}
	return values
}
