// Package v1alpha1 is the experiment file: its types, defaults and validation.
// It reads and checks; it plans and runs nothing (see internal/experiment).
package v1alpha1

import "cmp"

// Group version and kind that every experiment file carries.
const (
	APIVersion     = "slipstream.dev/v1alpha1"
	KindExperiment = "Experiment"
)

// Experiment is one comparison: variants × workloads × pairs, run in
// randomised complete blocks, or in periods where variants have a switch.
type Experiment struct {
	APIVersion string   `json:"apiVersion"` // version of this file's format
	Kind       string   `json:"kind"`       // what the file is
	Metadata   Metadata `json:"metadata"`   // names the experiment
	Spec       Spec     `json:"spec"`       // says what is compared
}

// Metadata names the experiment; the name starts that of the results folder
// and is a DNS label.
type Metadata struct {
	// Name of the experiment.
	Name string `json:"name"`
	// Description is for people; run --list shows the first line of a preset's.
	Description string `json:"description,omitempty"`
}

// Spec says what is compared, under which traffic, and how often.
type Spec struct {
	// Target is where the experiment runs.
	Target Target `json:"target"`
	// Path is the path of every variant that names none. Left out it is VXLAN in a lab, the
	// cluster's pod network in a cluster, and native between hosts.
	Path Path `json:"path,omitzero"`
	// Baseline is the variant the others are compared with.
	Baseline string `json:"baseline"`
	// Variants are what is compared.
	Variants []Variant `json:"variants"`
	// Workloads are the traffic that each variant is measured with.
	Workloads []Workload `json:"workloads"`
	// Pairs are the numbers of client-server pairs; a workload may have its own.
	Pairs []int `json:"pairs"`
	// Runs is the number of blocks, in each of which every variant runs once. auto adds
	// blocks until the 95 % interval of every ratio is no wider than ± width, at most max
	// of them. Where variants have a switch, a block is a period of each variant, the number
	// is even, and 6 if left out: every second block has the periods of the one before in
	// reverse order.
	Runs Runs `json:"runs"`
	// TrialsPerPeriod is how often each workload and number of pairs runs in a period. It is
	// for experiments whose variants have a switch.
	TrialsPerPeriod int `json:"trialsPerPeriod,omitempty"`
	// Margin is the equivalence margin of the ratio: 0.02 calls 0.98–1.02 the same.
	Margin float64 `json:"margin,omitempty"`
	// Seed orders the trials within each block. 0 draws one, which is recorded.
	Seed uint64 `json:"seed,omitempty"`
	// Expect is what has to come out, or the run fails.
	Expect []Expectation `json:"expect,omitempty"`
	// Published are figures that others have published. The report shows them beside ours.
	Published []Published `json:"published,omitempty"`
	// Series are what the report draws as lines over an axis, such as the number of backends.
	Series []Series `json:"series,omitempty"`
}

// Axes that a series can run over.
const (
	AxisBackends    = "backends"
	AxisRate        = "rate"
	AxisPrice       = "price"
	AxisSize        = "size"
	AxisConnections = "connections"
	AxisPairs       = "pairs"
)

// Series is a line of the report's figures over an axis: what was measured at several values
// of it. The values are those that the experiment has; none is written again.
type Series struct {
	// Name of the series in results.
	Name string `json:"name"`
	// Axis is what differs along the series: the backends of a service or balancer, the rate of
	// the NIC, or the price of all nodes, each from variant to variant; or the size of a message
	// or the connections, from workload to workload; or the pairs.
	Axis string `json:"axis"`
	// Of are the variants of the series, in any order. It is one variant if workloads or pairs
	// differ along the axis.
	Of []string `json:"of"`
	// Versus is a series over the same axis to compare with, value by value: the report says from
	// which value on this series is faster or slower than that one.
	Versus string `json:"versus,omitempty"`
}

// Expectation is a claim about one variant and another: exactly one of faster, notSlower
// and same is set, to the name of the other. It holds for every number of pairs.
type Expectation struct {
	// Variant is the one that the claim is about.
	Variant string `json:"variant"`
	// Faster than that variant, beyond doubt and by more than the margin allows to be the
	// same.
	Faster string `json:"faster,omitempty"`
	// NotSlower by more than the margin.
	NotSlower string `json:"notSlower,omitempty"`
	// Same within the margin.
	Same string `json:"same,omitempty"`
	// Metric is the name of one; left out it is each workload's primary one.
	Metric string `json:"metric,omitempty"`
	// Workload, left out, is every one that gives the metric.
	Workload string `json:"workload,omitempty"`
}

// Than is the variant that an expectation compares with.
func (x Expectation) Than() string { return cmp.Or(x.Faster, x.NotSlower, x.Same) }

// String is the expectation in words: "fastpath is faster than vxlan in throughput".
func (x Expectation) String() string {
	text := x.Variant
	switch {
	case x.Faster != "":
		text += " is faster than " + x.Faster
	case x.NotSlower != "":
		text += " is not slower than " + x.NotSlower
	default:
		text += " is the same as " + x.Same
	}
	if x.Metric != "" {
		text += " in " + x.Metric
	}
	if x.Workload != "" {
		text += " of " + x.Workload
	}
	return text
}

// Published is a figure that somebody else has published of one variant, workload and number
// of pairs: a value, a ratio, or a range of ratios, which is an interval alone.
type Published struct {
	// Source is who published it, and where.
	Source string `json:"source"`
	// Figure is where in the source it stands.
	Figure string `json:"figure"`
	// Variant that was measured.
	Variant string `json:"variant"`
	// Workload that it was measured with.
	Workload string `json:"workload"`
	// Pairs is the number that it was measured at. The experiment need not have it.
	Pairs int `json:"pairs"`
	// Metric is the name of one that the workload gives.
	Metric string `json:"metric"`
	// Value and its unit, as in the source. With a unit that no metric has it is shown, and not compared.
	Value Measure `json:"value,omitempty"`
	// Ratio of the variant to another one.
	Ratio float64 `json:"ratio,omitempty"`
	// Versus is the variant that the ratio is to; a value has none.
	Versus string `json:"versus,omitempty"`
	// Interval of the value, in its unit, or of the ratio: the lower end and the upper one.
	Interval []float64 `json:"interval,omitempty"`
	// Note is what a reader has to know of it.
	Note string `json:"note,omitempty"`
}

// IsRatio tells a ratio, or a range of them, from a value.
func (p Published) IsRatio() bool { return p.Value == "" }

// Target is where the experiment runs: exactly one field is set.
type Target struct {
	// Lab is nodes made of network namespaces on this machine.
	Lab *Lab `json:"lab,omitempty"`
	// Kubernetes is two nodes of a cluster.
	Kubernetes *Kubernetes `json:"kubernetes,omitempty"`
	// Hosts are Linux machines that slipstream reaches by SSH. The first has the clients and the second
	// the servers, unless a variant names its own.
	Hosts []Host `json:"hosts,omitempty"`
	// Imported is where other programs measured: slipstream import writes it, and nothing
	// can be run there.
	Imported *Imported `json:"imported,omitempty"`
}

// Imported says how the results of other programs came about. What they do not tell of
// their traffic and paths is left out, and has no defaults.
type Imported struct {
	// Interleaved tells that each block has every variant, measured close in time. Else the
	// blocks are runs of each variant by itself, which have nothing in common.
	Interleaved bool `json:"interleaved,omitempty"`
}

// Lab is a set of nodes made of network namespaces on this machine.
type Lab struct {
	// Nodes that the lab has.
	Nodes int `json:"nodes,omitempty"`
	// NIC is the profile of every node's network interface.
	NIC NIC `json:"nic,omitzero"`
	// CongestionControl of TCP. A tool that has no option for it gets it from its namespace, or from the
	// routes where the kernel does not let a namespace choose it.
	CongestionControl string `json:"congestionControl,omitempty"`
}

// Offload profiles of a lab NIC.
const (
	// OffloadFull lets a GSO packet cross the wire whole, as TSO, GRO and
	// tunnel offload of a good NIC do.
	OffloadFull = "full"
	// OffloadNone segments to MTU-size packets before the wire; the receiver
	// merges them by GRO.
	OffloadNone = "none"
)

// NIC is the profile of a lab node's network interface.
type NIC struct {
	// Offload is full if large packets cross the wire whole, as TSO, GRO and tunnel offload
	// of a good NIC let them; none if they are segmented before.
	Offload string `json:"offload,omitempty"`
	// MTU of the NIC.
	MTU int `json:"mtu,omitempty" unit:"bytes"`
	// Rate caps both directions, as an instance type does; empty is uncapped.
	Rate BitRate `json:"rate,omitempty"`
	// Price of a node with this NIC for an hour, where the profile stands for an
	// instance type. All of an experiment are in one currency.
	Price Price `json:"price,omitempty"`
}

// Kubernetes is a cluster: pods on two of its nodes, in namespaces of their own.
type Kubernetes struct {
	// ClientNode is the node of the clients. If it is left out, it is chosen among the nodes
	// that are ready and free of taints.
	ClientNode string `json:"clientNode,omitempty"`
	// ServerNode is the node of the servers, chosen likewise.
	ServerNode string `json:"serverNode,omitempty"`
	// NodeSelector are labels that a node must have to be chosen.
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`
	// Image of every pod, with this program at /slipstream. Without one the nodes
	// must have the release's image already: nothing is pulled from a place that
	// nobody named.
	Image string `json:"image,omitempty"`
	// Resources of every pod that makes traffic; without limits unless set.
	Resources Resources `json:"resources,omitzero"`
	// Unprivileged makes no pod with privileges: the nodes' CPUs are not sampled,
	// and neither accelerators nor the host network can be had.
	Unprivileged bool `json:"unprivileged,omitempty"`
}

// AddressNative is the name of the address that the path native uses.
const AddressNative = "native"

// Host is a Linux machine that slipstream reaches by SSH.
type Host struct {
	// Name of the host in results, and in the SSH configuration (~/.ssh/config), which has
	// what the fields below leave out.
	Name string `json:"name"`
	// Address that SSH connects to, a name or an IP address.
	Address string `json:"address,omitempty"`
	// User to log in as.
	User string `json:"user,omitempty"`
	// Port of the SSH server.
	Port int `json:"port,omitempty"`
	// IdentityFile is the private key to log in with. Those of the SSH agent are tried too.
	IdentityFile string `json:"identityFile,omitempty"`
	// Labels by which a variant selects its hosts.
	Labels map[string]string `json:"labels,omitempty"`
	// Price of the host for an hour. All of an experiment are in one currency.
	Price Price `json:"price,omitempty"`
	// Addresses are IP addresses of the host by name, such as that of an overlay that the host is
	// in already; the path address uses them. The one named native is that of the path native;
	// left out it is the address at which SSH reaches the host, as the host sees it.
	Addresses map[string]string `json:"addresses,omitempty"`
}

// Ends select the hosts of a variant's pairs by labels. The client is the first host that has its
// labels and leaves one for the server; the server is the first other host that has its own.
// Without labels any host will do.
type Ends struct {
	// Client are labels of the host of the clients.
	Client map[string]string `json:"client,omitempty"`
	// Server are labels of the host of the servers, another one.
	Server map[string]string `json:"server,omitempty"`
}

// Resources are both the request and the limit of a container.
type Resources struct {
	// CPU as Kubernetes writes it: "2", "1.5", "500m".
	CPU string `json:"cpu,omitempty"`
	// Memory: "256Mi".
	Memory string `json:"memory,omitempty"`
}

// Path is how packets get from pod to pod: exactly one field is set.
type Path struct {
	// Native is the host network: the traffic runs on the nodes themselves, or on the hosts.
	Native *Plain `json:"native,omitempty"`
	// VXLAN is the lab's overlay.
	VXLAN *VXLAN `json:"vxlan,omitempty"`
	// VXLANFlow has the tunnel's keys set for each packet by eBPF, as Open vSwitch
	// and Cilium's overlay do.
	VXLANFlow *Plain `json:"vxlan-flow,omitempty"`
	// UDP is an overlay in user space: a TUN device and a process that forwards.
	UDP *Plain `json:"udp,omitempty"`
	// Routed has no encapsulation, but routes by the other nodes' addresses.
	Routed *Plain `json:"routed,omitempty"`
	// EBPF is routed without the node's stack: packets are redirected.
	EBPF *Plain `json:"ebpf,omitempty"`
	// Bridge has both pods of a pair on one node, on its bridge: what pods cost
	// without a wire between them.
	Bridge *Plain `json:"bridge,omitempty"`
	// Pod is the network that a cluster gives its pods, by the server pod's IP.
	Pod *Plain `json:"pod,omitempty"`
	// Service is the way by a ClusterIP: of a cluster's own services, one a server
	// pod, or of those that a lab makes behind its VXLAN in the shape of flannel.
	Service *Service `json:"service,omitempty"`
	// Balancer is the way by a load balancer of a lab: from the clients' node by the
	// proxy's to those of the backends.
	Balancer *Balancer `json:"balancer,omitempty"`
	// Address is the path between further addresses of the hosts: their name in addresses.
	Address string `json:"address,omitempty"`
}

// Modes of a lab's services: who leads a connection to one of the backends.
const (
	// ServiceIPTables is the rules of kube-proxy's mode of that name: they are gone
	// through one by one until one of them, by chance, takes the connection.
	ServiceIPTables = "iptables"
	// ServiceNFTables is those of its mode nftables: one look-up in a map.
	ServiceNFTables = "nftables"
	// ServiceEBPF is eBPF programs where a socket connects, as Cilium has them: the
	// packets carry the backend's address from the first on.
	ServiceEBPF = "ebpf"
)

// Service is a way by services. In a cluster they are the cluster's, and all of this
// is empty.
type Service struct {
	// Mode is who leads a connection to a backend; a lab needs one.
	Mode string `json:"mode,omitempty"`
	// Backends of each service that a client connects to. Each has an
	// address of its own, and the pair's server answers at all of them. They are not
	// divided: with 4 pairs there are four times as many.
	Backends int `json:"backends,omitempty"`
	// Services that there are in all: one a pair, however few are asked
	// for, and as many more as it takes, with one backend each, to which nobody
	// connects.
	Services int `json:"services,omitempty"`
}

// Proxies of a balancer.
const (
	// ProxyHAProxy is HAProxy in its TCP mode.
	ProxyHAProxy = "haproxy"
	// ProxyBuiltin is one in this program, which has the kernel move the bytes
	// (splice).
	ProxyBuiltin = "builtin"
)

// MaxBackends of a balancer: a lab has 16 nodes, of which the client and the proxy
// have one each.
const MaxBackends = 14

// Balancer is a load balancer and what is at its sides, a node each: the client, the
// proxy, and the backends, among which the proxy takes turns with connections. The
// traffic runs on the nodes themselves, as on the path native.
type Balancer struct {
	// Backends that the proxy takes turns with.
	Backends int `json:"backends,omitempty"`
	// Proxy is HAProxy or one in this program. Left out it is HAProxy where that is installed,
	// and else the built-in one; the environment of a result says which it was.
	Proxy string `json:"proxy,omitempty"`
	// NICs of the nodes, where they differ from the variant's profile.
	NICs RoleNICs `json:"nics,omitzero"`
}

// Roles of a balancer's nodes.
const (
	RoleClient  = "client"
	RoleProxy   = "proxy"
	RoleBackend = "backend"
)

// RoleNICs are what the NICs of a balancer's nodes have of their own, by role.
type RoleNICs struct {
	// Client is the node of the clients.
	Client RoleNIC `json:"client,omitzero"`
	// Proxy is the node of the load balancer.
	Proxy RoleNIC `json:"proxy,omitzero"`
	// Backend is every node of a backend.
	Backend RoleNIC `json:"backend,omitzero"`
}

// RoleNIC is what the NICs of nodes in one role have of their own.
type RoleNIC struct {
	// Rate in place of the NIC profile's.
	Rate BitRate `json:"rate,omitempty"`
	// Price of each of the nodes for an hour, in place of the NIC profile's.
	Price Price `json:"price,omitempty"`
}

// Plain is a path without settings.
type Plain struct{}

// Shapes of a VXLAN overlay.
const (
	// ShapeFlannel is a bridge cni0 and one device flannel.1 a node.
	ShapeFlannel = "flannel"
	// ShapeCalico has no bridge: a /32 route a pod, proxy ARP, vxlan.calico.
	ShapeCalico = "calico"
)

// VXLAN is an overlay in the shape of a product.
type VXLAN struct {
	// Shape is flannel for a bridge on each node, calico for routes and no bridge.
	Shape string `json:"shape,omitempty"`
}

// Variant is a named combination of path, NIC profile and accelerators.
type Variant struct {
	// Name of the variant in results.
	Name string `json:"name"`
	// Path replaces spec.path.
	Path *Path `json:"path,omitempty"`
	// NIC replaces the lab's NIC profile; what it leaves out stays, and has no default.
	NIC *NIC `json:"nic,omitempty"`
	// Hosts are the ends of the variant's pairs; left out they are the first two hosts.
	Hosts *Ends `json:"hosts,omitempty"`
	// Accelerate is what is applied to nodes and pods while the variant runs.
	Accelerate []Accelerator `json:"accelerate,omitempty"`
	// On is the side whose nodes and pods are accelerated; left out it is both, and the node of a
	// proxy too.
	On string `json:"on,omitempty"`
	// Tools gives workloads, by name, a tool other than their own, so that a
	// tool can be compared with another as a variant.
	Tools map[string]string `json:"tools,omitempty"`
	// Versus is the variant to compare with in place of spec.baseline.
	Versus string `json:"versus,omitempty"`
	// Switch has commands that change what the variant runs on. Variants without it run on
	// what was found; those with the same switch share its periods.
	Switch *Switch `json:"switch,omitempty"`
}

// Switch is a change that is too expensive to be made for every trial, such as another
// instance type. A command is a program and its arguments, as a list; it runs where
// slipstream runs, as the same user and without a shell, and has succeeded if it exits
// with 0.
type Switch struct {
	// To is the command that changes what was found into what the variant needs. A
	// period begins with it, or with the command back of the variant before.
	To []string `json:"to"`
	// Back is the command that undoes the change. After a crash it runs even if the change
	// was made in part, or not at all.
	Back []string `json:"back"`
	// Verify is a command that checks whether the change is in force: it exits with 0 if it
	// is, with 1 if it is not. Without one slipstream trusts the exit codes of the others.
	Verify []string `json:"verify,omitempty"`
	// Settle is how long to wait before a period's first trial, until a machine is up, say.
	Settle Duration `json:"settle,omitempty"`
	// Timeout of each command, after which it is killed.
	Timeout Duration `json:"timeout,omitempty"`
}

// Accelerator is one change to nodes or pods: exactly one field is set.
//
// +kubebuilder:object:generate=true
type Accelerator struct {
	// RPS spreads received packets over CPUs.
	RPS *RPS `json:"rps,omitempty"`
	// RFS takes received packets to the CPU of the application.
	RFS *RFS `json:"rfs,omitempty"`
	// Fastpath is the eBPF fast path of VXLAN. It acts on nodes.
	Fastpath *Fastpath `json:"fastpath,omitempty"`
}

// Sides of a pair.
const (
	SideClient = "client"
	SideServer = "server"
)

// Classes of devices that an accelerator acts on.
const (
	// DeviceNIC is the device that the overlay's packets leave a node by.
	DeviceNIC = "nic"
	// DeviceOverlay is the VXLAN device.
	DeviceOverlay = "overlay"
	// DeviceHostVeth is the node's end of a pod's veth.
	DeviceHostVeth = "host-veth"
	// DevicePod is the pod's own end: the "+" of rps+ and rfs+.
	DevicePod = "pod"
)

// CPU sets by name; a list as in "0-3,8" is the alternative.
const (
	// CPUsAll is every CPU of the node that is online and not isolated.
	CPUsAll = "all"
	// CPUsAllButIRQ leaves out those that take the NIC's interrupts: the
	// RPS-7 of the paper, which had four CPUs.
	CPUsAllButIRQ = "all-but-irq"
)

// RPS is Receive Packet Steering: the kernel spreads received packets over
// CPUs by flow hash (Documentation/networking/scaling.rst).
//
// +kubebuilder:object:generate=true
type RPS struct {
	// Devices are the classes of devices whose receive queues are steered.
	Devices []string `json:"devices"`
	// CPUs that packets are spread over: all, all-but-irq (those that do not take the NIC's
	// interrupts) or a list such as 0-3,8.
	CPUs string `json:"cpus"`
}

// RFS is Receive Flow Steering: the kernel takes a flow's packets to the CPU
// that last read from its socket.
//
// +kubebuilder:object:generate=true
type RFS struct {
	// Devices are the classes of devices whose receive queues are steered.
	Devices []string `json:"devices"`
	// CPUs of an RPS mask beside it, for flows that RFS does not know yet.
	// Empty sets no mask: such flows stay where the interrupt put them.
	CPUs string `json:"cpus,omitempty"`
	// Entries of the machine's socket flow table, a power of two.
	Entries int `json:"entries,omitempty"`
}

// Fastpath lets packets of established connections over a VXLAN overlay past the
// node's bridge, routing and netfilter by eBPF.
//
// +kubebuilder:object:generate=true
type Fastpath struct {
	// UnseenBy are kinds of observers, shapers and filters that packets may bypass.
	// The fast path skips devices that have one of another kind.
	//
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=5
	// +kubebuilder:validation:items:Enum=tcx;tc;queue;nftables-netdev;conntrack-accounting
	UnseenBy []string `json:"unseenBy,omitempty"`
}

// What packets of the fast path may be unseen by.
const (
	// UnseenByTCX are eBPF programs of tcx, at a VXLAN device, a bridge or the egress of a
	// node's end of a veth.
	UnseenByTCX = "tcx"
	// UnseenByTC are filters of tc (clsact, ingress), eBPF programs among them.
	UnseenByTC = "tc"
	// UnseenByQueue are queueing disciplines, such as those that limit a rate.
	UnseenByQueue = "queue"
	// UnseenByNetdev are chains of nftables at the ingress or egress of a device.
	UnseenByNetdev = "nftables-netdev"
	// UnseenByAccounting are conntrack's counters of each connection
	// (net.netfilter.nf_conntrack_acct).
	UnseenByAccounting = "conntrack-accounting"
)

// Tools that a workload can be driven with.
const (
	ToolNative   = "native"
	ToolIperf3   = "iperf3"
	ToolSockperf = "sockperf"
	ToolQperf    = "qperf"
	ToolAB       = "ab"
	ToolLatte    = "latte"
	// ToolRedis is redis-server, asked by redis-benchmark.
	ToolRedis = "redis"
	// ToolNginx is nginx, asked by wrk.
	ToolNginx  = "nginx"
	ToolIperf2 = "iperf2"
)

// How programs read and write.
const (
	// IOBlocking has a thread for each connection, which blocks until there is something to read,
	// or room to write.
	IOBlocking = "blocking"
	// IOEpoll has an event loop for all connections of an end: one thread waits for all of them.
	IOEpoll = "epoll"
)

// Operations of applications.
const (
	OperationGet = "get"
	OperationSet = "set"
)

// Workload is the traffic: exactly one of its kinds is set.
type Workload struct {
	// Name of the workload in results.
	Name string `json:"name"`
	// Stream sends as much as it can one way.
	Stream *Traffic `json:"stream,omitempty"`
	// PingPong sends one message and waits for it to come back.
	PingPong *Traffic `json:"pingpong,omitempty"`
	// UnderLoad sends at a set rate, whatever comes back, and takes the latency of
	// the replies from when their messages were due.
	UnderLoad *Traffic `json:"underload,omitempty"`
	// Connect opens a connection, exchanges one message each way, and closes.
	Connect *Traffic `json:"connect,omitempty"`
	// HTTP asks for an object over and over, or loads a page for each of its users.
	HTTP *Traffic `json:"http,omitempty"`
	// Application has an application's own client ask its server, both of which are other programs.
	Application *Traffic `json:"application,omitempty"`
	// Pairs replaces spec.pairs for this workload.
	Pairs []int `json:"pairs,omitempty"`
}

// Traffic are the settings of a workload, the same for every kind.
type Traffic struct {
	// Protocol of the traffic; connect, http and applications have tcp alone.
	Protocol string `json:"protocol,omitempty"`
	// IP is the version.
	IP int `json:"ip,omitempty"`
	// Size of a message; of an application, of a value; of http, of the object, or of a page's script. Left out it is
	// 128KiB for a stream (1400 over UDP), 200k for a page, and else 64. The tool and the
	// protocol may allow less than the range.
	Size Bytes `json:"size,omitempty"`
	// Connections a pair; of connect and http, at a time.
	Connections int `json:"connections,omitempty"`
	// Rate in messages a second and connection, for underload; 0 is as fast
	// as it goes. For a page, users a second and pair.
	Rate int `json:"rate,omitempty" unit:"1/s"`
	// KeepAlive has http ask over the same connection again; else each request makes
	// one of its own.
	KeepAlive bool `json:"keepAlive,omitempty"`
	// Requests of http, a pair: the window ends when they are done, and duration is the
	// longest it may take. 0 is as many as there are in the window.
	Requests int `json:"requests,omitempty"`
	// Page has users load a page, index, script and styles, compressed, over a
	// connection each. They arrive at the rate, whatever becomes of those before them.
	Page bool `json:"page,omitempty"`
	// Image is the size of an image in the page, which is sent uncompressed; left out there is none.
	Image Bytes `json:"image,omitempty"`
	// Busy has the sender of underload poll the clock between messages, as sockperf
	// does, where it would sleep else: its CPU is always awake, and has no time for
	// anybody else.
	Busy bool `json:"busy,omitempty"`
	// IO is how the traffic engine reads and writes, at both ends. blocking: a thread for each
	// connection waits in recv and send, as in iperf 2, Apache or PostgreSQL. epoll: one thread
	// waits for all connections of an end and never blocks in a call, as in iperf3 before 3.16,
	// Redis or, with such a thread for each CPU, nginx and this http. Left out it is epoll for
	// http, else blocking. Another tool has its own way, and connect and the users of a page
	// have one each.
	IO string `json:"io,omitempty"`
	// Operation that an application is asked for: of redis get or set.
	Operation string `json:"operation,omitempty"`
	// Pipeline is how many requests an application's client has under way on a connection at a time; left
	// out it is 1.
	Pipeline int `json:"pipeline,omitempty"`
	// Warmup runs before the measured window: 1s for a stream, else 500ms.
	Warmup Duration `json:"warmup,omitempty"`
	// Duration is the length of the measured window.
	Duration Duration `json:"duration"`
	// Tool that makes the traffic. Not every one can make every kind.
	Tool string `json:"tool,omitempty"`
}
