// Package record is what a run leaves behind: trials, the environment they ran
// in, and the folder that holds both. Its types are the vocabulary of the
// worker too, which fills them in where the traffic is; so a number is defined
// once, from the socket to the report. It measures nothing and judges nothing
// (see internal/collect and internal/stats), and reads old results anywhere.
package record

import (
	"fmt"
	"time"
)

// Status of a trial.
type Status string

// A trial either gave numbers or failed; a failed one is tried again.
const (
	StatusOK     Status = "ok"
	StatusFailed Status = "failed"
)

// Metrics of a trial and of the summary, with their units.
const (
	Throughput    = "throughput"      // bit/s of payload, as received
	Rate          = "rate"            // messages or round trips, 1/s
	LatencyP50    = "latency_p50"     // s, round trip
	LatencyP99    = "latency_p99"     // s, round trip
	LatencyP999   = "latency_p999"    // s, round trip
	Completion    = "completion"      // s, from the first of a number of HTTP requests until the last was answered
	Errors        = "errors"          // share of HTTP requests that failed, 1
	Loss          = "loss"            // share of messages sent that never came, 1
	Reorder       = "reorder"         // share of datagrams that came after a later one (RFC 4737), 1
	Jitter        = "jitter"          // s, mean change of the transit time between datagrams (RFC 3550, section 6.4.1)
	CPUPerGB      = "cpu_per_gb"      // s of busy CPU on all nodes per 1e9 bytes of payload
	SoftirqPerGB  = "softirq_per_gb"  // s of softirq per 1e9 bytes; part of cpu_per_gb
	CPUPerMessage = "cpu_per_message" // s of busy CPU on all nodes per round trip
)

// Units of the metrics, as in summary.json.
var Units = map[string]string{
	Throughput: "bit/s", Rate: "1/s",
	LatencyP50: "s", LatencyP99: "s", LatencyP999: "s", Completion: "s", Errors: "1",
	Loss: "1", Reorder: "1", Jitter: "s", CPUPerGB: "s/GB", SoftirqPerGB: "s/GB", CPUPerMessage: "s",
}

// HigherIsBetter tells the direction of a metric: true where a larger value is
// the better one.
func HigherIsBetter(metric string) bool { return metric == Throughput || metric == Rate }

// Trial is one variant × workload × pairs, measured once: a line of
// trials.jsonl.
type Trial struct {
	// Block counts from 1, Order is the position in the whole run, from 1.
	Block    int    `json:"block"`
	Order    int    `json:"order"`
	Variant  string `json:"variant"`
	Workload string `json:"workload"`
	Pairs    int    `json:"pairs"`
	// Attempt counts from 1; a failed trial is tried again at its block's end.
	Attempt int       `json:"attempt"`
	Started time.Time `json:"started"`
	// Took is the whole trial in seconds, Window the measured part of it.
	Took   float64 `json:"took"`
	Window float64 `json:"window"`
	Status Status  `json:"status"`
	Error  string  `json:"error,omitempty"`
	// Metrics by name, over all pairs; the unit is in Units.
	Metrics map[string]float64 `json:"metrics,omitempty"`
	// Latency is the merged histogram of all pairs in nanoseconds, HDR V2
	// compressed, base64; empty where no latency was taken.
	Latency string   `json:"latency,omitempty"`
	PerPair []Pair   `json:"per_pair,omitempty"`
	Hosts   []Host   `json:"hosts,omitempty"`
	Devices []Device `json:"devices,omitempty"`
	// Fastpath of each node, where the variant has it.
	Fastpath []Fastpath `json:"fastpath,omitempty"`
	// Loads of the nodes of a lab, in order.
	Loads []Load `json:"loads,omitempty"`
	// Settings are what the accelerators set, as read back.
	Settings []Setting `json:"settings,omitempty"`
	Warnings []Warning `json:"warnings,omitempty"`
}

// Pair is what one client and its server measured.
type Pair struct {
	Client Endpoint `json:"client"`
	// Server is, behind a load balancer, all of its Backends together.
	Server   Endpoint   `json:"server"`
	Backends []Endpoint `json:"backends,omitempty"`
}

// Endpoint is one end of a pair over the measured window.
type Endpoint struct {
	// Place is the namespace or pod it ran in.
	Place string `json:"place"`
	// Seconds is the window as this end's own clock saw it.
	Seconds float64 `json:"seconds"`
	// Bytes of payload and Messages (or round trips) within the window; a
	// sender counts what it handed over, a receiver what it got.
	Bytes       uint64 `json:"bytes"`
	Messages    uint64 `json:"messages,omitempty"`
	Lost        uint64 `json:"lost,omitempty"`
	Retransmits uint64 `json:"retransmits,omitempty"`
	// Of a UDP stream's receiver: how many of the datagrams that the sender counts
	// have Arrived; within this end's own window, how many were Reordered or came
	// again, as Duplicates, which neither Bytes nor Messages count; and the Jitter
	// in seconds.
	Arrived    uint64  `json:"arrived,omitempty"`
	Reordered  uint64  `json:"reordered,omitempty"`
	Duplicates uint64  `json:"duplicates,omitempty"`
	Jitter     float64 `json:"jitter,omitempty"`
	// Of HTTP's client: how many requests failed in the window, by one of the Err
	// constants, none of which are among Messages; and the Completion in seconds, where
	// a number of requests was asked for.
	Errors     map[string]uint64 `json:"errors,omitempty"`
	Completion float64           `json:"completion,omitempty"`
	// CPUSeconds of this end's own process over the window.
	CPUSeconds float64 `json:"cpu_seconds,omitempty"`
	// Latency is this end's histogram, encoded as Trial.Latency is.
	Latency string `json:"latency,omitempty"`
	// BitsPerSecond and Percentiles (s, by metric name) are a tool's own
	// figures, where it tells no more than those.
	BitsPerSecond float64            `json:"bits_per_second,omitempty"`
	Percentiles   map[string]float64 `json:"percentiles,omitempty"`
	Warnings      []Warning          `json:"warnings,omitempty"`
}

// Kinds of errors of HTTP requests.
const (
	ErrRefused = "refused" // nobody listens
	ErrReset   = "reset"   // the connection broke
	ErrShort   = "short"   // it ended before its response did
	ErrStatus  = "status"  // the response was none of success
	ErrTimeout = "timeout" // there was no answer in time
	ErrOther   = "other"
)

// Host is one machine's CPUs over the measured window. Lab nodes that share a
// machine share its record too.
type Host struct {
	// Boot is the machine's boot id: one record a boot id and trial.
	Boot    string   `json:"boot"`
	Nodes   []string `json:"nodes"`
	Seconds float64  `json:"seconds"`
	// Source of softirq time: "ebpf" is exact, "ticks" is /proc/stat.
	Source   string    `json:"softirq_source"`
	CPUs     []CPU     `json:"cpus"`
	Warnings []Warning `json:"warnings,omitempty"`
}

// Sources of softirq time.
const (
	SoftirqEBPF  = "ebpf"
	SoftirqTicks = "ticks"
)

// CPU is one core over the measured window; times are in seconds. User to Idle
// are /proc/stat's ticks, Busy is the window less idle time, Softirq is from
// Host.Source.
type CPU struct {
	ID      int     `json:"cpu"`
	User    float64 `json:"usr"`
	System  float64 `json:"sys"`
	IRQ     float64 `json:"irq"`
	Steal   float64 `json:"steal"`
	Idle    float64 `json:"idle"`
	Busy    float64 `json:"busy"`
	Softirq float64 `json:"softirq"`
	// SoftirqTicks is what /proc/stat says of the same.
	SoftirqTicks float64 `json:"softirq_ticks"`
	// SoftirqNetRx and SoftirqNetTx are those vectors' part of Softirq,
	// where the source is eBPF.
	SoftirqNetRx float64 `json:"softirq_net_rx,omitempty"`
	SoftirqNetTx float64 `json:"softirq_net_tx,omitempty"`
	// NetRx and NetTx count how often the softirqs ran (/proc/softirqs).
	NetRx uint64 `json:"net_rx"`
	NetTx uint64 `json:"net_tx"`
	// Packets processed, dropped for a full backlog, polls that ran out of
	// budget, and wake-ups received by RPS (/proc/net/softnet_stat).
	Processed   uint64 `json:"processed"`
	Dropped     uint64 `json:"dropped"`
	Squeezed    uint64 `json:"squeezed"`
	ReceivedRPS uint64 `json:"received_rps"`
}

// Device is one network device of a node or pod over the measured window.
type Device struct {
	Place     string `json:"place"`
	Name      string `json:"name"`
	RxPackets uint64 `json:"rx_packets"`
	TxPackets uint64 `json:"tx_packets"`
	RxBytes   uint64 `json:"rx_bytes"`
	TxBytes   uint64 `json:"tx_bytes"`
	RxDropped uint64 `json:"rx_dropped"`
	TxDropped uint64 `json:"tx_dropped"`
	RxErrors  uint64 `json:"rx_errors"`
	TxErrors  uint64 `json:"tx_errors"`
}

// Fastpath is what became of the packets that met a node's fast path over the measured
// window.
type Fastpath struct {
	Place string `json:"place"`
	// Packets by reason, those without any left out: FastOut and FastIn took it, all
	// others say why not (docs/fastpath.md).
	Packets map[string]uint64 `json:"packets"`
}

// Packets that took the fast path.
const (
	FastOut = "fast-out"
	FastIn  = "fast-in"
)

// Sample is what was counted in one place over the measured window.
type Sample struct {
	// Host is nil where CPUs were not asked for, Fastpath where there is none.
	Host     *Host
	Devices  []Device
	Fastpath *Fastpath
}

// Load is what a node of a lab did over the measured window with its NIC and its
// CPUs: what tells which of them was the limit.
type Load struct {
	Node string `json:"node"`
	// Role of the node in a load balancer: client, proxy, backend; else empty.
	Role string `json:"role,omitempty"`
	// Receive and Send are what the NIC carried in bit/s, with the headers of its
	// link; Rate is the cap of either, 0 where there is none.
	Receive float64 `json:"receive"`
	Send    float64 `json:"send"`
	Rate    float64 `json:"rate,omitempty"`
	// Core is the busiest of the CPUs that the node's processes run on, Busy the
	// share of the window that it was. Shared tells that others' run there too.
	// Busy is 0 where CPUs were not sampled.
	Core   int     `json:"core"`
	Busy   float64 `json:"busy"`
	Shared bool    `json:"shared,omitempty"`
}

// Setting is one kernel setting that an accelerator changed.
type Setting struct {
	Place string `json:"place"`
	// Path below /sys or /proc/sys, e.g. "class/net/eth0/queues/rx-0/rps_cpus".
	Path string `json:"path"`
	// Want is what was written, Got what read back, Was what stood there before.
	Want string `json:"want"`
	Got  string `json:"got"`
	Was  string `json:"was"`
}

// Warning is data that travels with a result.
type Warning struct {
	// Code is one of the Warn constants.
	Code string `json:"code"`
	// Message is a sentence for a person, with the figures.
	Message string `json:"message"`
}

// Warnf makes one of a code and a format of fmt.
func Warnf(code, format string, args ...any) Warning {
	return Warning{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Codes of warnings.
const (
	WarnGeneratorBound = "generator-bound"  // the sender, not the network, is the limit
	WarnSaturated      = "path-saturated"   // the path took less than the set rate
	WarnThrottled      = "cpu-throttled"    // a cgroup's CPU limit held a place back
	WarnRetransmits    = "retransmits"      // TCP sent a notable share again
	WarnDrops          = "drops"            // a device or backlog dropped packets
	WarnErrors         = "request-errors"   // HTTP requests, or connections of connect, failed
	WarnDrift          = "drift"            // the baseline moved over the run
	WarnFewBlocks      = "few-blocks"       // too few blocks for the interval wished for
	WarnNoRatio        = "no-ratio"         // a comparison is left out: a value is 0, or no block has both
	WarnReadback       = "setting-readback" // a setting did not read back
	WarnSteal          = "steal"            // the hypervisor took CPU time away
	WarnSkew           = "window-skew"      // the ends' windows do not match
	WarnSharedCPUs     = "shared-cpus"      // nodes of the lab share CPUs
	WarnFailedTrials   = "failed-trials"    // trials failed and were tried again, or are missing
	WarnNoEBPF         = "softirq-ticks"    // exact softirq time could not be had
	WarnNoCPUs         = "cpus-not-sampled" // nothing is known of the nodes' CPUs
	WarnInterrupts     = "slow-interrupts"  // steering pays more for an interrupt than it could gain
	WarnHeld           = "held"             // others keep the nodes accelerated, the baseline too
	WarnStrangers      = "strangers"        // somebody else than the client came to a server
	WarnSlowPath       = "slow-path"        // the fast path carried less than half of the packets
)

// Environment is what the run ran on: environment.json.
type Environment struct {
	Version string    `json:"slipstream"`
	Started time.Time `json:"started"`
	// Command is what repeats the run.
	Command string `json:"command"`
	// Placement says in a sentence where the nodes' work ran.
	Placement string `json:"placement,omitempty"`
	// LeftOut are the experiment's variants that could not be applied there.
	LeftOut []LeftOut `json:"left_out,omitempty"`
	Nodes   []Node    `json:"nodes"`
}

// LeftOut is a variant that the run left out from the start.
type LeftOut struct {
	Variant string `json:"variant"`
	// Why is a phrase for a person.
	Why string `json:"why"`
}

func (l LeftOut) String() string { return l.Variant + ": " + l.Why }

// Node is one node of the target.
type Node struct {
	Name   string `json:"name"`
	Boot   string `json:"boot"`
	Kernel string `json:"kernel"`
	Arch   string `json:"arch"`
	// Distribution is /etc/os-release's PRETTY_NAME.
	Distribution string `json:"distribution"`
	CPUModel     string `json:"cpu_model"`
	// CPUs online, those isolated, and those given to this node, as lists.
	CPUs       string `json:"cpus"`
	Isolated   string `json:"isolated,omitempty"`
	NodeCPUs   string `json:"node_cpus,omitempty"`
	IRQCPUs    string `json:"irq_cpus,omitempty"`
	MemoryByte uint64 `json:"memory_bytes"`
	Governor   string `json:"governor,omitempty"`
	Clock      string `json:"clocksource,omitempty"`
	Hypervisor bool   `json:"hypervisor"`
	// InterruptSeconds is how long an interrupt from one CPU to another takes,
	// there and back; 0 where it was not timed. Nodes of one machine share it.
	InterruptSeconds float64 `json:"interrupt_seconds,omitempty"`
	// Held is what others kept accelerated there when the run began, and who, a phrase
	// each: every variant is measured with it.
	Held []string `json:"held,omitempty"`
	// Sysctls that matter to the result.
	Sysctls map[string]string `json:"sysctls,omitempty"`
	// Tools by name with their versions.
	Tools map[string]string `json:"tools,omitempty"`
	Links []Link            `json:"links,omitempty"`
	// Role of the node in a load balancer, and what runs there if it is the proxy:
	// "haproxy 2.6.12" or "builtin".
	Role  string `json:"role,omitempty"`
	Proxy string `json:"proxy,omitempty"`
	// NICRate caps a lab's NIC in either direction, in bit/s; 0 where nothing does.
	NICRate float64 `json:"nic_rate,omitempty"`
	// Services that a lab made on the node; nil if none.
	Services *Services `json:"services,omitempty"`
}

// Services are what leads a node's pods to the backends of services.
type Services struct {
	Mode string `json:"mode"`
	// Servers have a service with so many Backends in front of them; Total counts the
	// others too, which have one.
	Servers  int `json:"servers"`
	Backends int `json:"backends"`
	Total    int `json:"total"`
	// LoadSeconds is how long it took to load all rules of the node, or, in mode ebpf,
	// the programs and maps of all nodes.
	LoadSeconds float64 `json:"load_seconds"`
}

// Link is a network device as it stood before the run.
type Link struct {
	Name string `json:"name"`
	Kind string `json:"kind"`
	// Class is nic, overlay, host-veth, pod or empty.
	Class    string `json:"class,omitempty"`
	MTU      int    `json:"mtu"`
	RxQueues int    `json:"rx_queues"`
	TxQueues int    `json:"tx_queues"`
	// Offloads that are on, by ethtool's names.
	Offloads []string `json:"offloads,omitempty"`
	// RPS masks and RFS flow counts, a queue each.
	RPS []string `json:"rps_cpus,omitempty"`
	RFS []string `json:"rps_flow_cnt,omitempty"`
}
