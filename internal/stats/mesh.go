package stats

import (
	"cmp"
	"math"
	"slices"
	"strings"

	"gonum.org/v1/gonum/stat"
	"gonum.org/v1/gonum/stat/distuv"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats/estimate"
)

// Mesh has the results of the links of a mesh with one variant and workload, and the nodes and links that are worse than the
// others.
type Mesh struct {
	Variant  string `json:"variant"`  // name of the variant
	Workload string `json:"workload"` // name of the workload
	// Metric is the workload's primary metric or, in further meshes of a stream, server_cpu_per_gb or retransmit_share.
	Metric string `json:"metric"`
	Unit   string `json:"unit"` // its unit
	// Nodes in order, by name.
	Nodes []string `json:"nodes"`
	// Links are the measured and the failed links, in the order of their clients, then servers.
	Links []MeshLink `json:"links"`
	// Outliers are the nodes and links that are proven worse than the others by more than the mesh's margin:
	// nodes, then links, the worst first.
	Outliers []Outlier `json:"outliers"`
	// Untested says why no node or link was tested; empty if they were.
	Untested string `json:"untested,omitempty"`
}

// MeshLink is an ordered pair of nodes.
type MeshLink struct {
	Client string     `json:"client"`           // node of the client
	Server string     `json:"server"`           // node of the server
	N      int        `json:"n"`                // blocks in which it was measured
	Failed int        `json:"failed,omitempty"` // blocks in which it failed
	Mean   float64    `json:"mean"`             // mean of the blocks
	CI95   [2]float64 `json:"ci95"`             // 95% interval of the mean; one block has none
}

// Kinds of outliers: a node as client or as server, or a link.
const (
	OutlierClient = "client"
	OutlierServer = "server"
	OutlierLink   = "link"
)

// Outlier is a node or link that is worse than the others.
type Outlier struct {
	// Kind is client or server for a node, link for a link.
	Kind   string `json:"kind"`
	Client string `json:"client,omitempty"` // the client of a link, or the node that is worse as a client
	Server string `json:"server,omitempty"` // the server of a link, or the node that is worse as a server
	N      int    `json:"n"`                // blocks in which it was measured
	// Failed counts the blocks in which it failed. It is set if the node or link is named because it failed in most blocks.
	Failed int `json:"failed,omitempty"`
	// Ratio to the others: of a node to the median node, of a link to what its two nodes have with others.
	Ratio float64    `json:"ratio"`
	CI95  [2]float64 `json:"ci95"` // 95% interval of the ratio, over the blocks
	// P is the p-value of "no worse than the margin", adjusted by Holm's procedure over all nodes and links of the mesh.
	P float64 `json:"p"`
	// Signs are further observations that set it apart from the others.
	Signs []Sign `json:"signs,omitempty"`
}

// Kinds of signs.
const (
	SignVFIdle      = "vf-idle"     // its packets did not take the virtual function, and those of others did
	SignRetransmits = "retransmits" // TCP retransmitted far more of its segments than on the other links
	SignDrops       = "drops"       // a device of the node dropped packets
)

// Sign is something else that sets a node or link apart from the others.
type Sign struct {
	Kind   string `json:"kind"`             // what it is: vf-idle, retransmits or drops
	Device string `json:"device,omitempty"` // name of the device that dropped packets
	// Value is the share of segments, or the number of packets.
	Value float64 `json:"value,omitempty"`
	// Others is the same of all others: the share of their segments, or the median of their packets.
	Others float64 `json:"others,omitempty"`
}

// fewNodes is the minimum number of nodes at which one can be distinguished from the others: a median of
// three links tolerates one bad link.
const fewNodes = 4

// RetransmitFloor is the share of retransmitted segments below which no link is named.
const RetransmitFloor = signShare

// Secondary reports whether the mesh is about another metric than the workload's primary one.
func (m *Mesh) Secondary() bool { return metrics.Get(m.Metric).OfLinks() }

// meshes returns a mesh for each variant and workload, in the experiment's order. Streams have further ones, for
// metrics.ServerCPUPerGB and, over TCP, metrics.RetransmitShare.
func (t *table) meshes() []Mesh {
	if t.exp.Spec.Mesh == nil {
		return nil
	}
	var all []Mesh
	for _, c := range t.cells {
		margin := math.Log1p(t.exp.Spec.Mesh.Margin)
		add := func(metric string, margin float64) {
			all = append(all, newGrid(c, metric).mesh(c, margin))
		}
		add(c.primary, margin)
		stream := c.workload.Stream
		if stream == nil || stream.Tool != spec.ToolNative {
			continue
		}
		add(metrics.ServerCPUPerGB, margin)
		if stream.Protocol == "tcp" {
			add(metrics.RetransmitShare, math.Log(signTimes))
		}
	}
	return all
}

// grid has a cell's links by block. A missing value is NaN.
type grid struct {
	metric string
	nodes  []string
	values [][][]float64     // block, client, server
	failed []map[[2]int]bool // block: the links that failed in it
}

// nodeOf returns the node of a place: "node1" of "node1/pod0".
func nodeOf(place string) string {
	name, _, _ := strings.Cut(place, "/")
	return name
}

func newGrid(c *cell, metric string) *grid {
	g := &grid{metric: metric}
	for _, tr := range c.all() {
		for _, p := range tr.PerPair {
			g.nodes = with(with(g.nodes, nodeOf(p.Client.Place)), nodeOf(p.Server.Place))
		}
	}
	slices.SortFunc(g.nodes, compareNatural)
	for _, trials := range c.trials {
		block := make([][]float64, len(g.nodes))
		for i := range block {
			block[i] = slices.Repeat([]float64{math.NaN()}, len(g.nodes))
		}
		failed := make(map[[2]int]bool)
		for _, tr := range trials {
			for i := range tr.PerPair {
				p := &tr.PerPair[i]
				from, to := slices.Index(g.nodes, nodeOf(p.Client.Place)), slices.Index(g.nodes, nodeOf(p.Server.Place))
				x, ok := pairValue(c, tr, p, metric)
				if !ok {
					failed[[2]int{from, to}] = true
					continue
				}
				block[from][to] = x
			}
		}
		g.values, g.failed = append(g.values, block), append(g.failed, failed)
	}
	return g
}

// logs returns the logs of the values of a block.
func (g *grid) logs(block [][]float64) (logs [][]float64) {
	floor := 0.0
	if g.metric == metrics.RetransmitShare {
		floor = RetransmitFloor
	}
	for _, row := range block {
		row = slices.Clone(row)
		for i := range row {
			row[i] = math.Log(row[i] + floor)
		}
		logs = append(logs, row)
	}
	return logs
}

// pairValue returns the value of one pair for a mesh's metric.
func pairValue(c *cell, tr *record.Trial, p *record.Pair, metric string) (x float64, ok bool) {
	switch {
	case p.Error != "":
		return 0, false
	case metric == metrics.ServerCPUPerGB:
		x = p.Server.CPUSeconds / float64(max(1, p.Server.Bytes)) * 1e9
	case metric == metrics.RetransmitShare:
		return record.RetransmitShare(p.Client.Retransmits+p.Server.Retransmits, p.Client.Bytes), true
	case c.primary == metrics.Throughput:
		x = p.Teller(c.workload.Traffic().Tool == spec.ToolNative).BitsPerSecond
	case len(tr.PerPair) == 1: // the trial has the value of its only pair
		x = tr.Metrics[c.primary]
	case p.Client.Latency == "":
		x = p.Client.Percentiles[c.primary]
	default:
		h, err := record.DecodeHistogram(p.Client.Latency)
		if err != nil {
			return 0, false
		}
		x = float64(h.ValueAtQuantile(50)) / 1e9
	}
	return x, x > 0
}

// compareNatural compares names so that node2 comes before node10.
func compareNatural(a, b string) int {
	digits := func(s string) (head, number string) {
		head = strings.TrimRight(s, "0123456789")
		return head, strings.TrimLeft(s[len(head):], "0")
	}
	headA, a1 := digits(a)
	headB, b1 := digits(b)
	return cmp.Or(cmp.Compare(headA, headB), cmp.Compare(len(a1), len(b1)), cmp.Compare(a1, b1), cmp.Compare(a, b))
}

func (g *grid) mesh(c *cell, margin float64) Mesh {
	m := Mesh{
		Variant: c.variant.Name, Workload: c.workload.Name, Metric: g.metric, Unit: metrics.Get(g.metric).Unit,
		Nodes: g.nodes, Links: []MeshLink{}, Outliers: []Outlier{},
	}
	for i, client := range g.nodes {
		for j, server := range g.nodes {
			var values []float64
			for _, block := range g.values {
				if x := block[i][j]; !math.IsNaN(x) {
					values = append(values, x)
				}
			}
			l := MeshLink{Client: client, Server: server}
			if l.N, l.Failed = g.outcomes(func(a, b int) bool { return a == i && b == j }); l.N > 0 {
				l.Mean, l.CI95 = Mean(values)
			}
			if l.N+l.Failed > 0 {
				m.Links = append(m.Links, l)
			}
		}
	}
	if g.metric == c.primary {
		m.Outliers = g.failing()
	}
	switch {
	case len(g.nodes) < fewNodes:
		m.Untested = "a bad node stands out only among four nodes or more"
	case len(g.values) < 2:
		m.Untested = "a test needs at least two blocks"
	default:
		m.Outliers = append(m.Outliers, g.outliers(metrics.Get(g.metric).HigherIsBetter(), margin)...)
	}
	for i := range m.Outliers {
		m.Outliers[i].Signs = c.signs(m.Outliers[i])
	}
	return m
}

// outcomes counts the blocks in which at least one of a set of links was measured, and the blocks in which all that
// were tried failed.
func (g *grid) outcomes(of func(client, server int) bool) (measured, failed int) {
	for b, block := range g.values {
		good, bad := false, false
		for i := range g.nodes {
			for j := range g.nodes {
				if of(i, j) {
					good, bad = good || !math.IsNaN(block[i][j]), bad || g.failed[b][[2]int{i, j}]
				}
			}
		}
		switch {
		case good:
			measured++
		case bad:
			failed++
		}
	}
	return measured, failed
}

// failing returns the nodes that failed in most blocks, and the links between other nodes that did. A node fails in a block if all
// its links do.
func (g *grid) failing() []Outlier {
	out := []Outlier{}
	down := make([]bool, len(g.nodes))
	for i, name := range g.nodes {
		n, failed := g.outcomes(func(a, b int) bool { return a == i || b == i })
		if down[i] = failed > n; down[i] {
			out = append(out, Outlier{Kind: OutlierClient, Client: name, N: n, Failed: failed}, Outlier{Kind: OutlierServer, Server: name, N: n, Failed: failed})
		}
	}
	for i, client := range g.nodes {
		for j, server := range g.nodes {
			n, failed := g.outcomes(func(a, b int) bool { return a == i && b == j })
			if failed > n && !down[i] && !down[j] {
				out = append(out, Outlier{Kind: OutlierLink, Client: client, Server: server, N: n, Failed: failed})
			}
		}
	}
	return out
}

// effect is the effect of a node or link on the log of the metric, by block.
type effect struct {
	Outlier
	values []float64
	own    estimate.Estimate
}

// outliers tests the effects of nodes as clients, of nodes as servers, and of links. The effect of a link is the part that its
// nodes do not explain. Each block gives one value of each effect, by a median polish of its links (Tukey, Exploratory Data
// Analysis, 1977, chapter 11), so a few bad links do not move the effects of nodes.
func (g *grid) outliers(higher bool, margin float64) []Outlier {
	sign := 1.0 // sign of an effect that makes things worse
	if higher {
		sign = -1
	}
	var clients, servers, links []*effect
	for _, name := range g.nodes {
		clients = append(clients, &effect{Outlier: Outlier{Kind: OutlierClient, Client: name}})
		servers = append(servers, &effect{Outlier: Outlier{Kind: OutlierServer, Server: name}})
	}
	for _, client := range g.nodes {
		for _, server := range g.nodes {
			links = append(links, &effect{Outlier: Outlier{Kind: OutlierLink, Client: client, Server: server}})
		}
	}
	add := func(e *effect, x float64) {
		if !math.IsNaN(x) {
			e.values = append(e.values, sign*x)
		}
	}
	for _, block := range g.values {
		byClient, byServer, rest := polish(g.logs(block))
		for i := range g.nodes {
			add(clients[i], byClient[i])
			add(servers[i], byServer[i])
			for j := range g.nodes {
				add(links[i*len(g.nodes)+j], rest[i][j])
			}
		}
	}
	var all []*effect
	var ps []float64
	for _, family := range [][]*effect{clients, servers, links} {
		family = slices.DeleteFunc(family, func(e *effect) bool { return len(e.values) < 2 })
		all, ps = append(all, family...), append(ps, testFamily(family, margin)...)
	}
	var out []Outlier
	for i, p := range estimate.Holm(ps) {
		if p > estimate.Alpha {
			continue
		}
		e := all[i]
		ci := e.own.Interval()
		e.N, e.P = e.own.N, p
		e.Ratio, e.CI95 = math.Exp(sign*e.own.Mean), [2]float64{math.Exp(sign * ci[0]), math.Exp(sign * ci[1])}
		slices.Sort(e.CI95[:])
		out = append(out, e.Outlier)
	}
	slices.SortStableFunc(out, func(a, b Outlier) int {
		link := func(o Outlier) int { return map[bool]int{true: 1}[o.Kind == OutlierLink] }
		return cmp.Or(link(a)-link(b), cmp.Compare(math.Abs(math.Log(b.Ratio)), math.Abs(math.Log(a.Ratio))))
	})
	return out
}

// testFamily returns the p-values of effects. Positive effects are bad, and an effect must exceed the margin. The test shrinks
// the variance of an effect towards that of all effects, which has many degrees of freedom even if there are few blocks. Two
// more conditions protect against values that are not normal; p is 1 unless both hold. First, the effect is above 0 judged by
// its own scatter, so that one bad block among several does not count. Second, it stands out from the others, so that no node
// is named if nodes naturally differ.
func testFamily(family []*effect, margin float64) []float64 {
	if len(family) == 0 {
		return nil
	}
	var means, variances, df []float64
	for _, e := range family {
		e.own = estimate.Mean(e.values, 0)
		means, variances, df = append(means, e.own.Mean), append(variances, estimate.SumOfSquares(e.values)/e.own.DF), append(df, e.own.DF)
	}
	variances, df = moderated(variances, df)
	middle := median(means)
	var apart []float64
	for _, x := range means {
		apart = append(apart, math.Abs(x-middle))
	}
	// The median distance of a normal distribution is 0.6745 standard deviations. It is about as precise as the standard
	// deviation of half as many values.
	n := float64(len(family))
	reach := estimate.Student((n-1)/2).Quantile(1-estimate.Alpha/2/n) * median(apart) / distuv.UnitNormal.Quantile(0.75)
	ps := make([]float64, len(family))
	for i, e := range family {
		ps[i] = 1
		if ci := e.own.Interval(); ci[0] <= 0 || e.own.Mean-middle <= reach || e.own.Mean <= margin {
			continue
		}
		se := math.Sqrt(variances[i] / float64(e.own.N))
		if ps[i] = 0; se > 0 {
			ps[i] = estimate.Student(df[i]).Survival((e.own.Mean - margin) / se)
		}
	}
	return ps
}

// polish splits the links of a block: value = typical + client + server + rest. The medians of the clients' and of the servers'
// effects are 0. Missing values are NaN.
func polish(block [][]float64) (clients, servers []float64, rest [][]float64) {
	n := len(block)
	clients, servers = make([]float64, n), make([]float64, n)
	for _, row := range block {
		rest = append(rest, slices.Clone(row))
	}
	const rounds, still = 50, 1e-9
	for range rounds {
		moved := 0.0
		for i := range n {
			by := median(rest[i])
			clients[i] += by
			for j := range n {
				rest[i][j] -= by
			}
			if math.Abs(by) > moved { // false for NaN, if there is no link
				moved = math.Abs(by)
			}
		}
		for j := range n {
			column := make([]float64, n)
			for i := range n {
				column[i] = rest[i][j]
			}
			by := median(column)
			servers[j] += by
			for i := range n {
				rest[i][j] -= by
			}
			if math.Abs(by) > moved {
				moved = math.Abs(by)
			}
		}
		if moved < still {
			break
		}
	}
	for _, effects := range [][]float64{clients, servers} {
		middle := median(effects)
		for i := range effects {
			effects[i] -= middle
		}
	}
	return clients, servers, rest
}

// median returns the median of the numbers in xs, or NaN if there are none.
func median(xs []float64) float64 {
	xs = slices.DeleteFunc(slices.Clone(xs), math.IsNaN)
	if len(xs) == 0 {
		return math.NaN()
	}
	slices.Sort(xs)
	return stat.Mean(xs[(len(xs)-1)/2:len(xs)/2+1], nil)
}

// A sign must exceed these limits.
const (
	signTimes = 3     // times the value of the others
	signShare = 0.001 // of the segments
	signDrops = 10    // packets per trial
)

// signs returns further observations about an outlier, from the trials of a cell.
func (c *cell) signs(o Outlier) []Sign {
	var signs []Sign
	if s, ok := c.retransmits(o); ok {
		signs = append(signs, s)
	}
	if o.Kind == OutlierLink {
		return signs
	}
	node := o.Client + o.Server
	if c.took(node) == record.TookParavirtual && c.vfUp(node) {
		signs = append(signs, Sign{Kind: SignVFIdle})
	}
	return append(signs, c.drops(node)...)
}

func (c *cell) retransmits(o Outlier) (Sign, bool) {
	var its, others struct{ again, bytes uint64 }
	for _, tr := range c.all() {
		for _, p := range tr.PerPair {
			to := &others
			if (o.Client == "" || o.Client == nodeOf(p.Client.Place)) && (o.Server == "" || o.Server == nodeOf(p.Server.Place)) {
				to = &its
			}
			to.again += p.Client.Retransmits + p.Server.Retransmits
			to.bytes += p.Client.Bytes
		}
	}
	s := Sign{Kind: SignRetransmits, Value: record.RetransmitShare(its.again, its.bytes), Others: record.RetransmitShare(others.again, others.bytes)}
	return s, s.Value > signShare && s.Value > signTimes*s.Others
}

// took returns which device the packets of a node's NICs used, over all trials.
func (c *cell) took(node string) string {
	var nics []record.VFUse
	for _, tr := range c.all() {
		for _, u := range tr.VFs {
			if u.Place == node {
				nics = append(nics, u)
			}
		}
	}
	way, _ := record.Took(nics)
	return way
}

// vfUp reports whether a node has a virtual function that was up.
func (c *cell) vfUp(node string) bool {
	return slices.ContainsFunc(c.all(), func(tr *record.Trial) bool {
		return slices.ContainsFunc(tr.VFs, func(u record.VFUse) bool { return u.Place == node && u.Up })
	})
}

// drops returns the devices of a node that dropped far more packets than devices of the same name on other nodes.
func (c *cell) drops(node string) (signs []Sign) {
	counts := make(map[string]map[string]float64) // by device, then place
	for _, tr := range c.all() {
		for _, d := range tr.Devices {
			if counts[d.Name] == nil {
				counts[d.Name] = make(map[string]float64)
			}
			counts[d.Name][d.Place] += float64(d.RxDropped + d.TxDropped + d.RxErrors + d.TxErrors)
		}
	}
	for device, by := range counts {
		var others []float64
		for place, n := range by {
			if place != node {
				others = append(others, n)
			}
		}
		s := Sign{Kind: SignDrops, Device: device, Value: by[node]}
		if len(others) > 0 {
			s.Others = median(others)
		}
		if s.Value > signDrops*float64(len(c.all())) && s.Value > signTimes*s.Others {
			signs = append(signs, s)
		}
	}
	slices.SortFunc(signs, func(a, b Sign) int { return cmp.Compare(a.Device, b.Device) })
	return signs
}
