// Package record is what a run leaves behind: trials, the environment they ran
// in, and the folder that holds both. Its types are the vocabulary of the
// worker too, which fills them in where the traffic is; so a number is defined
// once, from the socket to the report. It measures nothing and judges nothing
// (see internal/collect and internal/stats), and reads old results anywhere.
package record

import (
	"fmt"
	"slices"
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
	LatencyMean   = "latency_mean"    // s, round trip
	LatencyP50    = "latency_p50"     // s, round trip
	LatencyP99    = "latency_p99"     // s, round trip
	LatencyP999   = "latency_p999"    // s, round trip
	LatencyMax    = "latency_max"     // s, the longest round trip
	Completion    = "completion"      // s, from the first of a number of HTTP requests until the last was answered
	Errors        = "errors"          // share of HTTP requests that failed, 1
	Loss          = "loss"            // share of messages sent that never came, 1
	Reorder       = "reorder"         // share of datagrams that came after a later one (RFC 4737), 1
	Jitter        = "jitter"          // s, mean change of the transit time between datagrams (RFC 3550, section 6.4.1)
	CPUPerGB      = "cpu_per_gb"      // s of busy CPU on all nodes per 1e9 bytes of payload
	SoftirqPerGB  = "softirq_per_gb"  // s of softirq per 1e9 bytes; part of cpu_per_gb
	CPUPerMessage = "cpu_per_message" // s of busy CPU on all nodes per round trip

	InterruptsPerMessage = "interrupts_per_message"       // interrupts of all CPUs per round trip
	SwitchesPerMessage   = "context_switches_per_message" // context switches of all CPUs per round trip
)

// Units of the metrics, as in summary.json.
var Units = map[string]string{
	Throughput: "bit/s", Rate: "1/s",
	LatencyMean: "s", LatencyP50: "s", LatencyP99: "s", LatencyP999: "s", LatencyMax: "s", Completion: "s", Errors: "1",
	Loss: "1", Reorder: "1", Jitter: "s", CPUPerGB: "s/GB", SoftirqPerGB: "s/GB", CPUPerMessage: "s",
	InterruptsPerMessage: "1", SwitchesPerMessage: "1",
}

// HigherIsBetter tells the direction of a metric: true where a larger value is
// the better one.
func HigherIsBetter(metric string) bool { return metric == Throughput || metric == Rate }

// Trial is one variant × workload × pairs, measured once: a line of
// trials.jsonl.
type Trial struct {
	// Block counts from 1.
	Block    int    `json:"block"`
	Order    int    `json:"order"`    // position in the whole run, from 1
	Variant  string `json:"variant"`  // name of the variant
	Workload string `json:"workload"` // name of the workload
	Pairs    int    `json:"pairs"`    // number of pairs
	// Period counts from 1 over the whole run, where variants have a switch: a block is then
	// a period of each of them, and a failed trial is tried again at its period's end.
	Period int `json:"period,omitempty"`
	// Entry counts from 1 how often the run has entered the period. A resumed run repeats an
	// interrupted period from its first trial, after another switch. Only trials of the last entry count.
	Entry  int `json:"entry,omitempty"`
	Repeat int `json:"repeat,omitempty"` // counts a cell's trials within a period, from 1
	// Attempt counts from 1; a failed trial is tried again at its block's end.
	Attempt int       `json:"attempt"`
	Started time.Time `json:"started"` // when it began, by the controller's clock
	// Took is how long the whole trial took.
	Took   float64 `json:"took" unit:"s"`
	Window float64 `json:"window" unit:"s"` // length of the measured part
	Status Status  `json:"status"`          // whether it gave numbers: ok or failed
	Error  string  `json:"error,omitempty"` // why it failed
	// Metrics by name, over all pairs.
	Metrics map[string]float64 `json:"metrics,omitempty"`
	// Latency is the merged histogram of all pairs in nanoseconds, HDR V2
	// compressed, base64; empty where no latency was taken.
	Latency string   `json:"latency,omitempty"`
	PerPair []Pair   `json:"per_pair,omitempty"` // what each pair measured
	Hosts   []Host   `json:"hosts,omitempty"`    // CPUs of the machines
	Devices []Device `json:"devices,omitempty"`  // counters of the network devices
	// Fastpath of each node, where the variant has it.
	Fastpath []Fastpath `json:"fastpath,omitempty"`
	// VFs has the NICs that have a virtual function, or could have one, and which way their
	// packets took.
	VFs []VFUse `json:"vfs,omitempty"`
	// Loads of the nodes of a lab, in order.
	Loads []Load `json:"loads,omitempty"`
	// Series has, by node, the bytes of its NICs and the times of its CPUs about every 100 ms, as a text
	// that is explained below.
	Series map[string]string `json:"series,omitempty"`
	// Settings are what the accelerators set, as read back.
	Settings []Setting `json:"settings,omitempty"`
	Warnings []Warning `json:"warnings,omitempty"` // what to keep in mind with its figures
	// Files that an imported trial was read from, as environment.json has them.
	Files []string `json:"files,omitempty"`
}

// LastEntries returns the trials that belong to the last entry into their period, and those without periods.
func LastEntries(trials []Trial) []Trial {
	last := make(map[int]int) // by period
	for _, t := range trials {
		last[t.Period] = max(last[t.Period], t.Entry)
	}
	return slices.DeleteFunc(slices.Clone(trials), func(t Trial) bool { return t.Entry < last[t.Period] })
}

// Pair is what one client and its server measured.
type Pair struct {
	Client Endpoint `json:"client"` // end that asks, or sends
	// Server is, behind a load balancer, all of its backends together.
	Server   Endpoint   `json:"server"`
	Backends []Endpoint `json:"backends,omitempty"` // each backend behind a load balancer
}

// Endpoint is one end of a pair over the measured window.
type Endpoint struct {
	// Place is the namespace or pod it ran in.
	Place string `json:"place"`
	// Seconds is the window as this end's own clock saw it.
	Seconds float64 `json:"seconds" unit:"s"`
	// Bytes of payload within the window; a sender counts what it handed over, a
	// receiver what it got.
	Bytes       uint64 `json:"bytes" unit:"bytes"`
	Messages    uint64 `json:"messages,omitempty"`    // messages or round trips within the window
	Lost        uint64 `json:"lost,omitempty"`        // messages that never came, or were not answered
	Retransmits uint64 `json:"retransmits,omitempty"` // TCP segments that were sent again
	// Arrived is how many of the datagrams that the sender counts came. This and the
	// next three are of a UDP stream's receiver, the others within its own window.
	Arrived    uint64  `json:"arrived,omitempty"`
	Reordered  uint64  `json:"reordered,omitempty"`       // datagrams that came after a later one
	Duplicates uint64  `json:"duplicates,omitempty"`      // datagrams that came again; neither bytes nor messages count them
	Jitter     float64 `json:"jitter,omitempty" unit:"s"` // mean change of the transit time between datagrams
	// Errors of HTTP's client are the requests that failed in the window, by kind. None
	// is among the messages.
	Errors     map[string]uint64 `json:"errors,omitempty"`
	Completion float64           `json:"completion,omitempty" unit:"s"` // time until a number of requests was done
	// CPUSeconds of this end's own process over the window.
	CPUSeconds float64 `json:"cpu_seconds,omitempty" unit:"s"`
	// CongestionControl that the TCP sockets of another tool had, as the kernel tells it; several
	// are separated by spaces. Left out if no connection was seen.
	CongestionControl string `json:"congestion_control,omitempty"`
	// Latency is this end's histogram, encoded as that of the trial.
	Latency string `json:"latency,omitempty"`
	// BitsPerSecond is a tool's own figure, where it tells no more.
	BitsPerSecond float64            `json:"bits_per_second,omitempty" unit:"bit/s"`
	Percentiles   map[string]float64 `json:"percentiles,omitempty"` // a tool's own latencies in s, by metric name: the mean and the longest too
	Warnings      []Warning          `json:"warnings,omitempty"`    // what to keep in mind with its figures
}

// Kinds of errors of HTTP requests.
const (
	ErrRefused = "refused" // nobody listens
	ErrReset   = "reset"   // the connection broke
	ErrShort   = "short"   // it ended before its response did
	ErrStatus  = "status"  // the response was none of success
	ErrTimeout = "timeout" // there was no answer in time
	ErrOther   = "other"   // anything else
)

// Host is one machine's CPUs over the measured window. Lab nodes that share a
// machine share its record too.
type Host struct {
	// Boot is the machine's boot id: one record a boot id and trial.
	Boot  string   `json:"boot"`
	Nodes []string `json:"nodes"` // nodes that run on the machine
	// PhysicalHost is the machine that a virtual machine ran on, where the hypervisor tells it.
	PhysicalHost string  `json:"physical_host,omitempty"`
	Seconds      float64 `json:"seconds" unit:"s"` // the window by its own clock
	// Source of softirq time: "ebpf" is exact, "ticks" is /proc/stat.
	Source string `json:"softirq_source"`
	CPUs   []CPU  `json:"cpus"` // its CPUs that are online
	// Switches counts context switches of all CPUs (/proc/stat).
	Switches uint64    `json:"context_switches,omitempty"`
	Warnings []Warning `json:"warnings,omitempty"` // what to keep in mind with its figures
}

// Sources of softirq time.
const (
	SoftirqEBPF  = "ebpf"
	SoftirqTicks = "ticks"
)

// CPU is one core over the measured window. The times from usr to idle are
// /proc/stat's ticks.
type CPU struct {
	ID      int     `json:"cpu"`              // number of the CPU
	User    float64 `json:"usr" unit:"s"`     // time in programs
	System  float64 `json:"sys" unit:"s"`     // time in the kernel, by ticks
	IRQ     float64 `json:"irq" unit:"s"`     // time in interrupts, by ticks
	Steal   float64 `json:"steal" unit:"s"`   // time that the hypervisor took
	Idle    float64 `json:"idle" unit:"s"`    // time without work
	Busy    float64 `json:"busy" unit:"s"`    // the window less idle time
	Softirq float64 `json:"softirq" unit:"s"` // time in softirqs, from the source that softirq_source names
	// SoftirqTicks is what /proc/stat says of the same.
	SoftirqTicks float64 `json:"softirq_ticks" unit:"s"`
	// SoftirqNetRx is the part of softirq in NET_RX, where the source is ebpf.
	SoftirqNetRx float64 `json:"softirq_net_rx,omitempty" unit:"s"`
	SoftirqNetTx float64 `json:"softirq_net_tx,omitempty" unit:"s"` // part of softirq in NET_TX, where the source is ebpf
	// NetRx is how often NET_RX ran (/proc/softirqs).
	NetRx uint64 `json:"net_rx"`
	NetTx uint64 `json:"net_tx"` // how often NET_TX ran
	// Processed packets. This and the next three are from /proc/net/softnet_stat.
	Processed   uint64 `json:"processed"`
	Dropped     uint64 `json:"dropped"`      // packets dropped for a full backlog
	Squeezed    uint64 `json:"squeezed"`     // polls that ran out of budget
	ReceivedRPS uint64 `json:"received_rps"` // wake-ups by RPS
	// Interrupts of devices, timers and other CPUs (/proc/interrupts).
	Interrupts uint64 `json:"interrupts,omitempty"`
}

// Device is one network device of a node or pod over the measured window.
type Device struct {
	Place     string `json:"place"`                 // namespace or pod of the device
	Name      string `json:"name"`                  // name of the device
	RxPackets uint64 `json:"rx_packets"`            // packets received
	TxPackets uint64 `json:"tx_packets"`            // packets sent
	RxBytes   uint64 `json:"rx_bytes" unit:"bytes"` // bytes received
	TxBytes   uint64 `json:"tx_bytes" unit:"bytes"` // bytes sent
	RxDropped uint64 `json:"rx_dropped"`            // received packets that were dropped
	TxDropped uint64 `json:"tx_dropped"`            // packets dropped before they were sent
	RxErrors  uint64 `json:"rx_errors"`             // received packets that were damaged
	TxErrors  uint64 `json:"tx_errors"`             // packets that could not be sent
}

// Fastpath is what became of the packets that met a node's fast path over the measured
// window.
type Fastpath struct {
	Place string `json:"place"` // the node
	// Packets by reason, those without any left out: fast-out and fast-in took it, all
	// others say why not (docs/explanation/fastpath.md).
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
	VFs      []VFUse
	Series   string // of EncodeSeries
}

// Load is what a node of a lab did over the measured window with its NIC and its
// CPUs: what tells which of them was the limit.
type Load struct {
	Node string `json:"node"` // name of the node
	// Role of the node in a load balancer: client, proxy, backend; else empty.
	Role string `json:"role,omitempty"`
	// Receive is what the NIC received, with the headers of its link.
	Receive float64 `json:"receive" unit:"bit/s"`
	Send    float64 `json:"send" unit:"bit/s"`           // what the NIC sent
	Rate    float64 `json:"rate,omitempty" unit:"bit/s"` // cap of either direction, left out if there is none
	// Core is the busiest of the CPUs that the node's processes run on.
	Core   int     `json:"core"`
	Busy   float64 `json:"busy"`             // share of the window that the core was busy; 0 where CPUs were not sampled
	Shared bool    `json:"shared,omitempty"` // whether processes of other nodes run on the core too
}

// Setting is one kernel setting that an accelerator changed.
type Setting struct {
	Place string `json:"place"` // namespace or pod of the setting
	// Path below /sys or /proc/sys, e.g. "class/net/eth0/queues/rx-0/rps_cpus".
	Path string `json:"path"`
	// Want is what was written.
	Want string `json:"want"`
	Got  string `json:"got"` // what read back
	Was  string `json:"was"` // what stood there before
}

// Warning is data that travels with a result.
type Warning struct {
	// Code names the kind of warning.
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
	WarnGeneratorBound = "generator-bound"     // the sender, not the network, is the limit
	WarnSaturated      = "path-saturated"      // the path took less than the set rate
	WarnThrottled      = "cpu-throttled"       // a cgroup's CPU limit held a place back
	WarnRetransmits    = "retransmits"         // TCP sent a notable share again
	WarnDrops          = "drops"               // a device or backlog dropped packets
	WarnErrors         = "request-errors"      // HTTP requests, or connections of connect, failed
	WarnDrift          = "drift"               // the baseline moved over the run
	WarnApart          = "not-interleaved"     // variants were measured one after the other
	WarnFewBlocks      = "few-blocks"          // too few blocks for the interval that was asked for
	WarnNoRatio        = "no-ratio"            // a comparison is left out: a value is 0, or no block has both
	WarnReadback       = "setting-readback"    // a setting did not read back
	WarnSteal          = "steal"               // the hypervisor took CPU time away
	WarnMoved          = "moved"               // a virtual machine runs on another physical host than before
	WarnSkew           = "window-skew"         // the ends' windows do not match
	WarnSharedCPUs     = "shared-cpus"         // nodes of the lab share CPUs
	WarnFailedTrials   = "failed-trials"       // trials failed and were tried again, or are missing
	WarnNoEBPF         = "softirq-ticks"       // exact softirq time could not be had
	WarnNoCPUs         = "cpus-not-sampled"    // nothing is known of the nodes' CPUs
	WarnInterrupts     = "slow-interrupts"     // steering pays more for an interrupt than it could gain
	WarnHeld           = "already-accelerated" // others keep the nodes accelerated, the baseline too
	WarnUnexpected     = "unexpected-traffic"  // somebody else than the client came to a server
	WarnSlowPath       = "slow-path"           // the fast path carried less than half of the packets
	WarnVFWithdrawn    = "vf-withdrawn"        // the virtual function of a NIC went, was interrupted or came
	WarnCongestion     = "congestion-control"  // a tool ran with another congestion control than the experiment's
	WarnVFIdle         = "vf-idle"             // packets did not take the virtual function, which was up
)

// SchemaVersion is that of the results folder's format. It grows when a field changes its
// meaning or goes, not when one is added. Folders from before the first have none.
const SchemaVersion = 1

// Environment is what the run ran on: environment.json.
type Environment struct {
	// SchemaVersion of the results folder, set when it is made.
	SchemaVersion int `json:"schemaVersion"`
	// Version of the program.
	Version string    `json:"slipstream"`
	Started time.Time `json:"started"` // when the run began
	// Command is what repeats the run.
	Command string `json:"command"`
	// Placement says in a sentence where the nodes' work ran.
	Placement string `json:"placement,omitempty"`
	// LeftOut are the experiment's variants that could not be applied there.
	LeftOut []LeftOut `json:"left_out,omitempty"`
	Nodes   []Node    `json:"nodes"` // the nodes of the target
	// Imported is what the results of other programs were read from; nil for a run.
	Imported *Imported `json:"imported,omitempty"`
}

// Imported is what results were read from that other programs had written.
type Imported struct {
	Pattern string `json:"pattern"` // pattern of the names of the files
	Files   []File `json:"files"`   // files that were read
}

// File is one that results were read from.
type File struct {
	Path    string `json:"path"`              // path as it was given, or found in a folder that was
	SHA256  string `json:"sha256"`            // hash of its content
	Format  string `json:"format"`            // what wrote it, as its content tells
	Version string `json:"version,omitempty"` // version of that, if the content tells
}

// LeftOut is a variant that the run left out from the start.
type LeftOut struct {
	Variant string `json:"variant"` // name of the variant
	Why     string `json:"why"`     // reason, as a phrase
}

func (l LeftOut) String() string { return l.Variant + ": " + l.Why }

// Node is one node of the target.
type Node struct {
	Name   string `json:"name"`   // name of the node
	Boot   string `json:"boot"`   // boot id of its machine
	Kernel string `json:"kernel"` // release of the kernel
	Arch   string `json:"arch"`   // architecture of the machine
	// Distribution is /etc/os-release's PRETTY_NAME.
	Distribution string `json:"distribution"`
	CPUModel     string `json:"cpu_model"` // name of the CPU
	// CPUs online, as a list: 0-3,8.
	CPUs       string `json:"cpus"`
	Isolated   string `json:"isolated,omitempty"`        // CPUs that are isolated
	NodeCPUs   string `json:"node_cpus,omitempty"`       // CPUs given to a node of a lab
	IRQCPUs    string `json:"irq_cpus,omitempty"`        // CPUs that take the NIC's interrupts
	MemoryByte uint64 `json:"memory_bytes" unit:"bytes"` // memory of the machine
	Governor   string `json:"governor,omitempty"`        // frequency governor of the CPUs
	Clock      string `json:"clocksource,omitempty"`     // clock source of the kernel
	Hypervisor bool   `json:"hypervisor"`                // whether it is a virtual machine
	// PhysicalHost is the machine that a virtual machine ran on when the run began, where
	// the hypervisor tells it: Hyper-V and Azure do.
	PhysicalHost string `json:"physical_host,omitempty"`
	// InterruptSeconds is how long an interrupt from one CPU to another takes,
	// there and back; 0 where it was not timed. Nodes of one machine share it.
	InterruptSeconds float64 `json:"interrupt_seconds,omitempty" unit:"s"`
	// Held is what others kept accelerated there when the run began, and who, a phrase
	// each: every variant is measured with it.
	Held []string `json:"held,omitempty"`
	// Sysctls that matter to the result.
	Sysctls map[string]string `json:"sysctls,omitempty"`
	// Tools by name with their versions.
	Tools map[string]string `json:"tools,omitempty"`
	Links []Link            `json:"links,omitempty"` // its network devices
	// Role of the node in a load balancer.
	Role  string `json:"role,omitempty"`
	Proxy string `json:"proxy,omitempty"` // what the proxy of a load balancer is: "haproxy 2.6.12" or "builtin"
	// NICRate caps a lab's NIC in either direction; left out if nothing does.
	NICRate float64 `json:"nic_rate,omitempty" unit:"bit/s"`
	// Services that a lab made on the node; nil if none.
	Services *Services `json:"services,omitempty"`
}

// Services are what leads a node's pods to the backends of services.
type Services struct {
	Mode string `json:"mode"` // who leads a connection to a backend: iptables, nftables or ebpf
	// Servers are the services that clients connect to. The others have one backend.
	Servers  int `json:"servers"`
	Backends int `json:"backends"` // backends of each of those services
	Total    int `json:"total"`    // services in all
	// LoadSeconds is how long it took to load all rules of the node, or, in mode ebpf,
	// the programs and maps of all nodes.
	LoadSeconds float64 `json:"load_seconds" unit:"s"`
}

// Link is a network device as it stood before the run.
type Link struct {
	Name string `json:"name"` // name of the device
	Kind string `json:"kind"` // kind of the device, as ip link has it
	// Class is nic, overlay, host-veth, pod or empty.
	Class    string `json:"class,omitempty"`
	MTU      int    `json:"mtu"`       // largest packet
	RxQueues int    `json:"rx_queues"` // receive queues
	TxQueues int    `json:"tx_queues"` // transmit queues
	// Offloads that are on, by ethtool's names.
	Offloads []string `json:"offloads,omitempty"`
	// RPS masks, a queue each.
	RPS []string `json:"rps_cpus,omitempty"`
	RFS []string `json:"rps_flow_cnt,omitempty"` // RFS flow counts, a queue each
	NIC *NIC     `json:"nic,omitempty"`          // what drives it, where it has hardware
}
