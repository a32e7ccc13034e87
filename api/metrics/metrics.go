// Package metrics names what is measured. Experiment files and results have these names. It
// neither measures nor judges.
package metrics

// Metrics of a trial and of the summary, with their units.
const (
	Throughput    = "throughput"      // bit/s of payload, as received
	Rate          = "rate"            // messages or round trips, 1/s
	LatencyMean   = "latency_mean"    // s, round trip
	LatencyP50    = "latency_p50"     // s, round trip
	LatencyP99    = "latency_p99"     // s, round trip
	LatencyP999   = "latency_p999"    // s, round trip
	LatencyMax    = "latency_max"     // s, the longest round trip
	Completion    = "completion"      // s, from the first of a number of HTTP requests to the last response
	Errors        = "errors"          // share of HTTP requests that failed, 1
	Loss          = "loss"            // share of the sent messages that did not arrive, 1
	Reorder       = "reorder"         // share of datagrams that arrived after a later one (RFC 4737), 1
	Jitter        = "jitter"          // s, mean change of the transit time between datagrams (RFC 3550, section 6.4.1)
	CPUPerGB      = "cpu_per_gb"      // s of busy CPU on all nodes per 1e9 bytes of payload
	SoftirqPerGB  = "softirq_per_gb"  // s of softirq per 1e9 bytes; part of cpu_per_gb
	CPUPerMessage = "cpu_per_message" // s of busy CPU on all nodes per round trip

	InterruptsPerGB     = "interrupts_per_gb"      // interrupts of all CPUs per 1e9 bytes of payload
	SenderSleepsPerGB   = "sender_sleeps_per_gb"   // how often a stream's sender slept per 1e9 bytes
	ReceiverSleepsPerGB = "receiver_sleeps_per_gb" // how often a stream's receiver slept per 1e9 bytes

	InterruptsPerMessage = "interrupts_per_message"       // interrupts of all CPUs per round trip
	SwitchesPerMessage   = "context_switches_per_message" // context switches of all CPUs per round trip
)

// Units of the metrics, as in summary.json.
var Units = map[string]string{
	Throughput: "bit/s", Rate: "1/s",
	LatencyMean: "s", LatencyP50: "s", LatencyP99: "s", LatencyP999: "s", LatencyMax: "s", Completion: "s", Errors: "1",
	Loss: "1", Reorder: "1", Jitter: "s", CPUPerGB: "s/GB", SoftirqPerGB: "s/GB", CPUPerMessage: "s",
	InterruptsPerGB: "1/GB", SenderSleepsPerGB: "1/GB", ReceiverSleepsPerGB: "1/GB", InterruptsPerMessage: "1", SwitchesPerMessage: "1",
}

// Metrics of the links of a mesh.
const (
	ServerCPUPerGB  = "server_cpu_per_gb" // s of CPU of a stream's server process per 1e9 bytes received
	RetransmitShare = "retransmit_share"  // share of a TCP stream's segments that were retransmitted, 1
)

// HigherIsBetter reports whether a larger value of a metric is better.
func HigherIsBetter(metric string) bool { return metric == Throughput || metric == Rate }
