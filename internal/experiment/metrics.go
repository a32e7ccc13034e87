package experiment

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// fillMetrics computes the metrics of a trial from what its pairs and hosts measured.
func fillMetrics(c Cell, t *record.Trial) error {
	spec := c.Workload.Traffic()
	t.Window = time.Duration(spec.Duration).Seconds()
	m := make(map[string]float64)
	t.Metrics = m
	var bytes float64 // of payload that arrived, scaled to the window
	switch c.Workload.Kind() {
	case "stream":
		streamMetrics(spec, t, m)
		bytes = m[metrics.Throughput] / 8 * t.Window
		sleepMetrics(t, m)
	case "http":
		if err := requestMetrics(c, t, m); err != nil {
			return err
		}
	default:
		if err := answerMetrics(c, t, m); err != nil {
			return err
		}
	}
	if c.Workload.Beside == "" { // otherwise both workloads use the CPUs
		cpuMetrics(spec, t, m, bytes)
	} else {
		m[metrics.BesideThroughput] = besideThroughput(t)
	}
	daemonSetMetrics(t.DaemonSets, m)
	for name, v := range m {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return fmt.Errorf("%s is not a number", name)
		}
	}
	// A tool that reports no percentiles reports a rate.
	primary := m[metrics.Throughput] + m[metrics.LatencyP50] + m[metrics.Rate]
	if primary == 0 {
		return fmt.Errorf("nothing arrived within the window")
	}
	return nil
}

// streamMetrics fills in the metrics of one-way traffic.
func streamMetrics(traffic *spec.Traffic, t *record.Trial, m map[string]float64) {
	udp := traffic.Protocol == "udp"
	d := datagrams{counts: traffic.Tool != spec.ToolQperf}
	for i := range t.PerPair {
		// The receiver reports what arrived. For other tools, the client reports everything.
		p := &t.PerPair[i]
		e := p.Teller(traffic.Tool == spec.ToolNative)
		if e == &p.Server {
			if udp && p.Client.Messages > e.Arrived {
				e.Lost = p.Client.Messages - e.Arrived
			}
		}
		m[metrics.Throughput] += e.BitsPerSecond
		if udp {
			arrived := e.Messages // in a tool's only window
			if e == &p.Server {
				arrived = e.Arrived
			}
			d.add(*e, arrived)
		}
	}
	switch {
	case udp:
		d.fill(m)
	case traffic.Messages():
		m[metrics.MessageRate] = m[metrics.Throughput] / 8 / float64(traffic.Size)
	}
}

// besideThroughput returns the throughput of the workload beside, in bit/s: of a stream, what the server received; of other
// traffic, what the client received.
func besideThroughput(t *record.Trial) (sum float64) {
	for _, p := range t.PerPair {
		if p.Beside == nil {
			continue
		}
		e := p.Beside.Server
		if p.Beside.Client.Latency != "" {
			e = p.Beside.Client
		}
		sum += ratio(8*float64(e.Bytes), e.Seconds)
	}
	return sum
}

// sleepMetrics fills in how often the senders and receivers of streams slept. Only the traffic engine counts sleeps,
// and one of its ends always sleeps at times: if both counts are 0, the program does not count.
func sleepMetrics(t *record.Trial, m map[string]float64) {
	var sender, receiver, bytes float64
	for _, p := range t.PerPair {
		sender += float64(p.Client.Sleeps)
		receiver += float64(p.Server.Sleeps)
		bytes += float64(p.Server.Bytes)
	}
	if bytes > 0 && sender+receiver > 0 {
		m[metrics.SenderSleepsPerGB] = sender / (bytes / 1e9)
		m[metrics.ReceiverSleepsPerGB] = receiver / (bytes / 1e9)
	}
}

// answerMetrics fills in the metrics of traffic with answers: messages, and new connections.
func answerMetrics(c Cell, t *record.Trial, m map[string]float64) error {
	if err := latencyMetrics(t, m); err != nil {
		return err
	}
	var lost, sent float64
	for _, p := range t.PerPair {
		m[metrics.Rate] += perSecond(p.Client)
		lost += float64(p.Client.Lost)
		sent += float64(p.Client.Lost + p.Client.Messages)
	}
	if t := c.Workload.Traffic(); t.Protocol == "udp" && t.CountsLost() {
		m[metrics.Loss] = ratio(lost, sent)
	}
	if c.Workload.Traffic().Iterations > 0 { // the last pair is the one that counts
		t.Window = 0
		for _, p := range t.PerPair {
			t.Window = max(t.Window, p.Client.Seconds)
		}
	}
	if c.Workload.Connect != nil && lost > 0 {
		t.Warnings = append(t.Warnings, record.Warnf(record.WarnErrors,
			"%.0f of %.0f connections were reset or not answered: the latencies are those of the others", lost, sent))
	}
	return nil
}

// cpuMetrics fills in the CPU metrics: the CPU time per byte or per message.
func cpuMetrics(spec *spec.Traffic, t *record.Trial, m map[string]float64, bytes float64) {
	var busy, softirq, interrupts, switches float64
	for _, h := range t.Hosts {
		scale := t.Window / h.Seconds
		if spec.Counted() { // countedMessages does not scale either
			scale = 1
		}
		switches += float64(h.Switches) * scale
		for _, cpu := range h.CPUs {
			busy += busyTime(h, cpu) * scale
			softirq += cpu.Softirq * scale
			interrupts += float64(cpu.Interrupts) * scale
		}
	}
	busy = max(busy, softirq)
	switch {
	case len(t.Hosts) == 0: // unknown use is not zero use
		clientCPUMetrics(t, m)
	case bytes > 0:
		m[metrics.CPUPerGB] = busy / (bytes / 1e9)
		m[metrics.SoftirqPerGB] = softirq / (bytes / 1e9)
		if interrupts > 0 { // a container may not see them
			m[metrics.InterruptsPerGB] = interrupts / (bytes / 1e9)
		}
	case m[metrics.Rate] > 0:
		messages := m[metrics.Rate] * t.Window
		if spec.Counted() {
			messages = countedMessages(t)
		}
		m[metrics.CPUPerMessage] = busy / messages
		// A container may not see them.
		if interrupts > 0 {
			m[metrics.InterruptsPerMessage] = interrupts / messages
		}
		if switches > 0 {
			m[metrics.SwitchesPerMessage] = switches / messages
		}
	}
}

// leaveOutCPUs removes what cpuMetrics fills in.
func leaveOutCPUs(m map[string]float64) {
	for _, name := range []string{
		metrics.CPUPerGB, metrics.SoftirqPerGB, metrics.InterruptsPerGB,
		metrics.CPUPerMessage, metrics.InterruptsPerMessage, metrics.SwitchesPerMessage,
	} {
		delete(m, name)
	}
}

// busyTime returns how long a core was busy, for a sum over cores. Idle time may be off by a tick at each edge of the window, so an
// idle core may seem to have been busy for less than nothing. Such errors cancel out in a sum, but only if no core is rounded up
// to 0, as CPU.Busy is.
func busyTime(h record.Host, cpu record.CPU) float64 {
	if cpu.Idle == 0 { // fully busy, or unknown
		return cpu.Busy
	}
	return h.Seconds - cpu.Idle
}

// countedMessages returns how many messages the pairs made while the hosts were sampled, if each pair stops after a number of them.
// Pairs end at different times, so the sum of their rates holds only until the first one ends. A tool that takes longer than the
// window is sampled for a part of its time.
func countedMessages(t *record.Trial) (messages float64) {
	sampled := 0.0
	for _, h := range t.Hosts {
		sampled = max(sampled, h.Seconds)
	}
	for _, p := range t.PerPair {
		messages += float64(p.Client.Messages) * min(1, ratio(sampled, p.Client.Seconds))
	}
	return messages
}

// daemonSetMetrics fills in what the observed DaemonSets used, as means over the nodes. A DaemonSet without values on some node
// has none: a mean over the others would not compare with that of other trials.
func daemonSetMetrics(all []record.DaemonSet, m map[string]float64) {
	nodes, missing := make(map[string]float64), make(map[string]bool)
	for _, d := range all {
		nodes[d.Name]++
		missing[d.Name] = missing[d.Name] || d.Error != ""
	}
	for _, d := range all {
		if !missing[d.Name] {
			m[metrics.OfDaemonSet(metrics.DaemonSetCPU, d.Name)] += d.CPUs / nodes[d.Name]
			m[metrics.OfDaemonSet(metrics.DaemonSetMemory, d.Name)] += d.Memory / nodes[d.Name]
		}
	}
}

// clientCPUMetrics fills in the same metrics from the client's tool, which reports them for its own machine
// only. With more than one pair, a machine would be counted more than once.
func clientCPUMetrics(t *record.Trial, m map[string]float64) {
	if len(t.PerPair) != 1 || t.PerPair[0].Client.Machine == nil || t.PerPair[0].Client.Messages == 0 {
		return
	}
	e := t.PerPair[0].Client
	for name, v := range map[string]float64{
		metrics.ClientCPU:            e.Machine.Busy,
		metrics.CPUPerMessage:        e.Machine.Busy * float64(e.Machine.CPUs) * e.Seconds / float64(e.Messages),
		metrics.InterruptsPerMessage: e.Machine.Interrupts,
		metrics.SwitchesPerMessage:   e.Machine.Switches,
	} {
		if v > 0 {
			m[name] = v
		}
	}
}

// datagrams sums up the counts of all receivers.
type datagrams struct {
	arrived, lost, reordered float64
	// jitter is weighted by the number of datagrams that came at each receiver.
	came, jitter float64
	rate         float64
	// shares are the receivers whose tool reports a share of loss in place of counts.
	shares int
	share  float64
	// counts means that the tool also counts what came late, and measures jitter.
	counts bool
}

func (d *datagrams) add(e record.Endpoint, arrived uint64) {
	if e.LossShare != nil {
		d.shares++
		d.share += *e.LossShare
	}
	came := float64(e.Messages)
	d.arrived += float64(arrived)
	d.lost += float64(e.Lost)
	d.reordered += float64(e.Reordered)
	d.came += came
	d.jitter += e.Jitter * came
	d.rate += perSecond(e)
}

// fill leaves out what the tool did not measure.
func (d *datagrams) fill(m map[string]float64) {
	if d.shares > 0 {
		m[metrics.Loss] = d.share / float64(d.shares)
	}
	if d.came+d.lost+d.arrived == 0 {
		return
	}
	m[metrics.Rate] = d.rate
	m[metrics.Loss] = ratio(d.lost, d.lost+d.arrived)
	if d.counts {
		m[metrics.Reorder] = ratio(d.reordered, d.came)
		m[metrics.Jitter] = ratio(d.jitter, d.came)
	}
}

// requestMetrics fills in the metrics of http.
func requestMetrics(c Cell, t *record.Trial, m map[string]float64) error {
	var failed, done float64
	kinds := make(map[string]uint64)
	for _, p := range t.PerPair {
		m[metrics.Rate] += perSecond(p.Client)
		done += float64(p.Client.Messages)
		for kind, n := range p.Client.Errors {
			failed += float64(n)
			kinds[kind] += n
		}
		if c.Workload.HTTP.Requests > 0 { // the last pair is the one that counts
			m[metrics.Completion] = max(m[metrics.Completion], p.Client.Completion)
		}
	}
	if n := m[metrics.Completion]; n > 0 {
		t.Window = n
	}
	m[metrics.Errors] = ratio(failed, failed+done)
	if failed > 0 {
		t.Warnings = append(t.Warnings, record.Warnf(record.WarnErrors,
			"%.0f of %.0f requests failed (%s): %s", failed, failed+done, countList(kinds), latenciesOf(t)))
	}
	if done == 0 {
		return fmt.Errorf("every request failed: %s", countList(kinds))
	}
	return latencyMetrics(t, m)
}

// latenciesOf says of which requests a trial has latencies, if some failed.
func latenciesOf(t *record.Trial) string {
	with := 0
	for _, p := range t.PerPair {
		if p.Client.Latency != "" || len(p.Client.Percentiles) > 0 {
			with++
		}
	}
	switch with {
	case len(t.PerPair):
		return "the latencies are those of the others"
	case 0:
		return "there are no latencies, as the tool's include those of failed requests"
	}
	return "the latencies leave out the clients whose tool counts failed requests in them"
}

// countList formats counts by name: "refused 12, reset 3".
func countList(counts map[string]uint64) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%s %d", name, counts[name]))
	}
	return strings.Join(parts, ", ")
}

func perSecond(e record.Endpoint) float64 { return ratio(float64(e.Messages), e.Seconds) }

func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

// latencyMetrics merges the pairs' histograms. For a tool that reports only percentiles it
// takes their mean over the pairs that have them, because percentiles cannot be merged, and
// the longest of all.
func latencyMetrics(t *record.Trial, m map[string]float64) error {
	var all *hdrhistogram.Histogram
	with := make(map[string]int) // pairs with a percentile
	for _, p := range t.PerPair {
		for name := range p.Client.Percentiles {
			with[name]++
		}
	}
	for i := range t.PerPair {
		e := &t.PerPair[i].Client
		if e.Latency == "" {
			for name, v := range e.Percentiles {
				if name == metrics.LatencyMax {
					m[name] = max(m[name], v)
					continue
				}
				m[name] += v / float64(with[name])
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
		return record.NoAnswer
	}
	m[metrics.LatencyMean], m[metrics.LatencyMax] = all.Mean()/1e9, float64(all.Max())/1e9
	for name, q := range map[string]float64{metrics.LatencyP50: 50, metrics.LatencyP99: 99, metrics.LatencyP999: 99.9} {
		m[name] = float64(all.ValueAtQuantile(q)) / 1e9
	}
	var err error
	t.Latency, err = record.EncodeHistogram(all)
	return err
}
