package experiment

import (
	"fmt"
	"math"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
)

// fill works a trial's metrics out of what its pairs and hosts measured.
func fill(c Cell, t *record.Trial) error {
	spec := c.Workload.Traffic()
	t.Window = time.Duration(spec.Duration).Seconds()
	m := make(map[string]float64)
	t.Metrics = m
	udp := spec.Protocol == "udp"
	var bytes float64 // of payload that arrived, scaled to the window
	switch c.Workload.Kind() {
	case "stream":
		var bits, rate, lost, sent float64
		for _, p := range t.PerPair {
			// The receiver tells what arrived; of other tools the client tells all.
			e := p.Server
			if spec.Tool != v1alpha1.ToolNative {
				e = p.Client
			}
			bits += e.BitsPerSecond
			rate += perSecond(e)
			lost += float64(e.Lost)
			sent += float64(e.Lost + e.Messages)
		}
		m[record.Throughput] = bits
		bytes = bits / 8 * t.Window
		if udp {
			m[record.Rate] = rate
			m[record.Loss] = ratio(lost, sent)
		}
	default:
		if err := latencies(t, m); err != nil {
			return err
		}
		var lost, sent float64
		for _, p := range t.PerPair {
			m[record.Rate] += perSecond(p.Client)
			lost += float64(p.Client.Lost)
			sent += float64(p.Client.Lost + p.Client.Messages)
		}
		if udp {
			m[record.Loss] = ratio(lost, sent)
		}
	}
	var busy, softirq float64
	for _, h := range t.Hosts {
		for _, cpu := range h.CPUs {
			busy += cpu.Busy / h.Seconds * t.Window
			softirq += cpu.Softirq / h.Seconds * t.Window
		}
	}
	switch {
	case len(t.Hosts) == 0: // that nothing is known is not that nothing was used
	case bytes > 0:
		m[record.CPUPerGB] = busy / (bytes / 1e9)
		m[record.SoftirqPerGB] = softirq / (bytes / 1e9)
	case m[record.Rate] > 0:
		m[record.CPUPerMessage] = busy / (m[record.Rate] * t.Window)
	}
	for name, v := range m {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return fmt.Errorf("%s is not a number", name)
		}
	}
	primary := m[record.Throughput] + m[record.LatencyP50]
	if primary == 0 {
		return fmt.Errorf("nothing arrived within the window")
	}
	return nil
}

func perSecond(e record.Endpoint) float64 { return ratio(float64(e.Messages), e.Seconds) }

func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

// latencies merges the pairs' histograms. A tool that tells percentiles only has
// their mean taken over its pairs, which is all that can be done with them.
func latencies(t *record.Trial, m map[string]float64) error {
	var all *hdrhistogram.Histogram
	for i := range t.PerPair {
		e := &t.PerPair[i].Client
		if e.Latency == "" {
			for name, v := range e.Percentiles {
				m[name] += v / float64(len(t.PerPair))
			}
			continue
		}
		h, err := record.DecodeHistogram(e.Latency)
		if err != nil {
			return err
		}
		if all == nil {
			all = record.NewHistogram()
		}
		all.Merge(h)
		if len(t.PerPair) == 1 {
			e.Latency = "" // the trial's is the same
		}
	}
	if all == nil {
		return nil
	}
	if all.TotalCount() == 0 {
		return fmt.Errorf("no message came back within the window")
	}
	for name, q := range map[string]float64{record.LatencyP50: 50, record.LatencyP99: 99, record.LatencyP999: 99.9} {
		m[name] = float64(all.ValueAtQuantile(q)) / 1e9
	}
	var err error
	t.Latency, err = record.EncodeHistogram(all)
	return err
}

// Limits beyond which a trial carries a warning.
const (
	retransmitShare = 0.001 // of the segments sent
	stealShare      = 0.01  // of the CPUs' time
	skewShare       = 0.01  // of the window
	segment         = 1448  // bytes, to tell how many segments there were
	strays          = 10    // packets that a device may drop: multicast that an overlay has no place for
)

// warnings is what a reader of the trial's numbers must know.
func warnings(c Cell, t *record.Trial) []record.Warning {
	var out []record.Warning
	warn := func(code, format string, args ...any) {
		out = append(out, record.Warning{Code: code, Message: fmt.Sprintf(format, args...)})
	}
	var retransmits, bytes uint64
	var skew float64
	for _, p := range t.PerPair {
		for _, e := range []record.Endpoint{p.Client, p.Server} {
			retransmits += e.Retransmits
			bytes += e.Bytes
			if e.Seconds > 0 {
				skew = max(skew, math.Abs(e.Seconds-t.Window)/t.Window)
			}
			out = append(out, e.Warnings...)
		}
	}
	if segments := float64(bytes) / 2 / segment; float64(retransmits) > retransmitShare*segments && retransmits > 10 {
		warn(record.WarnRetransmits, "TCP sent %d segments again, %.2g %% of about %.0f", retransmits, 100*float64(retransmits)/segments, segments)
	}
	if skew > skewShare && c.Workload.Traffic().Tool == v1alpha1.ToolNative {
		warn(record.WarnSkew, "an end's window is off by %.1f %%", 100*skew)
	}
	if len(t.Hosts) == 0 {
		warn(record.WarnNoCPUs, "the nodes' CPUs were not sampled: that takes a privileged pod on each, and there was none")
	}
	for _, h := range t.Hosts {
		var steal, dropped float64
		for _, cpu := range h.CPUs {
			steal += cpu.Steal
			dropped += float64(cpu.Dropped)
		}
		if share := steal / h.Seconds / float64(len(h.CPUs)); share > stealShare {
			warn(record.WarnSteal, "the hypervisor took %.1f %% of the CPUs' time", 100*share)
		}
		if dropped > 0 {
			warn(record.WarnDrops, "a CPU's backlog dropped %.0f packets (net.core.netdev_max_backlog)", dropped)
		}
		out = append(out, h.Warnings...)
	}
	for _, d := range t.Devices {
		if lost := d.RxDropped + d.TxDropped + d.RxErrors + d.TxErrors; lost > strays {
			warn(record.WarnDrops, "%s of %s dropped %d packets", d.Name, d.Place, lost)
		}
	}
	for _, s := range t.Settings {
		if s.Got != s.Want {
			warn(record.WarnReadback, "%s of %s reads %q, not %q", s.Path, s.Place, s.Got, s.Want)
		}
	}
	return out
}
