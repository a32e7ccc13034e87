package report

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/shell"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/words"
)

// Machine groups the nodes whose recorded facts are all equal.
type Machine struct {
	Nodes   string
	Facts   []Definition
	Devices []Devices

	nodes []string
}

// Devices groups the nodes of a machine that have the same network devices.
type Devices struct {
	Nodes string
	Links []record.Link

	nodes []string
}

func definitions(exp *spec.Experiment) (variants, workloads []Definition) {
	for _, v := range exp.Spec.Variants {
		variants = append(variants, Definition{v.Name, strings.Join(variantParts(exp, v), "; ")})
	}
	for _, w := range exp.Spec.Workloads {
		workloads = append(workloads, Definition{w.Name, strings.Join(workloadParts(w), ", ")})
	}
	return variants, workloads
}

func variantParts(exp *spec.Experiment, v spec.Variant) []string {
	path := exp.PathOf(v)
	parts := slices.Concat([]string{pathName(path)}, path.Settings(), v.Settings())
	if hosts := exp.Spec.Target.Hosts; hosts != nil && exp.Spec.Mesh == nil {
		client, server := exp.HostsOf(v)
		parts = append(parts, fmt.Sprintf("clients on %s, servers on %s", hosts[client].Name, hosts[server].Name))
	}
	if k := exp.Spec.Target.Kubernetes; k != nil && len(k.NodeNames) > 0 && len(exp.Pools()) > 0 {
		of := k.NodeNames[2*exp.PoolOf(v):]
		parts = append(parts, fmt.Sprintf("clients on %s, servers on %s", of[0], of[1]))
	}
	if v.Cluster != "" {
		parts = append(parts, "in cluster "+v.Cluster)
	}
	if v.Versus != "" {
		parts = append(parts, "baseline "+v.Versus)
	}
	if v.Switch != nil {
		parts = append(parts, "switched by "+shell.Join(v.Switch.To))
	}
	return parts
}

// clusters describes the clusters of a run.
func clusters(all []record.Cluster) (out []Definition) {
	for _, c := range all {
		text := c.String()
		if c.Context != "" {
			text = strings.TrimPrefix(text+", context "+c.Context, ", ")
		}
		if text != "" {
			out = append(out, Definition{strings.TrimSpace("Cluster " + c.Name), text})
		}
	}
	return out
}

func workloadParts(w spec.Workload) []string {
	t := w.Traffic()
	if t == nil {
		t = &spec.Traffic{}
	}
	parts := []string{workloadKind(w)}
	if t.Protocol != "" {
		parts = append(parts, strings.ToUpper(t.Protocol))
	}
	if t.IP != 0 {
		parts = append(parts, fmt.Sprintf("IPv%d", t.IP))
	}
	parts = append(parts, sizeParts(w, t)...)
	if t.Connections != 0 {
		parts = append(parts, words.Count(t.Connections, "connection")+" per pair")
	}
	if t.Pipeline > 1 {
		parts = append(parts, fmt.Sprintf("%d requests pipelined", t.Pipeline))
	}
	switch {
	case t.Page:
		parts = append(parts, fmt.Sprintf("%d users/s", t.Rate))
	case t.Rate != 0:
		parts = append(parts, fmt.Sprintf("%d messages/s", t.Rate))
	}
	if t.Requests != 0 {
		parts = append(parts, words.Count(t.Requests, "request"))
	}
	if t.Iterations != 0 {
		parts = append(parts, words.Count(t.Iterations, "round trip")+" per connection")
	}
	if w.HTTP != nil && !t.Page {
		parts = append(parts, map[bool]string{true: "connections kept alive", false: "a connection per request"}[t.KeepAlive])
	}
	if t.Duration != 0 {
		parts = append(parts, t.Duration.String())
	}
	if t.Port != 0 {
		parts = append(parts, fmt.Sprintf("port %d", t.Port))
	}
	if t.Tool != "" && t.Tool != spec.ToolNative {
		parts = append(parts, "measured with "+t.Tool)
	} else if p := program(t); p != "" {
		parts = append(parts, p)
	}
	if w.Beside != "" {
		parts = append(parts, "beside "+w.Beside)
	}
	return parts
}

// workloadKind returns the name of a workload's kind.
func workloadKind(w spec.Workload) string {
	switch {
	case w.PingPong != nil:
		return "ping-pong"
	case w.UnderLoad != nil:
		return "under load"
	case w.Connect != nil:
		return "connect"
	case w.HTTP != nil && w.HTTP.Page:
		return "HTTP page"
	case w.HTTP != nil:
		return "HTTP"
	case w.Application != nil:
		return "application"
	}
	return "stream"
}

// sizeParts describes the sizes of messages and objects.
func sizeParts(w spec.Workload, t *spec.Traffic) []string {
	switch {
	case t.Size == 0:
		return nil
	case t.Page && t.Image != 0:
		return []string{fmt.Sprintf("a script of %s", size(t.Size)), fmt.Sprintf("an image of %s", size(t.Image))}
	case t.Page:
		return []string{fmt.Sprintf("a script of %s", size(t.Size))}
	case w.HTTP != nil:
		return []string{fmt.Sprintf("objects of %s", size(t.Size))}
	case w.Application != nil:
		return []string{fmt.Sprintf("%s of values of %s", t.Operation, size(t.Size))}
	}
	return []string{fmt.Sprintf("messages of %s", size(t.Size))}
}

// vfText says whether the packets of a variant's trials took the virtual function, if there was one.
func vfText(trials []record.Trial, variant string) string {
	var ways []string
	least, most := 1.0, 0.0
	for _, t := range trials {
		if t.Variant != variant || t.Status != record.StatusOK {
			continue
		}
		if way, share := record.Took(t.VFs); way != "" {
			ways = append(ways, way)
			least, most = min(least, share), max(most, share)
		}
	}
	slices.Sort(ways)
	ways = slices.Compact(ways)
	if len(ways) == 0 {
		return ""
	}
	if len(ways) > 1 {
		ways[0] = record.TookBoth
	}
	share := fmt.Sprintf("%.1f", 100*least)
	if other := fmt.Sprintf("%.1f", 100*most); other != share {
		share += " to " + other
	}
	return fmt.Sprintf("packets took %s (%s%% through the VF)", ways[0], share)
}

// fastText says what share of the packets that the fast path's programs counted in a variant's trials took the fast path, and of which
// kinds they were. It is empty if none were counted.
func fastText(trials []record.Trial, variant string) string {
	var all, fast uint64
	kinds := make(map[string]uint64)
	for _, t := range trials {
		if t.Variant != variant || t.Status != record.StatusOK {
			continue
		}
		for _, f := range t.Fastpath {
			for why, n := range f.Packets {
				all += n
				_, kind, took := record.SplitReason(why)
				if took {
					fast += n
				}
				if kind != "" { // older results have none
					kinds[kind] += n
				}
			}
		}
	}
	if all == 0 {
		return ""
	}
	percent := func(n uint64) string { return fmt.Sprintf("%.1f%%", 100*float64(n)/float64(all)) }
	text := percent(fast) + " of packets took the fast path"
	var each []string
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		each = append(each, kind+" "+percent(kinds[kind]))
	}
	if len(each) > 0 {
		text += " (" + strings.Join(each, ", ") + ")"
	}
	return text
}

// design describes the periods of the trials, if something was switched.
func design(exp *spec.Experiment, trials []record.Trial) string {
	if !exp.Switches() {
		return ""
	}
	periods := map[int]bool{}
	for _, t := range trials {
		if t.Status == record.StatusOK {
			periods[t.Period] = true
		}
	}
	return fmt.Sprintf("Switch-back design: %s, in each of which a variant has %s per workload and number of pairs. "+
		"Their mean is the value of the period, and intervals are computed from the periods. A block is one period of every variant.",
		words.Count(len(periods), "period"), words.Count(exp.Repeats(), "trial"))
}

func pathName(p spec.Path) string {
	switch {
	case p.Native != nil:
		return "host network"
	case p.VXLAN != nil && p.VXLAN.Shape != "":
		return "VXLAN (" + p.VXLAN.Shape + ")"
	case p.VXLAN != nil:
		return "VXLAN"
	case p.VXLANFlow != nil:
		return "VXLAN, tunnel key set by eBPF"
	case p.UDP != nil && p.UDP.Shape != "":
		return "UDP overlay in user space (" + p.UDP.Shape + ")"
	case p.UDP != nil:
		return "UDP overlay in user space"
	case p.Routed != nil:
		return "routed"
	case p.EBPF != nil:
		return "routed, by eBPF"
	case p.Pod != nil:
		return "pod IP"
	case p.Service != nil && p.Service.Mode == "" && p.Service.Backends > 1:
		return fmt.Sprintf("ClusterIP with %d endpoints of 1 pod, at %[1]d ports", p.Service.Backends)
	case p.Service != nil:
		return "ClusterIP"
	case p.Bridge != nil:
		return "bridge within one node"
	case p.Balancer != nil:
		return balancerName(*p.Balancer)
	case p.Address != "":
		return "the hosts' addresses named " + p.Address
	}
	return "unknown path"
}

func balancerName(b spec.Balancer) string {
	name := "load balancer"
	if b.Proxy != "" {
		name += " (" + b.Proxy + ")"
	}
	name += ", " + words.Count(b.Backends, "backend")
	for _, role := range []string{spec.RoleClient, spec.RoleProxy, spec.RoleBackend} {
		nic := b.NICs.Of(role)
		if nic.Rate != "" {
			name += fmt.Sprintf(", %s's NIC %s", role, nic.Rate)
		}
		if nic.Price != "" {
			name += fmt.Sprintf(", %s for %s/h", role, nic.Price)
		}
	}
	return name
}

func machines(nodes []record.Node) []Machine {
	var out []Machine
	for _, n := range nodes {
		facts := nodeFacts(n)
		m := findOrAdd(&out, func(m Machine) bool { return slices.Equal(m.Facts, facts) }, Machine{Facts: facts})
		m.nodes = append(m.nodes, n.Name)
		m.Nodes = words.And(m.nodes)
		if len(n.Links) == 0 {
			continue
		}
		d := findOrAdd(&m.Devices, func(d Devices) bool { return slices.EqualFunc(d.Links, n.Links, sameLink) }, Devices{Links: n.Links})
		d.nodes = append(d.nodes, n.Name)
		d.Nodes = words.And(d.nodes)
	}
	return out
}

func nodeFacts(n record.Node) []Definition {
	facts := []Definition{
		{"Kernel", strings.TrimSpace(n.Kernel + " " + n.Arch)},
		{"System", n.Distribution},
		{"CPU", n.CPUModel},
		{"CPUs online", n.CPUs},
		{"CPUs of the node", n.NodeCPUs},
		{"CPUs of the NIC's interrupts", n.IRQCPUs},
		{"CPUs isolated", n.Isolated},
		{"Memory", memory(n.MemoryByte)},
		{"Frequency governor", n.Governor},
		{"Clock source", n.Clock},
		{"Virtual machine", map[bool]string{true: "yes", false: "no"}[n.Hypervisor]},
		{"Interrupt to another CPU, round trip", interrupt(n.InterruptSeconds)},
		{"Physical host", n.PhysicalHost},
		{"Role", n.Role},
		{"Proxy", n.Proxy},
		{"NIC rate", bitRate(n.NICRate)},
	}
	facts = append(facts, sorted(n.Tools)...)
	facts = append(facts, sorted(n.Sysctls)...)
	return slices.DeleteFunc(facts, func(d Definition) bool { return d.Text == "" })
}

func sameLink(a, b record.Link) bool {
	return fmt.Sprint(a) == fmt.Sprint(b)
}

func sorted(values map[string]string) []Definition {
	var out []Definition
	for _, k := range slices.Sorted(maps.Keys(values)) {
		out = append(out, Definition{k, values[k]})
	}
	return out
}

func size(b spec.Bytes) string {
	if s := b.String(); strings.ContainsAny(s[len(s)-1:], "0123456789") {
		return words.Count(int(b), "byte")
	}
	return b.String()
}

func interrupt(seconds float64) string {
	if seconds == 0 {
		return ""
	}
	return number.Significant(seconds*1e6) + " µs"
}

func bitRate(bits float64) string {
	if bits == 0 {
		return ""
	}
	return number.Significant(bits*1e-9) + " Gb/s"
}

func memory(bytes uint64) string {
	if bytes == 0 {
		return ""
	}
	return number.Significant(float64(bytes)/(1<<30)) + " GiB"
}
