package report

import (
	"cmp"
	"iter"
	"slices"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report/draw"
)

// Parts of a core's time, in the order in which they are stacked.
const (
	partProcess = iota
	partSoftirq
	partIRQ
	partSteal
	partIdle
	parts
)

func partNames() [parts]string { return [parts]string{"process", "softirq", "irq", "steal", "idle"} }

func partInks() [parts]draw.Ink {
	return [parts]draw.Ink{draw.Process, draw.Softirq, draw.IRQ, draw.Steal, draw.Idle}
}

// coreID identifies a core by the index of its host in the figure and its number.
type coreID struct{ host, cpu int }

func (a coreID) compare(b coreID) int { return cmp.Or(a.host-b.host, a.cpu-b.cpu) }

// sampledHosts returns the hosts of a cell's trials, each with the block of its trial.
func (m *Model) sampledHosts(c cell) iter.Seq2[int, record.Host] {
	return func(yield func(int, record.Host) bool) {
		for _, t := range m.trials {
			if !c.holds(t) {
				continue
			}
			for _, h := range t.Hosts {
				if h.Seconds > 0 && !yield(t.Block, h) {
					return
				}
			}
		}
	}
}

// hostIndex returns the index of a host in hosts. It adds a host that is new.
func hostIndex(h record.Host, hosts *[]record.Host) int {
	i := slices.IndexFunc(*hosts, func(o record.Host) bool { return o.Boot == h.Boot })
	if i < 0 {
		i = len(*hosts)
		*hosts = append(*hosts, h)
	}
	return i
}

// shares splits a core's window into parts. Busy time that is neither softirq, irq nor steal belongs to processes,
// including their time in the kernel.
func shares(c record.CPU, seconds float64) [parts]float64 {
	s := [parts]float64{
		partSoftirq: c.Softirq / seconds,
		partIRQ:     c.IRQ / seconds,
		partSteal:   c.Steal / seconds,
	}
	taken := s[partSoftirq] + s[partIRQ] + s[partSteal]
	s[partProcess] = max(0, c.Busy/seconds-taken)
	taken += s[partProcess]
	// Two clocks can differ by a tick, but a core is never more than full.
	if taken > 1 {
		for i := range s {
			s[i] /= taken
		}
	}
	s[partIdle] = max(0, 1-taken)
	return s
}
