// Package spec defines the experiment file: types, defaults and validation. It also reads policy files, which share the
// parser and the accelerators. It reads and checks; internal/experiment plans and runs.
package spec

import (
	"cmp"

	"slipstream.dev/api/v1alpha1"
)

// KindExperiment is the kind that every experiment file carries, with v1alpha1.APIVersion.
const KindExperiment = "Experiment"

// Experiment is one comparison: variants × workloads × pairs, run in
// randomised complete blocks, or in periods if variants have a switch.
type Experiment struct {
	APIVersion string   `json:"apiVersion"` // version of this file's format
	Kind       string   `json:"kind"`       // what the file is
	Metadata   Metadata `json:"metadata"`   // names the experiment
	Spec       Spec     `json:"spec"`       // says what is compared
}

// Metadata names the experiment.
type Metadata struct {
	// Name of the experiment. The name of the results folder begins with it.
	Name string `json:"name"`
	// Description is a text for people; run --list shows the first line of a preset's.
	Description string `json:"description,omitempty"`
}

// Spec says what is compared, under which traffic, and how often.
type Spec struct {
	// Target is where the experiment runs.
	Target Target `json:"target"`
	// Path is the path of every variant that names none. The default is VXLAN in a lab, the
	// cluster's pod network in a cluster, and native between hosts.
	Path Path `json:"path,omitzero"`
	// Baseline is the variant that the others are compared with.
	Baseline string `json:"baseline"`
	// Variants are the combinations to compare.
	Variants []Variant `json:"variants"`
	// Workloads are the kinds of traffic that each variant is measured with.
	Workloads []Workload `json:"workloads"`
	// Pairs are the numbers of client-server pairs to measure with; a workload may have its own. With a
	// mesh there are none.
	Pairs []int `json:"pairs,omitempty"`
	// Mesh measures every node against every other one, in both directions, in place of pairs. It runs in
	// rounds, each of which is a trial: no node is in two pairs of a round.
	Mesh *Mesh `json:"mesh,omitempty"`
	// Runs is the number of blocks; each runs every variant once. auto adds
	// blocks until the 95% interval of every ratio is at most ± width wide, up to max
	// blocks. If variants have a switch, a block is one period of each variant, the number must
	// be even, and the default is 6: every second block has the periods of the one before in
	// reverse order.
	Runs Runs `json:"runs"`
	// TrialsPerPeriod is how often each workload and number of pairs runs in a period. Only for
	// experiments whose variants have a switch.
	TrialsPerPeriod int `json:"trialsPerPeriod,omitempty"`
	// Margin is the equivalence margin of the ratio: with 0.02, ratios from 1/1.02 to 1.02 are the same.
	Margin float64 `json:"margin,omitempty"`
	// Precision is how wide a measured interval may be and still agree with a published figure: its upper end is at
	// most this many times the lower one. Only with published figures.
	Precision float64 `json:"precision,omitempty"`
	// Seed is the seed of the random order of trials. With 0 the run draws one, and records it.
	Seed uint64 `json:"seed,omitempty"`
	// Expect are claims that the result must meet, or the run fails.
	Expect []Expectation `json:"expect,omitempty"`
	// Published are published figures. The report compares them with the measured ones.
	Published []Published `json:"published,omitempty"`
	// Series are lines that the report draws over an axis, such as the number of backends.
	Series []Series `json:"series,omitempty"`
	// Parameters are names and values that commands of switches refer to in braces: {group}. A run needs a value for each.
	// {client} and {server} are the names of a variant's hosts.
	Parameters map[string]string `json:"parameters,omitempty"`
}

// Mesh measures every node against every other one.
type Mesh struct {
	// Margin is how much worse than the others a node or link must be for the report to name it: 0.1 is 10%.
	Margin float64 `json:"margin,omitempty"`
}

// Axes that a series can run over.
const (
	AxisBackends    = "backends"
	AxisPolicies    = "policies"
	AxisRate        = "rate"
	AxisPrice       = "price"
	AxisSize        = "size"
	AxisConnections = "connections"
	AxisPairs       = "pairs"
)

// Series is a line in the report's figures: measurements at several values of an axis. The values come
// from the variants and workloads.
type Series struct {
	// Name of the series in results.
	Name string `json:"name"`
	// Axis is the quantity that differs along the series. backends (of a service or balancer),
	// policies, rate (of the NIC) and price (of all nodes) differ between variants; size (of a message) and
	// connections between workloads; pairs is the number of pairs.
	Axis string `json:"axis"`
	// Of are the variants of the series, in any order: a single one if workloads or pairs
	// differ along the axis.
	Of []string `json:"of"`
	// Versus is a series over the same axis to compare with, value by value. The report says from
	// which value on this series is faster or slower than that one.
	Versus string `json:"versus,omitempty"`
}

// Expectation is a claim that compares a variant with another one. Exactly one of faster, notSlower
// and same is set, to the name of the other variant. The claim is about every number of pairs.
type Expectation struct {
	// Variant is the variant that the claim is about.
	Variant string `json:"variant"`
	// Faster is the variant that this one must be proven faster than.
	Faster string `json:"faster,omitempty"`
	// NotSlower is the variant that this one must not be slower than by more than the margin. The result must prove it.
	NotSlower string `json:"notSlower,omitempty"`
	// Same is the variant from which it must differ by less than the margin.
	Same string `json:"same,omitempty"`
	// Metric is the metric to compare. The default is each workload's primary metric.
	Metric string `json:"metric,omitempty"`
	// Workload is the workload to compare. The default is every workload that has the metric.
	Workload string `json:"workload,omitempty"`
}

// Than returns the name of the variant that an expectation compares with.
func (x Expectation) Than() string { return cmp.Or(x.Faster, x.NotSlower, x.Same) }

// String returns the expectation in words: "fastpath is faster than vxlan in throughput".
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

// Published is a published figure for one variant, workload and number of pairs: a value, a ratio,
// a range of ratios (an interval without a ratio), or the shares of cores.
type Published struct {
	// Source is who published it, and where.
	Source string `json:"source"`
	// Figure is where in the source to find it.
	Figure string `json:"figure"`
	// Variant is the variant that was measured.
	Variant string `json:"variant"`
	// Workload is the workload that it was measured with.
	Workload string `json:"workload"`
	// Pairs is the number of pairs. The experiment need not measure with the same number.
	Pairs int `json:"pairs"`
	// Metric is a metric of the workload; with cores, softirq or idle.
	Metric string `json:"metric"`
	// Value is the value with its unit, as in the source: that of the metric, or a multiple of it. Bytes per
	// second are converted to bit/s.
	Value Measure `json:"value,omitempty"`
	// OneWay marks a latency that the source gives for one way, as qperf and sockperf print it. It is half of a round
	// trip, and the report compares twice the value. Only with a value.
	OneWay bool `json:"oneWay,omitempty"`
	// Ratio is the ratio of the variant to versus.
	Ratio float64 `json:"ratio,omitempty"`
	// Versus is the variant that the ratio is relative to. Not with a value.
	Versus string `json:"versus,omitempty"`
	// Interval of the value, in its unit, or of the ratio: the lower end, then the upper. A range of ratios from 0 is
	// a bound: the source says only that the ratio is below the upper end.
	Interval []float64 `json:"interval,omitempty"`
	// Cores are shares of the time of the server's cores, in %, from core 0 on, as mpstat prints them. The report marks
	// them in its figure of the cores, and does not compare them: cores of two machines share only their number.
	Cores []float64 `json:"cores,omitempty" unit:"%"`
	// Note is a remark for the reader of the report.
	Note string `json:"note,omitempty"`
}

// Metrics of the cores of a published figure.
const (
	CoreSoftirq = "softirq"
	CoreIdle    = "idle"
)

// IsRatio reports whether the figure is a ratio or a range of ratios, rather than a value.
func (p Published) IsRatio() bool { return p.Value == "" }

// Target is where the experiment runs: exactly one field is set.
type Target struct {
	// Lab is a set of nodes made of network namespaces on this machine.
	Lab *Lab `json:"lab,omitempty"`
	// Kubernetes is a cluster, or several; the experiment runs on two or more nodes of each.
	Kubernetes *Kubernetes `json:"kubernetes,omitempty"`
	// Hosts are machines, with Linux or Windows, that slipstream reaches by SSH. The clients run on the
	// first and the servers on the second, unless a variant selects its own.
	Hosts []Host `json:"hosts,omitempty"`
	// Imported marks results of other programs. slipstream import writes it; such an experiment
	// cannot be run.
	Imported *Imported `json:"imported,omitempty"`
}

// Imported says how other programs measured. What their output does not say about traffic and paths
// is left out, and has no defaults.
type Imported struct {
	// Interleaved is true if each block has every variant, measured close in time. Otherwise each
	// variant was measured by itself.
	Interleaved bool `json:"interleaved,omitempty"`
}

// Lab is a set of nodes made of network namespaces on this machine.
type Lab struct {
	// Nodes is the number of nodes.
	Nodes int `json:"nodes,omitempty"`
	// NIC is the profile of every node's network interface.
	NIC NIC `json:"nic,omitzero"`
	// CongestionControl is the congestion control of TCP. For a tool without an option for it, slipstream sets it in the network
	// namespace, or, if the kernel does not allow that, on the routes.
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
	// Offload says how large packets cross the wire. With full they cross it whole, as with TSO, GRO and
	// tunnel offload of a good NIC; with none they are segmented before it.
	Offload string `json:"offload,omitempty"`
	// MTU of the NIC.
	MTU int `json:"mtu,omitempty" unit:"bytes"`
	// Rate limits each direction, as an instance type does. The default is no limit.
	Rate BitRate `json:"rate,omitempty"`
	// Price of a node with this NIC per hour, if the profile stands for an
	// instance type. All prices of an experiment must be in one currency.
	Price Price `json:"price,omitempty"`
}

// Kubernetes is a cluster: pods on two or more of its nodes, in namespaces of their own. With clusters there are several, and
// the other fields are for each of them.
type Kubernetes struct {
	// Clusters are the clusters of an experiment that compares several: each variant runs in one of them. By default
	// they are those that variants name, and each name is a context of the kubeconfig.
	Clusters []Cluster `json:"clusters,omitempty"`
	// ClientNode is the node of the clients, whose taints the pods tolerate. By default slipstream chooses a node that is
	// Ready and has no taints.
	ClientNode string `json:"clientNode,omitempty"`
	// ServerNode is the node of the servers. By default slipstream chooses another such node.
	ServerNode string `json:"serverNode,omitempty"`
	// NodeSelector are labels that a node must have to be chosen.
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`
	// ClientSelector are labels that a node of clients must also have, such as those of a zone or pool.
	ClientSelector map[string]string `json:"clientSelector,omitempty"`
	// ServerSelector are labels that a node of servers must also have.
	ServerSelector map[string]string `json:"serverSelector,omitempty"`
	// Nodes is the number of nodes to choose, half of them for clients; pairs are spread over them. The
	// default is 2, and in a mesh all that are Ready and have no taints; if these are more than 128, it is an error.
	Nodes int `json:"nodes,omitempty"`
	// NodeNames are the nodes, alternately for clients and for servers. By default slipstream chooses
	// them; the results have the names of those.
	NodeNames []string `json:"nodeNames,omitempty"`
	// Image is the image of every pod, with this program at /slipstream, or slipstream.exe for Windows. The default is the
	// image of this version if a release has published it or all nodes have it, and otherwise that of baseImage.
	Image string `json:"image,omitempty"`
	// BaseImage is an image without this program, from which every pod starts: the run copies the program into the pods. It needs
	// /bin/sh, sleep, head, gzip and sha256sum. The default is docker.io/library/busybox:1.37 where there is no image with the program.
	BaseImage string `json:"baseImage,omitempty"`
	// Resources of every pod, those on the nodes too. The default is no limits.
	Resources Resources `json:"resources,omitzero"`
	// Observe are DaemonSets, such as kube-system/cilium, whose pods' use of CPUs and memory is measured on every node of the
	// experiment while each trial runs.
	Observe []string `json:"observe,omitempty"`
	// Unprivileged creates no privileged pods: then there are no samples of the nodes' CPUs or of DaemonSets,
	// no accelerators and no host network.
	Unprivileged bool `json:"unprivileged,omitempty"`
}

// Cluster is one of several clusters that an experiment compares.
type Cluster struct {
	// Name of the cluster in variants and results.
	Name string `json:"name"`
	// Context of the kubeconfig. The default is the name of the cluster.
	Context string `json:"context,omitempty"`
	// Kubeconfig is the file that has the context. The default is that of --kubeconfig.
	Kubeconfig string `json:"kubeconfig,omitempty"`
	// NodeNames are the nodes in this cluster, alternately for clients and for servers. By default slipstream chooses
	// them; the results have the names of those.
	NodeNames []string `json:"nodeNames,omitempty"`
	// BaseImage replaces spec.target.kubernetes.baseImage in this cluster. The results have the one that slipstream chose.
	BaseImage string `json:"baseImage,omitempty"`
	// Observe are DaemonSets to measure in this cluster, in addition to those of spec.target.kubernetes.observe, which every cluster has.
	Observe []string `json:"observe,omitempty"`
}

// AddressNative is the name of the address that the path native uses.
const AddressNative = "native"

// Host is a machine, with Linux or Windows, that slipstream reaches by SSH.
type Host struct {
	// Name of the host in results, and in the SSH configuration (~/.ssh/config), from which
	// slipstream takes the fields below that are left out.
	Name string `json:"name"`
	// Address that SSH connects to, a name or an IP address.
	Address string `json:"address,omitempty"`
	// User to log in as.
	User string `json:"user,omitempty"`
	// Port of the SSH server.
	Port int `json:"port,omitempty"`
	// IdentityFile is the private key to log in with. slipstream also tries those of the SSH agent.
	IdentityFile string `json:"identityFile,omitempty"`
	// Labels by which a variant selects its hosts.
	Labels map[string]string `json:"labels,omitempty"`
	// Price of the host per hour. All prices of an experiment must be in one currency.
	Price Price `json:"price,omitempty"`
	// Addresses are named IP addresses of the host, for example in an existing overlay. The path
	// address refers to them by name. The path native uses the one named native; by default that is
	// the address at which SSH reaches the host, as the host sees it.
	Addresses map[string]string `json:"addresses,omitempty"`
}

// Ends select the hosts or nodes of a variant's pairs by labels: the first two that have the labels of
// the client and of the server. Without labels any matches.
type Ends struct {
	// Client are labels of the clients' host or node.
	Client map[string]string `json:"client,omitempty"`
	// Server are labels of the servers' host or node, which must be another one.
	Server map[string]string `json:"server,omitempty"`
}

// Resources are both the request and the limit of a container.
type Resources struct {
	// CPU as Kubernetes writes it: "2", "1.5", "500m".
	CPU string `json:"cpu,omitempty"`
	// Memory as Kubernetes writes it: "256Mi".
	Memory string `json:"memory,omitempty"`
}

// Path is how packets get from pod to pod: exactly one field is set beside local and policies.
type Path struct {
	// Native is the host network: the traffic runs on the nodes themselves, or on the hosts.
	Native *Plain `json:"native,omitempty"`
	// VXLAN is a VXLAN overlay of the lab.
	VXLAN *VXLAN `json:"vxlan,omitempty"`
	// VXLANFlow is VXLAN whose tunnel key eBPF sets for each packet, as in Open vSwitch
	// and Cilium's overlay.
	VXLANFlow *Plain `json:"vxlan-flow,omitempty"`
	// UDP is an overlay in user space: a process on each node forwards packets over UDP.
	UDP *UDP `json:"udp,omitempty"`
	// Routed is a network without encapsulation: nodes have routes via each other's addresses.
	Routed *Plain `json:"routed,omitempty"`
	// EBPF is routed, but eBPF redirects packets past the node's stack.
	EBPF *Plain `json:"ebpf,omitempty"`
	// Bridge puts both pods of a pair on one node, connected by its bridge. It shows what pods cost without a wire between
	// them.
	Bridge *Plain `json:"bridge,omitempty"`
	// Pod is the pod network of a cluster: clients connect to the server pod's IP.
	Pod *Plain `json:"pod,omitempty"`
	// Service is a path through a ClusterIP. In a cluster each server pod gets a service of the
	// cluster; in a lab slipstream implements services over VXLAN as flannel configures it.
	Service *Service `json:"service,omitempty"`
	// Balancer is a path through a load balancer of a lab: from the clients' node via the
	// proxy's to those of the backends.
	Balancer *Balancer `json:"balancer,omitempty"`
	// Address is a path between named addresses of the hosts: a name in their addresses.
	Address string `json:"address,omitempty"`
	// Local puts both pods of a pair on one node, on the paths vxlan, routed, ebpf and service of a lab: the network is that of
	// the path, but no packet leaves the node. On the path bridge they are on one node anyway.
	Local bool `json:"local,omitempty"`
	// Policies are network policies of a lab's pods, on the paths vxlan, routed, ebpf, bridge and service.
	Policies *Policies `json:"policies,omitempty"`
}

// Modes of network policies. They differ in how they store the rules and the addresses that each policy allows.
const (
	// PolicyIPTables uses a chain for each pod and policy, like Calico's iptables data plane, and in it a rule for each
	// address.
	PolicyIPTables = "iptables"
	// PolicyIPSet replaces these rules with a set of addresses for each policy, like Calico and kube-router.
	PolicyIPSet = "ipset"
	// PolicyNFTables uses the same chains and sets in nftables, and a map from addresses to the chains of pods, like Calico's
	// nftables data plane.
	PolicyNFTables = "nftables"
	// PolicyEBPF uses eBPF programs. They look up the identity of an address, and then its entry in one map of all policies,
	// like Cilium.
	PolicyEBPF = "ebpf"
)

// Policies are network policies for packets to the pods of a lab. Each selects every pod. The last one
// allows all pods of the lab; the others allow ten addresses each, which nobody has. So a new
// connection between pods meets all policies, and one from anybody else is dropped. Packets of
// established connections are accepted before the policies.
type Policies struct {
	// Count of the policies.
	Count int `json:"count"`
	// Mode is what enforces the policies. The path ebpf, whose packets bypass netfilter, needs ebpf.
	Mode string `json:"mode"`
}

// Modes of a lab's services: what chooses the backend of a connection.
const (
	// ServiceIPTables uses the rules of kube-proxy's mode iptables: netfilter tries them one by one until one of them matches
	// at random.
	ServiceIPTables = "iptables"
	// ServiceNFTables uses the rules of kube-proxy's mode nftables: one lookup in a map.
	ServiceNFTables = "nftables"
	// ServiceEBPF uses eBPF programs at connect, like Cilium: packets have the backend's address from the first on.
	ServiceEBPF = "ebpf"
)

// Service is a path through services. In a cluster, whose services these are, it has backends alone.
type Service struct {
	// Mode is what chooses the backend of a connection. A lab needs one.
	Mode string `json:"mode,omitempty"`
	// Backends is the number of backends of each service that a client connects to. Each backend has
	// an address of its own, and the pair's server answers at all of them. Pairs do not share
	// backends: 4 pairs have four times as many. In a cluster, they are ports of the pair's server pod, and more than
	// one is for http by native (io: epoll) and ab.
	Backends int `json:"backends,omitempty"`
	// Services is the total number of services. There is at least one per pair; no client
	// connects to the others.
	Services int `json:"services,omitempty"`
	// OtherBackends is the number of backends of each service that no client connects to.
	OtherBackends int `json:"otherBackends,omitempty"`
	// EndpointChanges is how many backends are replaced while traffic flows, of all services in
	// turn. Except in mode ebpf, the lab loads rules in batches with a second between them, as kube-proxy
	// does.
	EndpointChanges int `json:"endpointChanges,omitempty" unit:"1/s"`
}

// Proxies of a balancer.
const (
	// ProxyHAProxy is HAProxy in its TCP mode.
	ProxyHAProxy = "haproxy"
	// ProxyBuiltin is a proxy in this program, which lets the kernel move the bytes
	// (splice).
	ProxyBuiltin = "builtin"
)

// MaxBackends is the maximum number of backends of a balancer: a lab has 16 nodes, and the client and the proxy need one each.
const MaxBackends = 14

// Balancer is a client, a proxy and backends, each on a node of its own. The proxy distributes
// connections over the backends round-robin. The traffic runs on the nodes themselves, as on the path
// native.
type Balancer struct {
	// Backends is the number of backends.
	Backends int `json:"backends,omitempty"`
	// Proxy is HAProxy or the proxy in this program. The default is HAProxy if it is installed,
	// otherwise the built-in one; the environment of a result says which it was.
	Proxy string `json:"proxy,omitempty"`
	// NICs of the nodes, if they differ from the variant's profile.
	NICs RoleNICs `json:"nics,omitzero"`
}

// Roles of a balancer's nodes.
const (
	RoleClient  = "client"
	RoleProxy   = "proxy"
	RoleBackend = "backend"
)

// RoleNICs override the NIC profile of a balancer's nodes by role.
type RoleNICs struct {
	// Client is for the node of the clients.
	Client RoleNIC `json:"client,omitzero"`
	// Proxy is for the node of the proxy.
	Proxy RoleNIC `json:"proxy,omitzero"`
	// Backend is for each node of a backend.
	Backend RoleNIC `json:"backend,omitzero"`
}

// RoleNIC overrides the NIC profile of nodes with one role.
type RoleNIC struct {
	// Rate replaces the rate of the NIC profile.
	Rate BitRate `json:"rate,omitempty"`
	// Price of each of the nodes per hour; replaces that of the NIC profile.
	Price Price `json:"price,omitempty"`
}

// Plain is a path without settings.
type Plain struct{}

// Shapes of a VXLAN overlay.
const (
	// ShapeFlannel is a bridge cni0 and one device flannel.1 per node.
	ShapeFlannel = "flannel"
	// ShapeCalico has no bridge: a /32 route per pod, proxy ARP, vxlan.calico.
	ShapeCalico = "calico"
)

// VXLAN is an overlay as a CNI configures it.
type VXLAN struct {
	// Shape selects the CNI: flannel has a bridge on each node, calico has routes and no bridge.
	Shape string `json:"shape,omitempty"`
}

// ShapeWeave is a user-space overlay that carries Ethernet frames.
const ShapeWeave = "weave"

// UDP is an overlay in user space as a product has it.
type UDP struct {
	// Shape selects the product. With flannel, packets pass a TUN device, and each travels alone. With weave, without its
	// fast data path, a packet socket captures frames of the pods' bridge, and those that fit share a datagram.
	Shape string `json:"shape,omitempty"`
}

// Variant is a named combination of path, NIC profile and accelerators.
type Variant struct {
	// Name of the variant in results.
	Name string `json:"name"`
	// Path replaces spec.path.
	Path *Path `json:"path,omitempty"`
	// Cluster is the name of the cluster in which the variant runs, if the experiment compares several.
	Cluster string `json:"cluster,omitempty"`
	// NIC overrides fields of the lab's NIC profile.
	NIC *NIC `json:"nic,omitempty"`
	// Hosts selects the hosts of the variant's pairs, or the nodes of a cluster: two for each different selection, which
	// no other one shares. The default is the first two.
	Hosts *Ends `json:"hosts,omitempty"`
	// Accelerate are accelerators to apply to nodes and pods while the variant runs.
	Accelerate []v1alpha1.Accelerator `json:"accelerate,omitempty"`
	// On limits the accelerators to the nodes and pods of one side. The default is both sides, and the
	// node of a proxy.
	On string `json:"on,omitempty"`
	// Tools replace the tools of workloads, by their names, so that tools can be compared as
	// variants.
	Tools map[string]string `json:"tools,omitempty"`
	// Versus is the variant to compare with in place of spec.baseline.
	Versus string `json:"versus,omitempty"`
	// Switch has commands that change the machines for the variant. A variant without it runs in the
	// original state; variants with the same switch share its periods.
	Switch *Switch `json:"switch,omitempty"`
}

// Switch is a change that takes too long to be made for every trial, such as another
// instance type. Each command is a program and its arguments, as a list. It runs on the machine
// where slipstream runs, as the same user and without a shell, and has succeeded if it exits
// with 0.
type Switch struct {
	// To is the command that makes the change. A period begins with it, or with back of
	// another variant.
	To []string `json:"to"`
	// Back is the command that undoes the change. After a crash it runs even if the change
	// was made in part, or not at all.
	Back []string `json:"back"`
	// Verify is a command that checks whether the change is in force: it exits with 0 if it
	// is, with 1 if it is not. Without it slipstream trusts the exit codes of the others.
	Verify []string `json:"verify,omitempty"`
	// Settle is how long to wait before a period's first trial, for example until a machine is up.
	Settle Duration `json:"settle,omitempty"`
	// Timeout of each command, after which it is killed.
	Timeout Duration `json:"timeout,omitempty"`
}

// Sides of a pair.
const (
	SideClient = "client"
	SideServer = "server"
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
	ToolNginx = "nginx"
	// ToolPostgres is a PostgreSQL server, asked by pgbench.
	ToolPostgres = "postgres"
	// ToolMemcached is memcached, asked by memcaslap.
	ToolMemcached = "memcached"
	// ToolGRPC is a service of the traffic engine on grpc-go, asked by its own client.
	ToolGRPC   = "grpc"
	ToolIperf2 = "iperf2"
)

// Ways in which programs read and write.
const (
	// IOBlocking uses a thread for each connection. It blocks until there is something to read, or room to write.
	IOBlocking = "blocking"
	// IOEpoll uses an event loop at each end: one thread waits for all connections.
	IOEpoll = "epoll"
)

// Operations of applications.
const (
	OperationGet = "get"
	OperationSet = "set"
	// OperationSelect reads one row, OperationTPCB changes some within a transaction: pgbench's select-only
	// and tpcb-like.
	OperationSelect = "select"
	OperationTPCB   = "tpcb"
	// OperationUnary is a call with one message each way.
	OperationUnary = "unary"
)

// Workload is the traffic: exactly one of its kinds is set.
type Workload struct {
	// Name of the workload in results.
	Name string `json:"name"`
	// Stream sends in one direction, as fast as it can.
	Stream *Traffic `json:"stream,omitempty"`
	// PingPong sends one message and waits for the reply, over and over.
	PingPong *Traffic `json:"pingpong,omitempty"`
	// UnderLoad sends at a fixed rate without waiting for replies. It counts latency from the time
	// at which a message was due.
	UnderLoad *Traffic `json:"underload,omitempty"`
	// Connect opens a connection, exchanges one message each way, and closes it.
	Connect *Traffic `json:"connect,omitempty"`
	// HTTP requests an object over and over, or has users that load a page.
	HTTP *Traffic `json:"http,omitempty"`
	// Application runs a real server and its own benchmark client, or a gRPC service of slipstream.
	Application *Traffic `json:"application,omitempty"`
	// Pairs replaces spec.pairs for this workload.
	Pairs []int `json:"pairs,omitempty"`
	// Beside names another workload whose traffic every pair has at the same time, over connections of its own,
	// with the warm-up and duration of this workload. The metrics are those of this workload, without CPU time, because both
	// workloads use the CPUs.
	Beside string `json:"beside,omitempty"`
}

// Traffic has the settings of a workload, which are the same for every kind.
type Traffic struct {
	// Protocol of the traffic. connect, http and application support tcp only.
	Protocol string `json:"protocol,omitempty"`
	// IP is the IP version.
	IP int `json:"ip,omitempty"`
	// Size of a message; for redis and memcached, of a value; postgres has none; for http, of the object or of a
	// page's script. The default is 128KiB for a stream (1400 over UDP), 200k for a page, and 64 otherwise. The tool and the
	// protocol may allow less than the range.
	Size Bytes `json:"size,omitempty"`
	// Connections per pair; for connect and http, the number that are open at a time.
	Connections int `json:"connections,omitempty"`
	// Rate of underload, in messages per second and connection; 0 is as fast as possible. For a
	// page, the users per second and pair.
	Rate int `json:"rate,omitempty" unit:"1/s"`
	// KeepAlive reuses connections for http requests. By default each request opens its own.
	KeepAlive bool `json:"keepAlive,omitempty"`
	// Requests is the number of http requests per pair: the window ends when they are done, after
	// duration at the latest. With 0 the window lasts for duration.
	Requests int `json:"requests,omitempty"`
	// Iterations is the number of round trips of each connection of pingpong: the window ends when they are done, after duration
	// at the latest. With 0 the window lasts for duration. For the tools native, without epoll, and latte.
	Iterations int `json:"iterations,omitempty"`
	// Page makes users load a page (index, script and styles, compressed), each over a
	// connection of its own. They arrive at the rate, whether or not earlier users are done.
	Page bool `json:"page,omitempty"`
	// Image is the size of an image in the page, which is sent uncompressed. The default is no image.
	Image Bytes `json:"image,omitempty"`
	// Busy makes the sender of underload poll the clock between messages, as sockperf
	// does, instead of sleeping. Its CPU never idles, and no other process can use it.
	Busy bool `json:"busy,omitempty"`
	// IO is how the traffic engine reads and writes, at both ends. blocking: a thread for each
	// connection blocks in recv and send, as in iperf 2, Apache and PostgreSQL. epoll: one thread
	// waits for all connections of an end and never blocks in another call, as in iperf3 before 3.16
	// and Redis; http has such a thread for each CPU, like nginx. The default is epoll for
	// http and blocking for the others. Not for other tools, connect and pages, which have one
	// way each.
	IO string `json:"io,omitempty"`
	// Operation of an application: for redis and memcached, get or set; for postgres, select or tpcb;
	// for grpc, unary.
	Operation string `json:"operation,omitempty"`
	// Pipeline is how many requests the client of redis or grpc sends on a connection before it waits for
	// replies.
	Pipeline int `json:"pipeline,omitempty"`
	// Warmup is the time before the measured window. The default is 1s for a stream and 500ms otherwise.
	Warmup Duration `json:"warmup,omitempty"`
	// Duration is the length of the measured window.
	Duration Duration `json:"duration"`
	// Port on which the server of the first pair listens; further pairs use the ports after it. qperf needs two for each
	// pair: for control, and for data the one after it. With 0 servers listen on ports that are free. A firewall between
	// hosts must let these ports through.
	Port int `json:"port,omitempty"`
	// Tool is the program that generates the traffic. Not every tool supports every kind.
	Tool string `json:"tool,omitempty"`
}
