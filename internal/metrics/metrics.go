// Package metrics has the table of metrics: their names in experiment files and results, their units, which direction is
// better, and their titles for people. To add a metric, add a row, and measure it where the others of its kind are measured
// (internal/experiment for trials, internal/stats for links of a mesh). The package neither measures nor judges.
package metrics

import (
	"slices"
	"strings"
)

// Names of the metrics of a trial, and of its summary.
const (
	Throughput           = "throughput"
	MessageRate          = "message_rate"
	BesideThroughput     = "beside_throughput"
	Rate                 = "rate"
	LatencyMean          = "latency_mean"
	LatencyP50           = "latency_p50"
	LatencyP99           = "latency_p99"
	LatencyP999          = "latency_p999"
	LatencyMax           = "latency_max"
	Completion           = "completion"
	Errors               = "errors"
	Loss                 = "loss"
	Reorder              = "reorder"
	Jitter               = "jitter"
	CPUPerGB             = "cpu_per_gb"
	SoftirqPerGB         = "softirq_per_gb"
	CPUPerMessage        = "cpu_per_message"
	ClientCPU            = "client_cpu"
	InterruptsPerGB      = "interrupts_per_gb"
	SenderSleepsPerGB    = "sender_sleeps_per_gb"
	ReceiverSleepsPerGB  = "receiver_sleeps_per_gb"
	InterruptsPerMessage = "interrupts_per_message"
	SwitchesPerMessage   = "context_switches_per_message"
	DaemonSetCPU         = "daemonset_cpu"
	DaemonSetMemory      = "daemonset_memory"
)

// Names of the metrics of a mesh's links, which a trial does not have.
const (
	ServerCPUPerGB  = "server_cpu_per_gb"
	RetransmitShare = "retransmit_share"
)

// Metric is a row of the table.
type Metric struct {
	Name    string
	Unit    string // of values in results
	Meaning string // with the unit; for the reference
	Better  Direction
	// Of is the traffic that gives the metric; 0 for a metric of links.
	Of Traffic
	// Alone marks a metric of CPU use: a trial has it only if no other workload runs beside the measured one.
	Alone bool
	// NotComparedBecause says why results are not compared by this metric. It is empty if they are.
	NotComparedBecause string
	// Title is the metric's name in headings and sentences. Reports show a value times Scale, in the unit Shown.
	Title string
	Shown string
	Scale float64
	// ByDaemonSet means that there is such a metric for each observed DaemonSet: see OfDaemonSet.
	ByDaemonSet bool
}

// Direction in which a metric is better.
type Direction string

// Reports use these words.
const (
	Higher Direction = "higher"
	Lower  Direction = "lower"
)

// Traffic is a set of kinds of traffic.
type Traffic uint16

// One workload can have traffic of several kinds: HTTP is also Answered.
const (
	Streams           Traffic = 1 << iota // one way
	DatagramStreams                       // one way over UDP
	Answered                              // messages, connections and requests, each with an answer
	AnsweredDatagrams                     // the same over UDP
	HTTP
	CountedRequests // HTTP until a number of requests is done
	MessageStreams  // one way over TCP, of messages no larger than a datagram
	ClientMachine   // Answered, by a tool that reports the load of its client's machine
	Accompanied     // with another workload beside it

	anyTraffic = Streams | Answered
)

// table has the metrics in the order of summaries, those of links last.
var table = []Metric{
	{Name: Throughput, Unit: "bit/s", Better: Higher, Of: Streams, Title: "throughput", Shown: "Gb/s", Scale: 1e-9,
		Meaning: "bit/s of payload, as received"},
	{Name: MessageRate, Unit: "1/s", Better: Higher, Of: MessageStreams, Title: "messages of the stream", Shown: "k/s", Scale: 1e-3,
		Meaning: "messages of a TCP stream, 1/s: its throughput over the workload's size, unless that is more than a datagram can have"},
	{Name: BesideThroughput, Unit: "bit/s", Better: Higher, Of: Accompanied, Title: "throughput beside", Shown: "Gb/s", Scale: 1e-9,
		Meaning: "bit/s of payload that the workload beside the measured one has moved"},
	{Name: Rate, Unit: "1/s", Better: Higher, Of: Answered | DatagramStreams, Title: "message rate", Shown: "k/s", Scale: 1e-3,
		Meaning: "messages or round trips, 1/s"},
	{Name: LatencyMean, Unit: "s", Better: Lower, Of: Answered, Title: "mean latency", Shown: "µs", Scale: 1e6,
		Meaning: "s, round trip"},
	{Name: LatencyP50, Unit: "s", Better: Lower, Of: Answered, Title: "median latency", Shown: "µs", Scale: 1e6,
		Meaning: "s, round trip"},
	{Name: LatencyP99, Unit: "s", Better: Lower, Of: Answered, Title: "p99 latency", Shown: "µs", Scale: 1e6,
		Meaning: "s, round trip"},
	{Name: LatencyP999, Unit: "s", Better: Lower, Of: Answered, Title: "p99.9 latency", Shown: "µs", Scale: 1e6,
		Meaning: "s, round trip"},
	{Name: LatencyMax, Unit: "s", Better: Lower, Of: Answered, Title: "longest latency", Shown: "µs", Scale: 1e6,
		Meaning: "s, the longest round trip"},
	{Name: Completion, Unit: "s", Better: Lower, Of: CountedRequests, Title: "time of all requests", Shown: "s", Scale: 1,
		Meaning: "s, from the first of a number of HTTP requests to the last response"},
	{Name: Errors, Unit: "1", Better: Lower, Of: HTTP, NotComparedBecause: "normally no request fails, and there is no ratio to 0",
		Title: "failed requests", Shown: "%", Scale: 100,
		Meaning: "share of HTTP requests that failed, 1"},
	{Name: Loss, Unit: "1", Better: Lower, Of: DatagramStreams | AnsweredDatagrams, NotComparedBecause: "normally nothing is lost, and there is no ratio to 0",
		Title: "loss", Shown: "%", Scale: 100,
		Meaning: "share of the sent messages that did not arrive, 1"},
	{Name: Reorder, Unit: "1", Better: Lower, Of: DatagramStreams, NotComparedBecause: "normally nothing is overtaken, and there is no ratio to 0",
		Title: "reordering", Shown: "%", Scale: 100,
		Meaning: "share of datagrams that arrived after a later one (RFC 4737), 1"},
	{Name: Jitter, Unit: "s", Better: Lower, Of: DatagramStreams, Title: "jitter", Shown: "µs", Scale: 1e6,
		Meaning: "s, mean change of the transit time between datagrams (RFC 3550, section 6.4.1)"},
	{Name: CPUPerGB, Unit: "s/GB", Better: Lower, Of: Streams, Alone: true, Title: "CPU per GB", Shown: "s/GB", Scale: 1,
		Meaning: "s of busy CPU on all nodes per 1e9 bytes of payload"},
	{Name: SoftirqPerGB, Unit: "s/GB", Better: Lower, Of: Streams, Alone: true, Title: "softirq per GB", Shown: "s/GB", Scale: 1,
		Meaning: "s of softirq per 1e9 bytes; part of cpu_per_gb"},
	{Name: CPUPerMessage, Unit: "s", Better: Lower, Of: Answered, Alone: true, Title: "CPU per round trip", Shown: "µs", Scale: 1e6,
		Meaning: "s of busy CPU on all nodes per round trip"},
	{Name: ClientCPU, Unit: "1", Better: Lower, Of: ClientMachine, Alone: true, Title: "busy CPUs of the client", Shown: "%", Scale: 100,
		Meaning: "share of the CPU time of the client's machine that was busy, 1, as latte reports it"},
	{Name: InterruptsPerGB, Unit: "1/GB", Better: Lower, Of: Streams, Alone: true, Title: "interrupts", Shown: "per MB", Scale: 1e-3,
		Meaning: "interrupts of all CPUs per 1e9 bytes of payload"},
	{Name: SenderSleepsPerGB, Unit: "1/GB", Better: Lower, Of: Streams, NotComparedBecause: "an end may never sleep, and there is no ratio to 0",
		Title: "sleeps of the sender", Shown: "per MB", Scale: 1e-3,
		Meaning: "how often a stream's sender slept per 1e9 bytes"},
	{Name: ReceiverSleepsPerGB, Unit: "1/GB", Better: Lower, Of: Streams, NotComparedBecause: "an end may never sleep, and there is no ratio to 0",
		Title: "sleeps of the receiver", Shown: "per MB", Scale: 1e-3,
		Meaning: "how often a stream's receiver slept per 1e9 bytes"},
	{Name: InterruptsPerMessage, Unit: "1", Better: Lower, Of: Answered, Alone: true, Title: "interrupts", Shown: "per round trip", Scale: 1,
		Meaning: "interrupts of all CPUs per round trip"},
	{Name: SwitchesPerMessage, Unit: "1", Better: Lower, Of: Answered, Alone: true, Title: "context switches", Shown: "per round trip", Scale: 1,
		Meaning: "context switches of all CPUs per round trip"},
	{Name: DaemonSetCPU, Unit: "1", Better: Lower, Of: anyTraffic, NotComparedBecause: "an agent may need no CPU within a window, and there is no ratio to 0",
		Title: "CPU", Shown: "millicores", Scale: 1e3, ByDaemonSet: true,
		Meaning: "CPUs in use by the pod of an observed DaemonSet, 1, mean over the nodes; the name goes on with a colon and the DaemonSet"},
	{Name: DaemonSetMemory, Unit: "bytes", Better: Lower, Of: anyTraffic, NotComparedBecause: "an agent's memory comes from the cluster and from the time before, not from a trial's variant",
		Title: "memory", Shown: "MiB", Scale: 1. / (1 << 20), ByDaemonSet: true,
		Meaning: "bytes, working set of the pod of an observed DaemonSet, mean over the nodes; named in the same way"},

	// A receiver that needs more CPU time than others for the same throughput may have a NIC that does not merge packets.
	{Name: ServerCPUPerGB, Unit: "s/GB", Better: Lower, Title: "server CPU per GB", Shown: "s/GB", Scale: 1,
		Meaning: "s of CPU of a stream's server process per 1e9 bytes received"},
	// It reveals a link that loses packets. Congestion control may hide the loss from the throughput.
	{Name: RetransmitShare, Unit: "1", Better: Lower, Title: "retransmitted segments", Shown: "%", Scale: 100,
		Meaning: "share of a TCP stream's segments that were retransmitted, estimated from its bytes, 1"},
}

// OfTrials returns the metrics of trials, in the order of summaries.
func OfTrials() []Metric { return slices.DeleteFunc(slices.Clone(table), Metric.OfLinks) }

// Comparable returns the names of the metrics by which results can be compared.
func Comparable() []string {
	var names []string
	for _, m := range OfTrials() {
		if m.NotComparedBecause == "" {
			names = append(names, m.Name)
		}
	}
	return names
}

// OfDaemonSet returns the name of a metric of one DaemonSet, which is namespace/name.
func OfDaemonSet(metric, daemonSet string) string { return metric + ":" + daemonSet }

// Lookup finds a metric by its name. An unknown metric has no unit; its values are shown unscaled, and lower is better.
func Lookup(name string) (m Metric, known bool) {
	family, daemonSet, _ := strings.Cut(name, ":")
	for _, m := range table {
		if m.Name == name {
			return m, true
		}
		if m.Name == family && m.ByDaemonSet && namesDaemonSet(daemonSet) {
			m.Name, m.Title = name, m.Title+" of "+daemonSet
			return m, true
		}
	}
	return Metric{Name: name, Better: Lower, Title: name, Scale: 1}, false
}

// namesDaemonSet reports whether a text has the form of namespace/name. Results may be somebody else's, and reports show it.
func namesDaemonSet(text string) bool {
	namespace, name, _ := strings.Cut(text, "/")
	foreign := func(r rune) bool { return !(r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-' || r == '.') }
	return namespace != "" && name != "" && !strings.ContainsFunc(namespace+name, foreign)
}

// Get returns the metric that Lookup finds, known or not.
func Get(name string) Metric {
	m, _ := Lookup(name)
	return m
}

// HigherIsBetter reports whether a larger value is better.
func (m Metric) HigherIsBetter() bool { return m.Better == Higher }

// OfLinks reports whether the metric is one of a mesh's links.
func (m Metric) OfLinks() bool { return m.Of == 0 }
