package spec

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"
)

// These methods complete a variant or workload with what the experiment sets for all of them. They are for
// experiments that Parse returned.

// PathOf returns the path of a variant.
func (e *Experiment) PathOf(v Variant) Path {
	if v.Path != nil {
		return *v.Path
	}
	return e.Spec.Path
}

// Nodes returns the number of nodes that the experiment runs on.
func (e *Experiment) Nodes() int {
	switch t := e.Spec.Target; {
	case t.Lab != nil:
		return t.Lab.Nodes
	case t.Kubernetes != nil:
		return cmp.Or(len(t.Kubernetes.NodeNames), t.Kubernetes.nodesNamed(), t.Kubernetes.Nodes, 2*max(1, len(e.Pools())))
	case t.Hosts != nil && e.Spec.Mesh != nil:
		return len(t.Hosts)
	}
	return 2
}

// Rounds returns the number of trials in which a mesh measures every node, as client, once with every other
// one as its server. It is 1 without a mesh.
func (e *Experiment) Rounds() int {
	if e.Spec.Mesh == nil {
		return 1
	}
	n := e.Nodes()
	return 2 * (n - 1 + n%2)
}

// Settings returns what a variant sets in addition to its path and baseline, in words: its NIC profile, its
// accelerators, and the tools of workloads.
func (v Variant) Settings() []string {
	var all []string
	if v.NIC != nil {
		all = append(all, v.NIC.String())
	}
	for _, a := range v.Accelerate {
		text := a.String()
		if v.On != "" {
			text += ", on the " + v.On + "'s side only"
		}
		all = append(all, text)
	}
	for _, workload := range slices.Sorted(maps.Keys(v.Tools)) {
		all = append(all, fmt.Sprintf("%s measured with %s", workload, v.Tools[workload]))
	}
	return all
}

// String describes the profile in words, as far as it is set.
func (n NIC) String() string {
	var parts []string
	if n.Offload != "" {
		parts = append(parts, "offload "+n.Offload)
	}
	if n.MTU != 0 {
		parts = append(parts, fmt.Sprintf("MTU %d", n.MTU))
	}
	if n.Rate != "" {
		parts = append(parts, string(n.Rate))
	}
	if n.Price != "" {
		parts = append(parts, string(n.Price)+"/h")
	}
	return "NIC " + strings.Join(parts, ", ")
}

// NICOf returns the NIC profile of a variant in a lab.
func (e *Experiment) NICOf(v Variant) NIC {
	var nic NIC
	if lab := e.Spec.Target.Lab; lab != nil {
		nic = lab.NIC
	}
	if v.NIC == nil {
		return nic
	}
	if v.NIC.Offload != "" {
		nic.Offload = v.NIC.Offload
	}
	if v.NIC.MTU != 0 {
		nic.MTU = v.NIC.MTU
	}
	if v.NIC.Rate != "" {
		nic.Rate = v.NIC.Rate
	}
	if v.NIC.Price != "" {
		nic.Price = v.NIC.Price
	}
	return nic
}

// PriceOf returns what all nodes of a variant cost for an hour, or 0 if none has a price. In a lab with a
// balancer, only nodes with a role count. Of hosts, both ends count.
func (e *Experiment) PriceOf(v Variant) (price float64, currency string) {
	for _, p := range e.pricesOf(v) {
		amount, of, _ := p.Amount() // checked by Parse
		price, currency = price+amount, cmp.Or(of, currency)
	}
	// Amounts have at most six decimals. Without rounding, 0.1 + 0.2 would differ from 0.3.
	return math.Round(price*1e6) / 1e6, currency
}

// pricesOf returns the prices of a variant's nodes, empty for a node without one.
func (e *Experiment) pricesOf(v Variant) []Price {
	if hosts := e.Spec.Target.Hosts; len(hosts) > 0 {
		client, server := e.HostsOf(v)
		return []Price{hosts[client].Price, hosts[server].Price}
	}
	if e.Spec.Target.Lab == nil {
		return nil
	}
	nic := e.NICOf(v).Price
	b := e.PathOf(v).Balancer
	if b == nil {
		return slices.Repeat([]Price{nic}, e.Nodes())
	}
	var all []Price
	for i := 0; b.Role(i) != ""; i++ {
		all = append(all, cmp.Or(b.NICs.Of(b.Role(i)).Price, nic))
	}
	return all
}

// HostsOf returns the indices of the hosts of a variant's clients and servers: those with the labels that it
// asks for.
func (e *Experiment) HostsOf(v Variant) (client, server int) {
	client, server, _ = v.ends().among(e.Spec.Target.Hosts)
	return client, server
}

// Pools returns the labels by which variants choose their nodes of a cluster, each once, in the order of the variants. It is
// empty if no variant chooses: all run on the same nodes.
func (e *Experiment) Pools() (pools []Ends) {
	if e.Spec.Target.Kubernetes == nil || !slices.ContainsFunc(e.Spec.Variants, func(v Variant) bool { return v.Hosts != nil }) {
		return nil
	}
	for _, v := range e.Spec.Variants {
		if !slices.ContainsFunc(pools, v.ends().equal) {
			pools = append(pools, v.ends())
		}
	}
	return pools
}

// PoolOf returns the index of a variant's pool. Pool i has the nodes 2i and 2i+1.
func (e *Experiment) PoolOf(v Variant) int {
	return max(0, slices.IndexFunc(e.Pools(), v.ends().equal))
}

func (n Ends) equal(other Ends) bool {
	return maps.Equal(n.Client, other.Client) && maps.Equal(n.Server, other.Server)
}

func (v Variant) ends() Ends {
	if v.Hosts == nil {
		return Ends{}
	}
	return *v.Hosts
}

// among returns the indices of both ends among hosts. If no host has the labels of an end, missing has those
// labels.
func (n Ends) among(hosts []Host) (client, server int, missing map[string]string) {
	first := func(labels map[string]string, but int) int {
		for i, h := range hosts {
			if i != but && h.has(labels) {
				return i
			}
		}
		return -1
	}
	// The client does not take a host that the server needs, if another one has the client's labels too.
	for client := range hosts {
		if !hosts[client].has(n.Client) {
			continue
		}
		if server := first(n.Server, client); server >= 0 {
			return client, server, nil
		}
	}
	if first(n.Client, -1) < 0 {
		return -1, -1, n.Client
	}
	return -1, -1, n.Server
}

func (h Host) has(labels map[string]string) bool {
	for key, value := range labels {
		if got, ok := h.Labels[key]; !ok || got != value {
			return false
		}
	}
	return true
}

// BaselineOf returns the name of the variant that a variant is compared with. It is empty for variants that
// are compared with nothing: the experiment's baseline, and any variant that another one names as its versus,
// unless it has a versus itself.
func (e *Experiment) BaselineOf(v Variant) string {
	if v.Versus != "" {
		return v.Versus
	}
	if v.Name == e.Spec.Baseline {
		return ""
	}
	for _, other := range e.Spec.Variants {
		if other.Versus == v.Name {
			return ""
		}
	}
	return e.Spec.Baseline
}

// States groups the variants by the state of the machines that they run in, in the order of the file. There is
// one group unless variants have a switch.
func (e *Experiment) States() [][]Variant {
	var states [][]Variant
	for _, v := range e.Spec.Variants {
		i := slices.IndexFunc(states, func(s []Variant) bool { return reflect.DeepEqual(s[0].Switch, v.Switch) })
		if i < 0 {
			i, states = len(states), append(states, nil)
		}
		states[i] = append(states[i], v)
	}
	return states
}

// Switches reports whether a variant has a switch, so that the experiment runs in periods.
func (e *Experiment) Switches() bool {
	return slices.ContainsFunc(e.Spec.Variants, func(v Variant) bool { return v.Switch != nil })
}

// Unset returns the names of the parameters without a value, in alphabetical order.
func (e *Experiment) Unset() (names []string) {
	for _, name := range slices.Sorted(maps.Keys(e.Spec.Parameters)) {
		if e.Spec.Parameters[name] == "" {
			names = append(names, name)
		}
	}
	return names
}

// Repeats returns how often a trial runs in a block: once, or trialsPerPeriod times in an experiment with
// periods.
func (e *Experiment) Repeats() int {
	if e.Switches() {
		return max(1, e.Spec.TrialsPerPeriod)
	}
	return 1
}

// PairsOf returns the numbers of pairs that a workload runs with; in a mesh, the number of pairs of a round.
func (e *Experiment) PairsOf(w Workload) []int {
	if e.Spec.Mesh != nil {
		return []int{e.Nodes() / 2}
	}
	if len(w.Pairs) > 0 {
		return w.Pairs
	}
	return e.Spec.Pairs
}

// WorkloadFor returns a workload as a variant runs it: with the variant's tool, and with times that the tool
// can keep. It copies the settings, so that a caller cannot change those of w by mistake.
func (e *Experiment) WorkloadFor(v Variant, w Workload) Workload {
	for _, t := range []**Traffic{&w.Stream, &w.PingPong, &w.UnderLoad, &w.Connect, &w.HTTP, &w.Application} {
		if *t == nil {
			continue
		}
		own := **t
		if tool := v.Tools[w.Name]; tool != "" {
			own.Tool = tool
		}
		own.fitTimesToTool()
		*t = &own
	}
	return w
}

// BesideOf returns the workload that runs beside w, with the times that w has in the variant; nil if none does.
func (e *Experiment) BesideOf(v Variant, w Workload) *Workload {
	i := slices.IndexFunc(e.Spec.Workloads, func(named Workload) bool { return named.Name == w.Beside })
	if w.Beside == "" || i < 0 {
		return nil
	}
	other, own := e.WorkloadFor(v, e.Spec.Workloads[i]), e.WorkloadFor(v, w).Traffic()
	t := other.Traffic()
	t.Warmup, t.Duration = own.Warmup, own.Duration
	return &other
}

// fitTimesToTool adjusts the times to what the tool can keep, so that every end and every sampler measures the window
// that the tool measures.
func (t *Traffic) fitTimesToTool() {
	switch t.Tool {
	case ToolQperf, ToolAB, ToolLatte: // take whole seconds, and have no warm-up
		t.Duration = wholeSeconds(t.Duration)
	case ToolNginx, ToolPostgres, ToolMemcached: // their clients take whole seconds; another run of them warms up
		t.Duration = wholeSeconds(t.Duration)
	case ToolRedis: // reports its rate every 250 ms, from which the number of requests follows
		t.Warmup = max(t.Warmup, Duration(time.Second))
	case ToolIperf3, ToolIperf2: // take whole seconds
		t.Warmup, t.Duration = wholeSeconds(t.Warmup), wholeSeconds(t.Duration)
	case ToolSockperf: // sleeps 2 s and leaves out 400 ms, whatever its options
		t.Warmup = max(t.Warmup, Duration(2400*time.Millisecond))
	}
}

func wholeSeconds(d Duration) Duration {
	const second = Duration(time.Second)
	return (d + second - 1) / second * second
}

// InstalledApplication reports whether a tool is an application whose server and client are installed
// programs.
func InstalledApplication(tool string) bool {
	switch tool {
	case ToolRedis, ToolNginx, ToolPostgres, ToolMemcached:
		return true
	}
	return false
}

// OwnTool reports whether this program generates the traffic of a tool itself. Other tools must be installed where the worker runs.
func OwnTool(tool string) bool { return tool == ToolNative || tool == ToolGRPC }

// Counted reports whether the window ends when a number of requests or round trips is done, and not by the clock.
func (t *Traffic) Counted() bool { return t.Requests > 0 || t.Iterations > 0 || t.Tool == ToolRedis }

// Messages reports whether a TCP stream is of messages, which are no larger than a datagram, rather than of large writes.
func (t *Traffic) Messages() bool { return t.Protocol == "tcp" && t.Size > 0 && t.Size <= maxDatagram }

// CountsLost reports whether the tool counts the messages of a ping-pong that were lost.
func (t *Traffic) CountsLost() bool { return t.Tool != ToolQperf && t.Tool != ToolLatte }

// PortOf returns the port on which the server of a pair listens, counted from 0. It is 0 if the server chooses one.
func (t *Traffic) PortOf(pair int) uint16 {
	switch {
	case t.Port == 0:
		return 0
	case t.Tool == ToolQperf: // has another one for data
		return uint16(t.Port + 2*pair)
	}
	return uint16(t.Port + pair)
}

// Kind returns "stream", "pingpong", "underload", "connect", "http" or "application".
func (w Workload) Kind() string {
	switch {
	case w.Stream != nil:
		return "stream"
	case w.PingPong != nil:
		return "pingpong"
	case w.UnderLoad != nil:
		return "underload"
	case w.Connect != nil:
		return "connect"
	case w.HTTP != nil:
		return "http"
	case w.Application != nil:
		return "application"
	}
	return ""
}

// Traffic returns the settings of the workload, whatever its kind, or nil if it has none.
func (w Workload) Traffic() *Traffic {
	switch {
	case w.Stream != nil:
		return w.Stream
	case w.PingPong != nil:
		return w.PingPong
	case w.UnderLoad != nil:
		return w.UnderLoad
	case w.HTTP != nil:
		return w.HTTP
	case w.Application != nil:
		return w.Application
	}
	return w.Connect
}

// Shape returns the kind of network that joins a lab's nodes for a path. It is empty for paths that are not a
// lab's or have no pods.
func (p Path) Shape() string {
	switch {
	case p.VXLAN != nil:
		return p.VXLAN.Shape
	case p.UDP != nil && p.UDP.Shape == ShapeWeave:
		return ShapeWeave
	case p.UDP != nil:
		return "udp"
	case p.Service != nil && p.Service.Mode != "":
		return ShapeFlannel
	case p.Native == nil && p.Pod == nil && p.Service == nil && p.Balancer == nil && p.Address == "":
		return p.String()
	}
	return ""
}

// String returns the path's name, with the shape of an overlay: "native", "vxlan/flannel".
func (p Path) String() string {
	switch {
	case p.Native != nil:
		return "native"
	case p.VXLAN != nil:
		return "vxlan/" + p.VXLAN.Shape
	case p.VXLANFlow != nil:
		return "vxlan-flow"
	case p.UDP != nil && p.UDP.Shape != "":
		return "udp/" + p.UDP.Shape
	case p.UDP != nil: // from a result that is older than the shapes
		return "udp"
	case p.Routed != nil:
		return "routed"
	case p.EBPF != nil:
		return "ebpf"
	case p.Bridge != nil:
		return "bridge"
	case p.Pod != nil:
		return "pod"
	case p.Service != nil:
		return p.Service.String()
	case p.Balancer != nil:
		return p.Balancer.String()
	case p.Address != "":
		return p.Address
	}
	return ""
}

// OneNode reports whether both pods of a pair are on one node.
func (p Path) OneNode() bool { return p.Bridge != nil || p.Local }

// Settings returns what a path sets in addition to its name, in words: "2000 policies by ipset", "10 endpoint
// changes/s".
func (p Path) Settings() (all []string) {
	if p.Local {
		all = append(all, "pods of one node")
	}
	if p.Policies != nil {
		all = append(all, p.Policies.String())
	}
	if p.Service != nil && p.Service.EndpointChanges > 0 {
		all = append(all, fmt.Sprintf("%d endpoint changes/s", p.Service.EndpointChanges))
	}
	return all
}

// String returns "balancer/4" for 4 backends, or "balancer/haproxy/4" if the proxy is named.
func (b Balancer) String() string {
	if b.Proxy == "" {
		return fmt.Sprintf("balancer/%d", b.Backends)
	}
	return fmt.Sprintf("balancer/%s/%d", b.Proxy, b.Backends)
}

// Role returns the role of node i of a lab with this balancer: the client is the first, the proxy the second,
// then come the backends. It is empty for nodes beyond those.
func (b Balancer) Role(i int) string {
	switch {
	case i == 0:
		return RoleClient
	case i == 1:
		return RoleProxy
	case i < 2+b.Backends:
		return RoleBackend
	}
	return ""
}

// Of returns the overrides for a role.
func (n RoleNICs) Of(role string) RoleNIC {
	switch role {
	case RoleClient:
		return n.Client
	case RoleProxy:
		return n.Proxy
	case RoleBackend:
		return n.Backend
	}
	return RoleNIC{}
}

// String returns "service" in a cluster, or "service/1000" if the experiment sets 1000 backends. In a lab it returns
// "service/iptables/1000", and "service/iptables/1000 of 50" if there are 50 services.
func (s Service) String() string {
	switch {
	case s.Mode == "" && s.Backends > 0:
		return fmt.Sprintf("service/%d", s.Backends)
	case s.Mode == "":
		return "service"
	case s.Services > 1:
		return fmt.Sprintf("service/%s/%d of %d", s.Mode, s.Backends, s.Services)
	}
	return fmt.Sprintf("service/%s/%d", s.Mode, s.Backends)
}

// String returns "2000 policies by ipset", for example.
func (p Policies) String() string {
	if p.Count == 1 {
		return "1 policy by " + p.Mode
	}
	return fmt.Sprintf("%d policies by %s", p.Count, p.Mode)
}
