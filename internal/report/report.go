// Package report shows a result: one model, built once from the experiment,
// its summary and its trials, and written as HTML, Markdown, CSV, JSON and
// plain text, with figures as SVG, PNG and PDF. It words and draws; it judges
// nothing (see internal/stats) and reads no folder (see internal/record), so an
// old result renders anywhere.
package report

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/stats"
)

// Model is everything that a report shows, worded and formatted. New makes it;
// the writers lay it out.
type Model struct {
	Name        string
	Description string
	// Unfinished says what the run still lacks, empty where that is nothing.
	Unfinished string
	// LeftOut says which variants could not be applied, and why.
	LeftOut []string
	// Headline is the result in a sentence or two, More what else there is to say of it.
	Headline string
	More     []string
	// Blocks is the largest number of blocks that any figure rests on.
	Blocks int
	Costs  []Cost
	Advice []Advice
	// Limits say what held each cell back, and Bounds what more backends of a balancer
	// bring. Prices is nil where nothing has one.
	Limits []LimitLine
	Bounds []string
	Prices *PriceTable
	// Expected is what became of the experiment's expectations.
	Expected []Expected
	// Variants and Workloads say what was compared and under which traffic.
	Variants  []Definition
	Workloads []Definition
	// Tables compare the variants, one workload and metric each.
	Tables      []Table
	Warnings    []Warning
	Failures    []Failure
	Environment record.Environment
	Machines    []Machine

	exp     *v1alpha1.Experiment
	summary *stats.Summary
	trials  []record.Trial
	rows    map[cell]*stats.Row
	figures []Figure
	// conclusion is Headline and More, a sentence each.
	conclusion []string
}

// Definition is a name and what it stands for.
type Definition struct{ Name, Text string }

// Table compares the variants of one workload by one metric.
type Table struct {
	ID, Workload, Metric string
	// Title is the workload and the metric, Unit that of every value.
	Title, Unit string
	// Better says which direction is: "higher" or "lower".
	Better string
	// Judged tables speak of what the workload is run for; the others explain.
	Judged bool
	Pairs  []int
	Rows   []Row
	// Baselines are the variants that others are compared with here.
	Baselines []string
	// One is where the ratio 1 stands on the scale of Line's bar, in %.
	One float64
}

// Row is a variant's line at each of the table's pairs.
type Row struct {
	Variant string
	Cells   []Line
}

// Line is one cell of the experiment: one variant at one number of pairs.
type Line struct {
	N        int
	Estimate Estimate
	// Missing says why there is no estimate.
	Missing string
	// Baseline is a variant that others are compared with and itself is not.
	Baseline bool
	// Compared is false for a baseline; what follows is then empty.
	Compared bool
	Versus   string
	Ratio    Estimate
	Verdict  stats.Verdict
	P        string
	// Lo, At and Hi place the ratio and its interval on a bar, in % of its
	// width on a logarithmic scale. Bar is "in", "below" or "above" the scale,
	// and empty where there is no interval.
	Bar        string
	Lo, At, Hi float64
	// Notes are the codes of warnings that hold for this cell, not for all.
	Notes []string

	ratio    interval
	at       float64
	question question
}

// Warning is one code with each of its messages and where it holds.
type Warning struct {
	Code    string
	Entries []Entry
}

// Entry is a message and the cells that it holds for, in words.
type Entry struct{ Message, Where string }

// Failure is an error and the trials that it ended.
type Failure struct {
	Error string
	Where []string
}

// Machine is the nodes that are alike in all that the environment records.
type Machine struct {
	Nodes string
	Facts []Definition
	Links []record.Link
}

// cell is one figure's place in the experiment; metric is empty where a trial
// as a whole is meant.
type cell struct {
	variant, workload string
	pairs             int
	metric            string
}

// New computes what a report of these results shows. It keeps the summary and
// the trials but changes neither.
func New(exp *v1alpha1.Experiment, summary *stats.Summary, trials []record.Trial, env record.Environment) *Model {
	m := &Model{
		Name:        exp.Metadata.Name,
		Description: exp.Metadata.Description,
		Environment: env,
		exp:         exp,
		summary:     summary,
		trials:      trials,
		rows:        map[cell]*stats.Row{},
	}
	for i := range summary.Rows {
		r := &summary.Rows[i]
		m.rows[cell{r.Variant, r.Workload, r.Pairs, r.Metric}] = r
		m.Blocks = max(m.Blocks, r.N)
	}
	m.Variants, m.Workloads = definitions(exp)
	m.Warnings = m.warnings()
	m.Failures = failures(trials)
	m.Tables = m.tables()
	m.Costs = m.costs()
	m.Advice = m.advice()
	m.Limits, m.Bounds, m.Prices = m.limits(), m.bounds(), m.prices()
	m.Expected = expectations(summary.Expected)
	m.Unfinished = unfinished(summary.Unfinished)
	for _, l := range env.LeftOut {
		m.LeftOut = append(m.LeftOut, "Left out here: "+l.String())
	}
	m.conclusion = m.conclude()
	short := min(len(m.conclusion), 2)
	m.Headline, m.More = strings.Join(m.conclusion[:short], " "), m.conclusion[short:]
	m.Machines = machines(env.Nodes)
	m.figures = m.drawFigures()
	return m
}

// unfinished is a sentence for people of what a summary says.
func unfinished(text string) string {
	if text == "" {
		return ""
	}
	return "This run is unfinished: " + text + "."
}

func (m *Model) pairsOf(w v1alpha1.Workload) []int {
	p := m.exp.Spec.Pairs
	if len(w.Pairs) > 0 {
		p = w.Pairs
	}
	return slices.Compact(slices.Sorted(slices.Values(p)))
}

func (m *Model) variant(name string) v1alpha1.Variant {
	for _, v := range m.exp.Spec.Variants {
		if v.Name == name {
			return v
		}
	}
	return v1alpha1.Variant{Name: name}
}

func (m *Model) path(v v1alpha1.Variant) v1alpha1.Path {
	if v.Path != nil {
		return *v.Path
	}
	return m.exp.Spec.Path
}

func (m *Model) native(v v1alpha1.Variant) bool { return m.path(v).Native != nil }

// tables are one a workload and metric: those that the workload is judged by,
// whether they gave numbers or not, then the rest in alphabetical order.
func (m *Model) tables() []Table {
	var out []Table
	everywhere := m.everywhere()
	for _, w := range m.exp.Spec.Workloads {
		measured := map[string]bool{}
		for c := range m.rows {
			if c.workload == w.Name {
				measured[c.metric] = true
			}
		}
		first := stats.Judged(w)
		if len(measured) > 0 {
			first = slices.DeleteFunc(first, func(metric string) bool { return !measured[metric] })
		}
		for _, metric := range first {
			delete(measured, metric)
		}
		for i, metric := range append(first, slices.Sorted(maps.Keys(measured))...) {
			t := m.table(w, metric, everywhere)
			t.Judged = i < len(first)
			out = append(out, t)
		}
	}
	return out
}

func (m *Model) table(w v1alpha1.Workload, metric string, everywhere map[string]bool) Table {
	q := quantityOf(metric)
	t := Table{
		ID: slug(w.Name, metric), Workload: w.Name, Metric: metric,
		Title: w.Name + " " + q.name, Unit: q.unit, Better: "lower",
		Pairs: m.pairsOf(w),
	}
	if record.HigherIsBetter(metric) {
		t.Better = "higher"
	}
	for _, v := range m.exp.Spec.Variants {
		row := Row{Variant: v.Name}
		for _, p := range t.Pairs {
			l := m.line(cell{v.Name, w.Name, p, metric}, q, everywhere)
			if l.Compared && !slices.Contains(t.Baselines, l.Versus) {
				t.Baselines = append(t.Baselines, l.Versus)
			}
			row.Cells = append(row.Cells, l)
		}
		t.Rows = append(t.Rows, row)
	}
	for _, row := range t.Rows {
		for i := range row.Cells {
			row.Cells[i].Baseline = !row.Cells[i].Compared && slices.Contains(t.Baselines, row.Variant)
		}
	}
	t.placeBars()
	return t
}

// placeBars chooses a scale on which twice and half are equally far. The host
// network is often so far away that the rest would be one dot, so its bars may
// fall off the scale where there is something to choose from.
func (t *Table) placeBars() {
	lo, hi := 1.0, 1.0
	for _, choices := range []bool{true, false} {
		for _, row := range t.Rows {
			for _, l := range row.Cells {
				if l.Bar != "" && (!choices || l.question == choice) {
					lo, hi = min(lo, l.ratio.lo), max(hi, l.ratio.hi)
				}
			}
		}
		if lo < hi {
			break
		}
	}
	at := func(r float64) float64 {
		if lo == hi {
			return 50
		}
		const air = 4
		return math.Round(10*(air+(100-2*air)*math.Log(r/lo)/math.Log(hi/lo))) / 10
	}
	t.One = at(1)
	for _, row := range t.Rows {
		for i := range row.Cells {
			l := &row.Cells[i]
			switch {
			case l.Bar == "":
			case l.at > hi:
				l.Bar = "above"
			case l.at < lo:
				l.Bar = "below"
			default:
				l.Lo, l.At, l.Hi = max(0, at(l.ratio.lo)), at(l.at), min(100, at(l.ratio.hi))
			}
		}
	}
}

func (m *Model) line(c cell, q quantity, everywhere map[string]bool) Line {
	r := m.rows[c]
	if r == nil || r.N == 0 {
		return Line{Missing: m.whyMissing(c)}
	}
	mean := r.Mean * q.scale
	l := Line{
		N: r.N,
		Estimate: estimate(mean, of(r.CI95, r.N).mapped(func(x float64) float64 { return x * q.scale }),
			decimalsFor(mean)),
	}
	for _, w := range r.Warnings {
		if !everywhere[w.Code] && !slices.Contains(l.Notes, w.Code) {
			l.Notes = append(l.Notes, w.Code)
		}
	}
	v := r.Versus
	if v == nil {
		return l
	}
	l.ratio, l.at, l.question = of(v.CI95, v.N), v.Ratio, m.question(r)
	l.Compared, l.Versus, l.Verdict, l.P = true, v.Baseline, v.Verdict, pValue(v.P)
	l.Ratio = estimate(v.Ratio, l.ratio, 2)
	if l.ratio.known() && l.ratio.lo > 0 {
		l.Bar = "in"
	}
	return l
}

// of is the interval of n blocks; one block has none, whatever was written.
func of(ci [2]float64, n int) interval {
	if n < 2 {
		return interval{math.Inf(-1), math.Inf(1)}
	}
	return interval{ci[0], ci[1]}
}

func (m *Model) whyMissing(c cell) string {
	why := "not measured"
	for _, t := range m.trials {
		if t.Variant != c.variant || t.Workload != c.workload || t.Pairs != c.pairs {
			continue
		}
		if t.Status == record.StatusOK {
			return "not reported"
		}
		why = "failed"
	}
	return why
}

func (m *Model) warnings() []Warning {
	type message struct{ code, text string }
	var order []message
	held := map[message][]cell{}
	have := map[cell]map[string]bool{} // codes, by whole cell
	add := func(c cell, w record.Warning) {
		key := message{w.Code, w.Message}
		if held[key] == nil {
			order = append(order, key)
		}
		if !slices.Contains(held[key], c) {
			held[key] = append(held[key], c)
		}
		if have[c] == nil {
			have[c] = map[string]bool{}
		}
		have[c][w.Code] = true
	}
	for _, r := range m.summary.Rows {
		for _, w := range r.Warnings {
			add(cell{r.Variant, r.Workload, r.Pairs, ""}, w)
		}
	}
	// A summary sums up what its trials warned of; what it left out counts too.
	summed := map[cell]map[string]bool{}
	for c, codes := range have {
		summed[c] = maps.Clone(codes)
	}
	for _, t := range m.trials {
		c := cell{t.Variant, t.Workload, t.Pairs, ""}
		for _, w := range t.Warnings {
			if !summed[c][w.Code] {
				add(c, w)
			}
		}
	}
	var out []Warning
	for _, key := range order {
		i := slices.IndexFunc(out, func(w Warning) bool { return w.Code == key.code })
		if i < 0 {
			i = len(out)
			out = append(out, Warning{Code: key.code})
		}
		out[i].Entries = append(out[i].Entries, Entry{key.text, m.words(held[key])})
	}
	return out
}

// everywhere are the codes that every cell with numbers carries; to repeat
// them on each line would hide the others.
func (m *Model) everywhere() map[string]bool {
	count := map[string]int{}
	for _, r := range m.summary.Rows {
		seen := map[string]bool{}
		for _, w := range r.Warnings {
			if !seen[w.Code] {
				count[w.Code]++
			}
			seen[w.Code] = true
		}
	}
	maps.DeleteFunc(count, func(_ string, n int) bool { return n < len(m.summary.Rows) })
	all := map[string]bool{}
	for code := range count {
		all[code] = true
	}
	return all
}

// words names cells, or counts them where they are many. Everywhere is where
// there are numbers.
func (m *Model) words(cells []cell) string {
	measured := map[cell]bool{}
	for c := range m.rows {
		c.metric = ""
		measured[c] = true
	}
	total := len(measured)
	if total > 1 && len(cells) >= total {
		return "everywhere"
	}
	if len(cells) > 8 {
		return fmt.Sprintf("%d of %d cells", len(cells), total)
	}
	names := make([]string, 0, len(cells))
	for _, c := range cells {
		names = append(names, fmt.Sprintf("%s %s %s", c.variant, c.workload, pairs(c.pairs)))
	}
	return list(names)
}

func failures(trials []record.Trial) []Failure {
	var out []Failure
	for _, t := range trials {
		if t.Status == record.StatusOK {
			continue
		}
		i := slices.IndexFunc(out, func(f Failure) bool { return f.Error == t.Error })
		if i < 0 {
			i = len(out)
			out = append(out, Failure{Error: t.Error})
		}
		out[i].Where = append(out[i].Where,
			fmt.Sprintf("%s %s %s, block %d, attempt %d", t.Variant, t.Workload, pairs(t.Pairs), t.Block, t.Attempt))
	}
	return out
}

func definitions(exp *v1alpha1.Experiment) (variants, workloads []Definition) {
	for _, v := range exp.Spec.Variants {
		path := exp.Spec.Path
		if v.Path != nil {
			path = *v.Path
		}
		parts := []string{pathName(path)}
		if v.NIC != nil {
			parts = append(parts, nicName(*v.NIC))
		}
		for _, a := range v.Accelerate {
			parts = append(parts, a.String())
		}
		for _, w := range slices.Sorted(maps.Keys(v.Tools)) {
			parts = append(parts, fmt.Sprintf("%s by %s", w, v.Tools[w]))
		}
		if v.Versus != "" {
			parts = append(parts, "compared with "+v.Versus)
		}
		variants = append(variants, Definition{v.Name, strings.Join(parts, "; ")})
	}
	for _, w := range exp.Spec.Workloads {
		kind, t := "stream", w.Stream
		switch {
		case w.PingPong != nil:
			kind, t = "ping-pong", w.PingPong
		case w.UnderLoad != nil:
			kind, t = "under load", w.UnderLoad
		case w.Connect != nil:
			kind, t = "connect", w.Connect
		case w.HTTP != nil && w.HTTP.Page:
			kind, t = "HTTP page", w.HTTP
		case w.HTTP != nil:
			kind, t = "HTTP", w.HTTP
		}
		if t == nil {
			t = &v1alpha1.Traffic{}
		}
		parts := []string{kind}
		if t.Protocol != "" {
			parts = append(parts, strings.ToUpper(t.Protocol))
		}
		if t.IP != 0 {
			parts = append(parts, fmt.Sprintf("IPv%d", t.IP))
		}
		switch {
		case t.Size == 0:
		case t.Page:
			parts = append(parts, fmt.Sprintf("a script of %s", size(t.Size)))
		case w.HTTP != nil:
			parts = append(parts, fmt.Sprintf("objects of %s", size(t.Size)))
		default:
			parts = append(parts, fmt.Sprintf("messages of %s", size(t.Size)))
		}
		if t.Connections != 0 {
			parts = append(parts, plural(t.Connections, "connection")+" a pair")
		}
		switch {
		case t.Page:
			parts = append(parts, fmt.Sprintf("%d users/s", t.Rate))
		case t.Rate != 0:
			parts = append(parts, fmt.Sprintf("%d messages/s", t.Rate))
		}
		if t.Requests != 0 {
			parts = append(parts, plural(t.Requests, "request"))
		}
		if w.HTTP != nil && !t.Page {
			parts = append(parts, map[bool]string{true: "kept alive", false: "one a request"}[t.KeepAlive])
		}
		if t.Duration != 0 {
			parts = append(parts, t.Duration.String())
		}
		if t.Tool != "" && t.Tool != v1alpha1.ToolNative {
			parts = append(parts, "by "+t.Tool)
		}
		workloads = append(workloads, Definition{w.Name, strings.Join(parts, ", ")})
	}
	return variants, workloads
}

func pathName(p v1alpha1.Path) string {
	switch {
	case p.Native != nil:
		return "host network"
	case p.VXLAN != nil && p.VXLAN.Shape != "":
		return "VXLAN (" + p.VXLAN.Shape + ")"
	case p.VXLAN != nil:
		return "VXLAN"
	case p.VXLANFlow != nil:
		return "VXLAN by flow"
	case p.UDP != nil:
		return "UDP in user space"
	case p.Routed != nil:
		return "routed"
	case p.EBPF != nil:
		return "eBPF"
	case p.Pod != nil:
		return "pod IP"
	case p.Service != nil:
		return "ClusterIP"
	case p.Bridge != nil:
		return "bridge of one node"
	case p.Balancer != nil:
		return balancerName(*p.Balancer)
	}
	return "path not named"
}

func balancerName(b v1alpha1.Balancer) string {
	name := "load balancer"
	if b.Proxy != "" {
		name += " (" + b.Proxy + ")"
	}
	name += ", " + plural(b.Backends, "backend")
	for _, role := range []string{v1alpha1.RoleClient, v1alpha1.RoleProxy, v1alpha1.RoleBackend} {
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

func nicName(n v1alpha1.NIC) string {
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

func machines(nodes []record.Node) []Machine {
	var out []Machine
	var names [][]string
	for _, n := range nodes {
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
			{"Interrupt from CPU to CPU, there and back", interrupt(n.InterruptSeconds)},
			{"Role", n.Role},
			{"Proxy", n.Proxy},
			{"Rate of the NIC", bitRate(n.NICRate)},
		}
		facts = append(facts, sorted(n.Tools)...)
		facts = append(facts, sorted(n.Sysctls)...)
		facts = slices.DeleteFunc(facts, func(d Definition) bool { return d.Text == "" })
		i := slices.IndexFunc(out, func(m Machine) bool {
			return slices.Equal(m.Facts, facts) && slices.EqualFunc(m.Links, n.Links, sameLink)
		})
		if i < 0 {
			i = len(out)
			out = append(out, Machine{Facts: facts, Links: n.Links})
			names = append(names, nil)
		}
		names[i] = append(names[i], n.Name)
	}
	for i := range out {
		out[i].Nodes = list(names[i])
	}
	return out
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

func size(b v1alpha1.Bytes) string {
	if s := b.String(); strings.ContainsAny(s[len(s)-1:], "0123456789") {
		return plural(int(b), "byte")
	}
	return b.String()
}

func interrupt(seconds float64) string {
	if seconds == 0 {
		return ""
	}
	return significant(seconds*1e6) + " µs"
}

func bitRate(bits float64) string {
	if bits == 0 {
		return ""
	}
	return significant(bits*1e-9) + " Gb/s"
}

func memory(bytes uint64) string {
	if bytes == 0 {
		return ""
	}
	return significant(float64(bytes)/(1<<30)) + " GiB"
}
