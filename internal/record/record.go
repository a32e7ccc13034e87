// Package record defines the results of a run: trials, the environment that they ran
// in, and the folder with both. Workers fill in the same types, so a measured value is
// defined once, from the socket to the report. The package neither measures nor judges
// (see internal/collect and internal/stats), and reads old results on any system.
package record

import (
	"slices"
	"strings"
	"time"
)

// Status of a trial.
type Status string

// A trial either gave numbers or failed; a failed one is tried again.
const (
	StatusOK     Status = "ok"
	StatusFailed Status = "failed"
)

// Trial is one variant × workload × pairs, measured once: a line of
// trials.jsonl.
type Trial struct {
	// Block counts from 1.
	Block    int    `json:"block"`
	Order    int    `json:"order"`    // position in the whole run, from 1
	Variant  string `json:"variant"`  // name of the variant
	Workload string `json:"workload"` // name of the workload
	Pairs    int    `json:"pairs"`    // number of pairs
	// Period is the number of the period, from 1 over the whole run, if variants have a switch. A block
	// then has a period of each variant, and a failed trial is repeated at the end of its period.
	Period int `json:"period,omitempty"`
	// Entry counts from 1 how often the run has entered the period. A resumed run repeats an
	// interrupted period from its first trial, after another switch. Only trials of the last entry count.
	Entry  int `json:"entry,omitempty"`
	Repeat int `json:"repeat,omitempty"` // number of the trial among those of its variant, workload and pairs within the period, from 1
	// Round is the number of the round of a mesh, from 1. A block has one trial for each round. The pairs of
	// a round have no node in common.
	Round int `json:"round,omitempty"`
	// Attempt counts from 1. A failed trial is repeated at the end of its block.
	Attempt int       `json:"attempt"`
	Started time.Time `json:"started"` // when it began, by the controller's clock
	// Took is how long the whole trial took.
	Took   float64 `json:"took" unit:"s"`
	Window float64 `json:"window" unit:"s"` // length of the measured part
	Status Status  `json:"status"`          // outcome of the trial: ok or failed
	Error  string  `json:"error,omitempty"` // why it failed
	// Stalled says that it failed because a connection moved nothing at the end of the window, or because nothing or
	// next to nothing arrived for most of it: the network or a machine stood still.
	Stalled bool `json:"stalled,omitempty"`
	// Metrics are values by name, over all pairs.
	Metrics map[string]float64 `json:"metrics,omitempty"`
	// Latency is the merged histogram of all pairs in nanoseconds, HDR V2
	// compressed, base64; empty if no latency was measured.
	Latency string   `json:"latency,omitempty"`
	PerPair []Pair   `json:"per_pair,omitempty"` // what each pair measured
	Hosts   []Host   `json:"hosts,omitempty"`    // CPUs of the machines
	Devices []Device `json:"devices,omitempty"`  // counters of the network devices
	// Fastpath are the counters of each node's fast path, if the variant has it.
	Fastpath []Fastpath `json:"fastpath,omitempty"`
	// VFs are the NICs that have or could have a virtual function, and how many of their packets
	// used it.
	VFs []VFUse `json:"vfs,omitempty"`
	// DaemonSets have what the observed DaemonSets used on each node.
	DaemonSets []DaemonSet `json:"daemonsets,omitempty"`
	// Loads are the loads of a lab's nodes, in order.
	Loads []Load `json:"loads,omitempty"`
	// Series are time series by node: the bytes of its NICs and the times of its CPUs about every 100 ms. The
	// encoding is explained below.
	Series map[string]string `json:"series,omitempty"`
	// Settings are the settings that the accelerators changed, as read back.
	Settings []Setting `json:"settings,omitempty"`
	Warnings []Warning `json:"warnings,omitempty"` // what may make its figures wrong or uncertain
	// EndpointChanges is how many backends of services were replaced while traffic ran.
	EndpointChanges float64 `json:"endpoint_changes,omitempty" unit:"1/s"`
	// Files are the paths of the files from which an imported trial was read.
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

// Pair has the measurements of one client and its server.
type Pair struct {
	Client Endpoint `json:"client"` // end that requests, or sends
	// Server is the server's end; behind a load balancer, all backends together.
	Server   Endpoint   `json:"server"`
	Backends []Endpoint `json:"backends,omitempty"` // each backend behind a load balancer
	// Beside is the traffic of the workload beside, between the same places over the same window.
	Beside *Beside `json:"beside,omitempty"`
	// Error says why a pair of a mesh gave no numbers. Those of the other pairs hold.
	Error string `json:"error,omitempty"`
}

// Beside is what another workload has moved beside the measured one.
type Beside struct {
	Client Endpoint `json:"client"` // the same place as the pair's client
	Server Endpoint `json:"server"` // the same place as the pair's server
}

// Teller returns the end that knows what arrived: with the native tool the server, with any other tool the client.
func (p *Pair) Teller(native bool) *Endpoint {
	if native {
		return &p.Server
	}
	return &p.Client
}

// Endpoint is one end of a pair over the measured window.
type Endpoint struct {
	// Place is the node or pod in which the end ran.
	Place string `json:"place"`
	// Seconds is the length of the window by this end's clock.
	Seconds float64 `json:"seconds" unit:"s"`
	// Bytes is the payload within the window. A sender counts what it gave to its socket, a
	// receiver what it read.
	Bytes       uint64 `json:"bytes" unit:"bytes"`
	Messages    uint64 `json:"messages,omitempty"`    // messages or round trips within the window
	Lost        uint64 `json:"lost,omitempty"`        // messages that did not arrive, or got no reply
	Retransmits uint64 `json:"retransmits,omitempty"` // retransmitted TCP segments
	// LossShare is the share of the sent data that did not arrive, 0 to 1, from a tool that reports it but no counts.
	LossShare *float64 `json:"loss_share,omitempty" unit:"1"`
	// Arrived is how many of the datagrams that the sender counts have arrived. Only the receiver of a
	// UDP stream has this and the next three, the latter within its own window.
	Arrived    uint64  `json:"arrived,omitempty"`
	Reordered  uint64  `json:"reordered,omitempty"`       // datagrams that arrived after a later one
	Duplicates uint64  `json:"duplicates,omitempty"`      // datagrams that arrived again; neither bytes nor messages count them
	Jitter     float64 `json:"jitter,omitempty" unit:"s"` // mean change of the transit time between datagrams
	// Errors are the failed requests of an HTTP client within the window, by kind. Messages does not
	// count them.
	Errors     map[string]uint64 `json:"errors,omitempty"`
	Completion float64           `json:"completion,omitempty" unit:"s"` // time until a number of requests was done
	// CPUSeconds is the CPU time of this end's own process over the window.
	CPUSeconds float64 `json:"cpu_seconds,omitempty" unit:"s"`
	// Sleeps is how often the threads of this end slept in the kernel within the window: their voluntary
	// context switches. Only the traffic engine on Linux counts them.
	Sleeps uint64 `json:"sleeps,omitempty"`
	// Silent is the longest time within the window in which this end moved nothing, on any connection. Only the traffic
	// engine knows it, in steps of a sixteenth of the window or so.
	Silent float64 `json:"silent,omitempty" unit:"s"`
	// Machine is the load of the machine that a tool's client ran on, if the client reports it, as latte does.
	Machine *Machine `json:"machine,omitempty"`
	// CongestionControl is that of another tool's TCP sockets, as the kernel reports it; several
	// are separated by spaces. Absent if no connection was seen.
	CongestionControl string `json:"congestion_control,omitempty"`
	// Command is the command that started another tool at this end: the program and its arguments.
	Command string `json:"command,omitempty"`
	// Latency is this end's histogram, encoded as that of the trial.
	Latency string `json:"latency,omitempty"`
	// BitsPerSecond is the throughput that a tool reports, if it reports no bytes.
	BitsPerSecond float64            `json:"bits_per_second,omitempty" unit:"bit/s"`
	Percentiles   map[string]float64 `json:"percentiles,omitempty"` // latencies in s that a tool reports, by metric name: also the mean and the longest
	Warnings      []Warning          `json:"warnings,omitempty"`    // what may make its figures wrong or uncertain
}

// SegmentBytes is the size of a full TCP segment over IPv4 on a device with an MTU of 1,500 bytes.
const SegmentBytes = 1448

// RetransmitShare estimates which share of the sent TCP segments, 0 to 1, were retransmissions. bytes is the
// payload that arrived, without retransmissions.
func RetransmitShare(retransmits, bytes uint64) float64 {
	return float64(retransmits) / max(1, float64(retransmits)+float64(bytes)/SegmentBytes)
}

// Kinds of errors of HTTP requests.
const (
	ErrRefused = "refused" // no server listens on the port
	ErrReset   = "reset"   // the connection was reset
	ErrShort   = "short"   // the connection ended before the response was complete
	ErrStatus  = "status"  // the response has a status other than success
	ErrTimeout = "timeout" // no response arrived in time
	ErrOther   = "other"   // anything else
)

// Host is the CPUs of one machine over the measured window. Lab nodes that share a
// machine share its record too.
type Host struct {
	// Boot is the machine's boot ID. A trial has one record for each.
	Boot  string   `json:"boot"`
	Nodes []string `json:"nodes"` // nodes that run on the machine
	// PhysicalHost is the host of a virtual machine, if the hypervisor tells the guest.
	PhysicalHost string  `json:"physical_host,omitempty"`
	Seconds      float64 `json:"seconds" unit:"s"` // the length of the window by its own clock
	// Source of softirq time: "ebpf" is exact, "ticks" is /proc/stat.
	Source string `json:"softirq_source"`
	CPUs   []CPU  `json:"cpus"` // the machine's online CPUs
	// Switches is the number of context switches of all CPUs (/proc/stat).
	Switches uint64    `json:"context_switches,omitempty"`
	Warnings []Warning `json:"warnings,omitempty"` // what may make its figures wrong or uncertain
}

// Sources of softirq time.
const (
	SoftirqEBPF  = "ebpf"
	SoftirqTicks = "ticks"
)

// CPU is one core over the measured window. The times from usr to idle are clock ticks
// of /proc/stat.
type CPU struct {
	ID      int     `json:"cpu"`              // number of the CPU
	User    float64 `json:"usr" unit:"s"`     // time in programs
	System  float64 `json:"sys" unit:"s"`     // time in the kernel, by ticks
	IRQ     float64 `json:"irq" unit:"s"`     // time in interrupts, by ticks
	Steal   float64 `json:"steal" unit:"s"`   // time that the hypervisor took
	Idle    float64 `json:"idle" unit:"s"`    // time without work
	Busy    float64 `json:"busy" unit:"s"`    // the window less idle time
	Softirq float64 `json:"softirq" unit:"s"` // time in softirqs, from the source that softirq_source names
	// SoftirqTicks is softirq time by /proc/stat.
	SoftirqTicks float64 `json:"softirq_ticks" unit:"s"`
	// SoftirqNetRx is the part of softirq in NET_RX, if the source is ebpf.
	SoftirqNetRx float64 `json:"softirq_net_rx,omitempty" unit:"s"`
	SoftirqNetTx float64 `json:"softirq_net_tx,omitempty" unit:"s"` // part of softirq in NET_TX, if the source is ebpf
	// NetRx is how often NET_RX ran (/proc/softirqs).
	NetRx uint64 `json:"net_rx"`
	NetTx uint64 `json:"net_tx"` // how often NET_TX ran
	// Processed is the number of packets. This and the next three are from /proc/net/softnet_stat.
	Processed   uint64 `json:"processed"`
	Dropped     uint64 `json:"dropped"`      // packets dropped because the backlog was full
	Squeezed    uint64 `json:"squeezed"`     // polls that used up their budget
	ReceivedRPS uint64 `json:"received_rps"` // wake-ups by RPS
	// Interrupts is the number of interrupts by devices, timers and other CPUs (/proc/interrupts).
	Interrupts uint64 `json:"interrupts,omitempty"`
}

// Machine is the load of a machine over the measured window, as counted by a tool that runs on it.
type Machine struct {
	Busy       float64 `json:"busy"`                                   // share of the time of its CPUs, 1
	CPUs       int     `json:"cpus,omitempty"`                         // how many it has; absent from imported files
	Interrupts float64 `json:"interrupts_per_message,omitempty"`       // interrupts of all its CPUs per round trip
	Switches   float64 `json:"context_switches_per_message,omitempty"` // context switches of all its CPUs per round trip
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

// Fastpath counts the packets that a node's fast path saw over the measured window.
type Fastpath struct {
	Place string `json:"place"` // the node
	// Packets are counts by reason, except those that are 0. fast-out and fast-in took the fast path: fast-out-vxlan those of the kind vxlan,
	// and so on. Older results do not have the kind. docs/explanation/fastpath.md explains kinds and reasons.
	Packets map[string]uint64 `json:"packets"`
}

// Packets that took the fast path.
const (
	FastOut = "fast-out"
	FastIn  = "fast-in"
)

// SplitReason splits the reason of packets that took the fast path into FastOut or FastIn, and the kind if it has one. It returns any other
// reason as it is.
func SplitReason(reason string) (name, kind string, fast bool) {
	for _, way := range []string{FastOut, FastIn} {
		if kind, fast := strings.CutPrefix(reason, way); fast {
			return way, strings.TrimPrefix(kind, "-"), true
		}
	}
	return reason, "", false
}

// Sample has the counters of one place over the measured window.
type Sample struct {
	// Host is nil if CPUs were not requested, Fastpath if there is none.
	Host     *Host
	Devices  []Device
	Fastpath *Fastpath
	VFs      []VFUse
	// DaemonSets are as many as the worker was asked to observe.
	DaemonSets []DaemonSet
	Series     string // of EncodeSeries
}

// DaemonSet is what the pod of a DaemonSet used on a node over the measured window, with all its containers.
type DaemonSet struct {
	Name string `json:"name"` // namespace and name of the DaemonSet: kube-system/cilium
	Node string `json:"node"` // node of the pod
	// CPUs is the mean number of CPUs in use: 0.1 is 100 millicores.
	CPUs float64 `json:"cpus,omitempty" unit:"1"`
	// Memory is the working set, as kubectl top shows it: the mean of both edges of the window.
	Memory float64 `json:"memory,omitempty" unit:"bytes"`
	// Error says why there are no values, such as a restart within the window.
	Error string `json:"error,omitempty"`
}

// Load is the use of the NIC and the CPUs of a lab's node over the measured window. It shows
// which of them was the limit.
type Load struct {
	Node string `json:"node"` // name of the node
	// Role of the node in a load balancer: client, proxy, backend; else empty.
	Role string `json:"role,omitempty"`
	// Receive is the rate at which the NIC received, including link headers.
	Receive float64 `json:"receive" unit:"bit/s"`
	Send    float64 `json:"send" unit:"bit/s"`           // rate at which the NIC sent
	Rate    float64 `json:"rate,omitempty" unit:"bit/s"` // rate limit of each direction, absent if there is none
	// Core is the busiest of the CPUs that the node's processes run on.
	Core   int     `json:"core"`
	Busy   float64 `json:"busy"`             // share of the window that the core was busy; 0 if CPUs were not sampled
	Shared bool    `json:"shared,omitempty"` // whether processes of other nodes run on the core too
}

// Setting is one kernel setting that an accelerator changed.
type Setting struct {
	Place string `json:"place"` // node or pod of the setting
	// Path is the path below /sys or /proc/sys, such as "class/net/eth0/queues/rx-0/rps_cpus".
	Path string `json:"path"`
	// Want is the value that was written.
	Want string `json:"want"`
	Got  string `json:"got"` // the value that was read back
	Was  string `json:"was"` // the value before
}

// SchemaVersion is the version of the results folder's format. It grows when a field is removed or changes
// its meaning, not when one is added. Folders older than version 1 have none.
const SchemaVersion = 1

// Environment describes the machines and the program of the run: environment.json.
type Environment struct {
	// SchemaVersion is the version of the results folder's format.
	SchemaVersion int `json:"schemaVersion"`
	// Version of the program.
	Version string    `json:"slipstream"`
	Started time.Time `json:"started"` // when the run began
	// Command is the command that repeats the run.
	Command string `json:"command"`
	// Experiment is a hash of what the experiment measures. A run of another one cannot be resumed in this folder.
	Experiment string `json:"experiment,omitempty"`
	// Labels are what the user said of the run, such as the branch and the commit.
	Labels map[string]string `json:"labels,omitempty"`
	// Placement says in a sentence on which CPUs the nodes ran.
	Placement string `json:"placement,omitempty"`
	// LeftOut are variants of the experiment that could not be applied.
	LeftOut []LeftOut `json:"left_out,omitempty"`
	Nodes   []Node    `json:"nodes"` // the nodes of the target
	// Clusters are those of a run in one or several; absent elsewhere.
	Clusters []Cluster `json:"clusters,omitempty"`
	// Imported is the source of imported results; absent for a run.
	Imported *Imported `json:"imported,omitempty"`
}

// Imported describes the files from which results were imported.
type Imported struct {
	Pattern string `json:"pattern"` // pattern of the file names
	Files   []File `json:"files"`   // files that were read
	// Conditions are further properties of the traffic, by workload and name, such as its direction and rate limit. Those that the
	// files do not tell are absent.
	Conditions map[string]map[string]string `json:"conditions,omitempty"`
}

// File is a file from which results were imported.
type File struct {
	Path    string `json:"path"`              // path of the file
	SHA256  string `json:"sha256"`            // hash of its content
	Format  string `json:"format"`            // program that wrote it
	Version string `json:"version,omitempty"` // version of that program, if the file contains it
}

// LeftOut is a variant that the run left out from the start.
type LeftOut struct {
	Variant string `json:"variant"` // name of the variant
	Why     string `json:"why"`     // reason, as a phrase
}

func (l LeftOut) String() string { return l.Variant + ": " + l.Why }

// Cluster is a cluster of a run, as its API server and its nodes describe it. What is not known is absent.
type Cluster struct {
	Name       string `json:"name,omitempty"`       // name in the experiment, if that has several
	Context    string `json:"context,omitempty"`    // context of the kubeconfig, if that was named
	Kubernetes string `json:"kubernetes,omitempty"` // version of the nodes' kubelet
	Plugin     string `json:"plugin,omitempty"`     // network plugin, such as flannel
	// PluginVersion is the tag of the plugin's image.
	PluginVersion string `json:"plugin_version,omitempty"`
	// PluginMode is how the plugin connects nodes, such as vxlan or host-gw.
	PluginMode string `json:"plugin_mode,omitempty"`
	KubeProxy  string `json:"kube_proxy,omitempty"` // mode of kube-proxy: iptables, nftables or ipvs
}

// Same reports whether a cluster has the same network and version as before. Facts that are or were unknown do not count: a pod of the plugin
// may be restarting, or kube-proxy may be slow to answer.
func (c Cluster) Same(before Cluster) bool {
	for _, values := range [][2]string{
		{c.Kubernetes, before.Kubernetes}, {c.Plugin, before.Plugin}, {c.PluginVersion, before.PluginVersion}, {c.PluginMode, before.PluginMode}, {c.KubeProxy, before.KubeProxy},
	} {
		if values[0] != values[1] && values[0] != "" && values[1] != "" {
			return false
		}
	}
	return true
}

// Network describes the network of a cluster: "flannel vxlan, kube-proxy nftables". It is empty if nothing is known.
func (c Cluster) Network() string {
	c.PluginVersion, c.Kubernetes = "", ""
	return c.String()
}

// String is Network with versions: "flannel v0.27.4 vxlan, kube-proxy nftables, Kubernetes v1.35.1".
func (c Cluster) String() string {
	parts := []string{strings.Join(strings.Fields(c.Plugin+" "+c.PluginVersion+" "+c.PluginMode), " ")}
	if c.KubeProxy != "" {
		parts = append(parts, "kube-proxy "+c.KubeProxy)
	}
	if c.Kubernetes != "" {
		parts = append(parts, "Kubernetes "+c.Kubernetes)
	}
	return strings.TrimPrefix(strings.Join(parts, ", "), ", ")
}

// Node is one node of the target.
type Node struct {
	Name   string `json:"name"`   // name of the node
	Boot   string `json:"boot"`   // boot id of its machine
	Kernel string `json:"kernel"` // release of the kernel
	Arch   string `json:"arch"`   // architecture of the machine
	// Distribution is PRETTY_NAME of /etc/os-release.
	Distribution string `json:"distribution"`
	CPUModel     string `json:"cpu_model"` // name of the CPU
	// CPUs online, as a list: 0-3,8.
	CPUs       string `json:"cpus"`
	Isolated   string `json:"isolated,omitempty"`        // CPUs that are isolated
	NodeCPUs   string `json:"node_cpus,omitempty"`       // CPUs given to a node of a lab
	IRQCPUs    string `json:"irq_cpus,omitempty"`        // CPUs that handle the NIC's interrupts
	MemoryByte uint64 `json:"memory_bytes" unit:"bytes"` // memory of the machine
	Governor   string `json:"governor,omitempty"`        // frequency governor of the CPUs
	Clock      string `json:"clocksource,omitempty"`     // clock source of the kernel
	Hypervisor bool   `json:"hypervisor"`                // whether it is a virtual machine
	// PhysicalHost is the host of a virtual machine when the run began, if the hypervisor tells the
	// guest, as Hyper-V and Azure do.
	PhysicalHost string `json:"physical_host,omitempty"`
	// InterruptSeconds is the time of an interrupt from one CPU to another,
	// there and back; 0 if it was not measured. Nodes on one machine have the same.
	InterruptSeconds float64 `json:"interrupt_seconds,omitempty" unit:"s"`
	// Held are the settings that other processes kept accelerated when the run began, and which process,
	// a phrase each. They apply to every variant.
	Held []string `json:"held,omitempty"`
	// Busy are the entries of Held that only one process can have, by the name of the accelerator, such as
	// fastpath.
	Busy map[string]string `json:"busy,omitempty"`
	// Sysctls are the sysctls that affect the result.
	Sysctls map[string]string `json:"sysctls,omitempty"`
	// Tools are the versions of tools by name.
	Tools map[string]string `json:"tools,omitempty"`
	Links []Link            `json:"links,omitempty"` // its network devices
	// Role of the node in a load balancer.
	Role  string `json:"role,omitempty"`
	Proxy string `json:"proxy,omitempty"` // proxy of a load balancer: "haproxy 2.6.12" or "builtin"
	// NICRate is the rate limit of a lab's NIC in each direction; absent if there is none.
	NICRate float64 `json:"nic_rate,omitempty" unit:"bit/s"`
	// Services are the services of a lab; absent if there are none.
	Services *Services `json:"services,omitempty"`
	// Policies are the network policies of a lab's pods on the node; nil if none.
	Policies *Policies `json:"policies,omitempty"`
	// KubeProxy is the mode of kube-proxy on a node of a cluster: iptables, nftables or ipvs; absent if it does not answer.
	KubeProxy string `json:"kube_proxy,omitempty"`
}

// Policies are the network policies of a node's pods.
type Policies struct {
	Mode  string `json:"mode"`  // what enforces the policies: iptables, ipset, nftables or ebpf
	Count int    `json:"count"` // policies, each of which selects every pod
	// LoadSeconds is how long it took to load all rules of the node.
	LoadSeconds float64 `json:"load_seconds" unit:"s"`
}

// Services describes how a node of a lab implements services.
type Services struct {
	Mode string `json:"mode"` // what chooses the backend of a connection: iptables, nftables or ebpf
	// Servers is the number of services that clients connect to.
	Servers  int `json:"servers"`
	Backends int `json:"backends"` // backends of each of those services
	Total    int `json:"total"`    // number of all services
	// OtherBackends is the number of backends of each of the other services.
	OtherBackends int `json:"other_backends,omitempty"`
	// LoadSeconds is how long it took to load all rules of the node, or, in mode ebpf,
	// the programs and maps of all nodes.
	LoadSeconds float64 `json:"load_seconds" unit:"s"`
}

// Link is a network device before the run.
type Link struct {
	Name string `json:"name"` // name of the device
	Kind string `json:"kind"` // kind of the device, as ip link has it
	// Class of the device: nic, overlay, host-veth, pod or empty.
	Class    string `json:"class,omitempty"`
	MTU      int    `json:"mtu"`       // largest packet
	RxQueues int    `json:"rx_queues"` // receive queues
	TxQueues int    `json:"tx_queues"` // transmit queues
	// Offloads that are on, by ethtool's names.
	Offloads []string `json:"offloads,omitempty"`
	// RPS are the RPS masks, one for each queue.
	RPS []string `json:"rps_cpus,omitempty"`
	RFS []string `json:"rps_flow_cnt,omitempty"` // RFS flow counts, one for each queue
	NIC *NIC     `json:"nic,omitempty"`          // driver and queues, if it has hardware
	// Speed of the link; absent if the driver does not report it.
	Speed float64 `json:"speed,omitempty" unit:"bit/s"`
}
