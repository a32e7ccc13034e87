package experiment

import (
	"cmp"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/target"
)

// Plan is an experiment worked out: which trials, on which networks, how long.
type Plan struct {
	exp *v1alpha1.Experiment
	// Blocks to run, or the most there may be where Auto adds them as needed.
	Blocks int
	Auto   bool
	// Cells of a block, in the experiment's order.
	Cells []Cell
	// Fabrics that the cells need, in order of first use.
	Fabrics []Fabric
	// Pods that each node needs.
	Pods int
}

// Cell is one variant × workload × pairs.
type Cell struct {
	Variant  v1alpha1.Variant
	Workload v1alpha1.Workload // with the variant's tool
	Pairs    int
	Fabric   Fabric
	// Native, Bridge and Service are paths that seat or address the ends in their own
	// way.
	Native, Bridge, Service bool
	// Backends of a balancer, on the path of that name; else 0.
	Backends int
}

// onNodes tells whether the traffic runs on the nodes themselves.
func (c Cell) onNodes() bool { return c.Native || c.Backends > 0 }

// served is the workload as each of a pair's servers sees it: connections that last
// are divided among backends, those that come and go are not.
func (c Cell) served() v1alpha1.Workload {
	w := c.Workload
	if c.Backends == 0 || w.Connect != nil || w.HTTP != nil {
		return w
	}
	for _, t := range []**v1alpha1.Traffic{&w.Stream, &w.PingPong, &w.UnderLoad} {
		if *t != nil {
			own := **t
			own.Connections /= c.Backends
			*t = &own
		}
	}
	return w
}

func (c Cell) String() string {
	return fmt.Sprintf("%s %s × %d", c.Variant.Name, c.Workload.Name, c.Pairs)
}

func (c Cell) path() string {
	switch {
	case c.Native:
		return "native"
	case c.Service:
		return "service"
	case c.Backends > 0:
		return "balancer"
	}
	return "from pod to pod"
}

// deadTime is what a trial takes beside warm-up and window, for the estimate.
const deadTime = 250 * time.Millisecond

// startTime is what a network takes to come up and go, for the estimate.
const startTime = 3 * time.Second

// New works an experiment out. exp is valid and has its defaults.
func New(exp *v1alpha1.Experiment) *Plan {
	p := &Plan{exp: exp, Blocks: exp.Spec.Runs.N, Auto: exp.Spec.Runs.Auto}
	if p.Auto {
		p.Blocks = exp.Spec.Runs.Max
	}
	nodes := exp.Nodes()
	for _, w := range exp.Spec.Workloads {
		for _, pairs := range exp.PairsOf(w) {
			for _, v := range exp.Spec.Variants {
				c := Cell{
					Variant: v, Workload: exp.WorkloadFor(v, w), Pairs: pairs,
					Fabric: fabricFor(exp, v),
					Native: exp.PathOf(v).Native != nil, Bridge: exp.PathOf(v).Bridge != nil, Service: exp.PathOf(v).Service != nil,
				}
				c.Backends = c.Fabric.Balancer.Backends
				p.Cells = append(p.Cells, c)
				p.addFabric(c.Fabric)
				for i := range pairs {
					if c.Backends > 0 {
						continue // they are on nodes, each in a place of its own
					}
					client, server := c.ends(i, nodes)
					p.Pods = max(p.Pods, client.Pod+1, server.Pod+1)
				}
			}
		}
	}
	return p
}

func (p *Plan) addFabric(f Fabric) {
	for _, have := range p.Fabrics {
		if have == f {
			return
		}
	}
	p.Fabrics = append(p.Fabrics, f)
}

func fabricFor(exp *v1alpha1.Experiment, v v1alpha1.Variant) Fabric {
	if exp.Spec.Target.Lab == nil {
		return Fabric{}
	}
	f := Fabric{Shape: shapeFor(exp, v), NIC: wires(exp, v), Nodes: exp.Nodes()}
	if s := exp.PathOf(v).Service; s != nil {
		f.Service = *s
	}
	if b := exp.PathOf(v).Balancer; b != nil {
		f.Shape, f.Balancer = v1alpha1.ShapeFlannel, *b
		f.Balancer.NICs.Client.Price, f.Balancer.NICs.Proxy.Price, f.Balancer.NICs.Backend.Price = "", "", ""
		f.Nodes, f.Pairs = extent(exp)
	}
	return f
}

// wires is the NIC profile of a variant, as far as a network differs by it.
func wires(exp *v1alpha1.Experiment, v v1alpha1.Variant) v1alpha1.NIC {
	nic := exp.NICOf(v)
	nic.Price = ""
	return nic
}

// extent is how many nodes a lab with a balancer has, and how many pairs there are at
// most. It is the same for all of an experiment's, so that their nodes have as many
// CPUs each, however many backends there are.
func extent(exp *v1alpha1.Experiment) (nodes, pairs int) {
	for _, v := range exp.Spec.Variants {
		if b := exp.PathOf(v).Balancer; b != nil {
			nodes = max(nodes, 2+b.Backends)
		}
	}
	for _, w := range exp.Spec.Workloads {
		pairs = max(pairs, slices.Max(exp.PairsOf(w)))
	}
	return nodes, pairs
}

// podsOf is how many pods each node of a fabric needs.
func (p *Plan) podsOf(f Fabric) int {
	if f.Balancer.Backends > 0 {
		return 0
	}
	return p.Pods
}

// served are the seats in a fabric that are reached by way of a service, in the order
// of the pairs, and what they are reached by.
func (p *Plan) served(f Fabric) (all target.Served) {
	for _, c := range p.Cells {
		if !c.Service || c.Fabric != f {
			continue
		}
		traffic := c.Workload.Traffic()
		if by := (target.Transport{IP: traffic.IP, Protocol: traffic.Protocol}); !slices.Contains(all.Transports, by) {
			all.Transports = append(all.Transports, by)
		}
		for i := range c.Pairs {
			if _, server := c.ends(i, p.exp.Nodes()); !slices.Contains(all.Seats, server) {
				all.Seats = append(all.Seats, server)
			}
		}
	}
	return all
}

// shapeFor is the overlay on whose nodes a variant runs. A native variant runs
// on nodes of its NIC profile that another variant has an overlay on, so that
// the two differ in the path alone.
func shapeFor(exp *v1alpha1.Experiment, v v1alpha1.Variant) string {
	if shape := exp.PathOf(v).Shape(); shape != "" {
		return shape
	}
	for _, other := range exp.Spec.Variants {
		if shape := exp.PathOf(other).Shape(); shape != "" && wires(exp, other) == wires(exp, v) {
			return shape
		}
	}
	return v1alpha1.ShapeFlannel
}

// ends seats pair i: clients on even turns, servers on the node after, round
// the nodes, so that the two ends are never on one node; on the path bridge they
// are always on one, in neighbouring pods.
func (c Cell) ends(i, nodes int) (client, server target.Seat) {
	if c.Bridge {
		pod := 2 * (i / nodes)
		return target.Seat{Node: i % nodes, Pod: pod}, target.Seat{Node: i % nodes, Pod: pod + 1}
	}
	// A turn takes two nodes; a node that has had n ends before gives this one
	// its pod n.
	at := func(turn int) target.Seat { return target.Seat{Node: turn % nodes, Pod: turn / nodes} }
	return at(2 * i), at(2*i + 1)
}

// Block is the order of the cells in block b, from 1: the workloads and pair
// counts in random order, the variants of each side by side, also in random
// order, so that what is compared is close in time.
func (p *Plan) Block(b int) []Cell {
	rng := rand.New(rand.NewPCG(p.exp.Spec.Seed, uint64(b)))
	var groups [][]Cell
	for i := 0; i < len(p.Cells); i += len(p.exp.Spec.Variants) {
		groups = append(groups, append([]Cell(nil), p.Cells[i:i+len(p.exp.Spec.Variants)]...))
	}
	rng.Shuffle(len(groups), func(i, j int) { groups[i], groups[j] = groups[j], groups[i] })
	var order []Cell
	for _, g := range groups {
		rng.Shuffle(len(g), func(i, j int) { g[i], g[j] = g[j], g[i] })
		order = append(order, g...)
	}
	return order
}

// Time is how long the plan takes, about; for Auto it is the longest.
func (p *Plan) Time() time.Duration {
	return time.Duration(len(p.Fabrics))*startTime + time.Duration(p.Blocks)*p.blockTime()
}

// TimeText is Time for people: "4 min", "at most 6 h 31 min".
func (p *Plan) TimeText() string {
	most := p.Auto
	for _, c := range p.Cells {
		most = most || c.Workload.Traffic().Requests > 0 // which end the window when they are done
	}
	text := p.Time().Round(time.Second).String()
	if minutes := int(p.Time().Round(time.Minute).Minutes()); minutes > 0 {
		text = fmt.Sprintf("%d min", minutes%60)
		if hours := minutes / 60; hours > 0 {
			text = fmt.Sprintf("%d h %s", hours, text)
		}
	}
	if most {
		return "at most " + text
	}
	return text
}

func (p *Plan) blockTime() time.Duration {
	var sum time.Duration
	for _, c := range p.Cells {
		sum += c.time()
	}
	return sum
}

func (c Cell) time() time.Duration {
	t := c.Workload.Traffic()
	return time.Duration(t.Warmup) + time.Duration(t.Duration) + deadTime
}

// Print shows the plan to a person.
func (p *Plan) Print(w io.Writer) error {
	s := p.exp.Spec
	upTo := ""
	if p.Auto {
		upTo = "at most "
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tw, "experiment\t%s\n", p.exp.Metadata.Name)
	fmt.Fprintf(tw, "trials\t%s%d: %s%d blocks of %d\n", upTo, p.Blocks*len(p.Cells), upTo, p.Blocks, len(p.Cells))
	fmt.Fprintf(tw, "time\t%s\n", p.TimeText())
	for _, f := range p.Fabrics {
		if s.Target.Kubernetes != nil {
			fmt.Fprintf(tw, "network\t%d nodes of a cluster, %d pods each\n", p.exp.Nodes(), p.Pods)
			continue
		}
		if f.Balancer.Backends > 0 {
			fmt.Fprintf(tw, "network\t%d nodes, client → %s → %s, NIC offload %s, MTU %d%s\n", f.Nodes,
				cmp.Or(f.Balancer.Proxy, "proxy"), backends(f.Balancer.Backends), f.NIC.Offload, f.NIC.MTU, rates(f))
			continue
		}
		fmt.Fprintf(tw, "network\t%d nodes, %d pods each, %s, NIC offload %s, MTU %d%s%s\n",
			f.Nodes, p.Pods, f.Shape, f.NIC.Offload, f.NIC.MTU, rate(f.NIC), p.services(f))
	}
	fmt.Fprintln(tw)
	fmt.Fprintf(tw, "VARIANT\tPATH\tACCELERATORS\tVERSUS\n")
	for _, v := range s.Variants {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\n", v.Name, p.exp.PathOf(v), describe(v), orDash(p.exp.BaselineOf(v)))
	}
	fmt.Fprintln(tw)
	fmt.Fprintf(tw, "WORKLOAD\tTRAFFIC\tTOOL\tPAIRS\tWARM-UP\tWINDOW\n")
	for _, wl := range s.Workloads {
		t := wl.Traffic()
		fmt.Fprintf(tw, "%s\t%s %s, IPv%d, %d B × %d\t%s\t%s\t%s\t%s\n", wl.Name, wl.Kind(), t.Protocol, t.IP, t.Size, t.Connections,
			t.Tool, strings.Trim(fmt.Sprint(p.exp.PairsOf(wl)), "[]"), time.Duration(t.Warmup), time.Duration(t.Duration))
	}
	return tw.Flush()
}

// services says what there is in front of a fabric's servers.
func (p *Plan) services(f Fabric) string {
	if f.Service.Mode == "" {
		return ""
	}
	servers := len(p.served(f).Seats)
	return fmt.Sprintf(", services by %s: %d with %d backends each, %d in all", f.Service.Mode, servers, f.Service.Backends, max(servers, f.Service.Services))
}

func backends(n int) string {
	if n == 1 {
		return "1 backend"
	}
	return fmt.Sprintf("%d backends", n)
}

// rates are those of the NICs of a balancer's nodes.
func rates(f Fabric) string {
	var parts []string
	for _, role := range []string{v1alpha1.RoleClient, v1alpha1.RoleProxy, v1alpha1.RoleBackend} {
		if rate := cmp.Or(f.Balancer.NICs.Of(role).Rate, f.NIC.Rate); rate != "" {
			parts = append(parts, role+" "+string(rate))
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return ", " + strings.Join(parts, ", ")
}

func rate(n v1alpha1.NIC) string {
	if n.Rate == "" {
		return ""
	}
	return ", " + string(n.Rate)
}

func orDash(s string) string {
	if s == "" {
		return "–"
	}
	return s
}

// describe is a variant's accelerators on a line.
func describe(v v1alpha1.Variant) string {
	var parts []string
	for _, a := range v.Accelerate {
		parts = append(parts, a.String())
	}
	for workload, tool := range v.Tools {
		parts = append(parts, fmt.Sprintf("%s by %s", workload, tool))
	}
	return orDash(strings.Join(parts, "; "))
}
