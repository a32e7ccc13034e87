// Package report shows a result: one model, built once from the experiment, its summary and its trials, and
// written in many formats. It words and lays out; it judges nothing (see internal/stats), reads no folder (see
// internal/record) and draws nothing itself (see draw), so an old result renders anywhere.
//
// New builds the Model: table.go, conclusion.go, mesh.go and others each build a part of it, figure_*.go its figures.
// Changes and Beside show two results. Each format has a file, with everything that it writes: html.go,
// markdown.go, csv.go, json.go, text.go, junit.go, openmetrics.go, otlp.go, bencher.go; formats.go lists them.
package report

import (
	"slices"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

// Model has everything that a report shows, worded and formatted. New makes it; the formats lay it out.
type Model struct {
	// Index is the address of the list of results that the page belongs to; "" for a page by itself.
	Index       string
	Name        string
	Description string
	// Unfinished says what the run still lacks. It is empty for a complete run.
	Unfinished string
	// LeftOut says which variants could not be applied, and why.
	LeftOut []string
	// Design says how the trials were arranged, unless it was in blocks.
	Design string
	// Headline answers in a sentence, More adds the other sentences, and Forest answers in
	// a picture.
	Headline string
	More     []string
	Forest   *Forest
	// Blocks is the largest number of blocks behind any figure.
	Blocks int
	Costs  []Cost
	Advice []Advice
	// Crossovers say, for each series that is compared with another one, which of them is
	// faster, and where.
	Crossovers []string
	// Limits say what limited each cell, and Bounds whether more backends of a balancer help.
	// Prices is nil if nothing has a price.
	Limits []LimitLine
	Bounds []string
	Prices *PriceTable
	// Meshes are matrices of every node with every other one.
	Meshes []Mesh
	// Expected has the outcomes of the experiment's expectations.
	Expected []Expected
	// Published has the published figures beside ours, by source. PublishedCount says how
	// many of them agree.
	Published      []PublishedSource
	PublishedCount string
	// Variants and Workloads say what was compared and under which traffic, and Clusters which networks the clusters have.
	Variants  []Definition
	Workloads []Definition
	Clusters  []Definition
	// Tables compare the variants, one workload and metric each.
	Tables      []Table
	Warnings    []Warning
	Failures    []Failure
	Environment record.Environment
	Machines    []Machine
	// Figures has the figures in the order of the report.
	Figures []Figure

	exp     *spec.Experiment
	summary *stats.Summary
	trials  []record.Trial
	rows    map[cell]*stats.Row
	// conclusion has Headline and More in the order of the conclusions.
	conclusion []string
}

// Definition is a name and its meaning.
type Definition struct{ Name, Text string }

// cell identifies a value of the experiment. metric is empty for a whole trial.
type cell struct {
	variant, workload string
	pairs             int
	metric            string
}

func (c cell) String() string { return c.variant + " " + c.workload + " " + pairs(c.pairs) }

// holds reports whether a trial belongs to this cell and succeeded.
func (c cell) holds(t record.Trial) bool {
	return t.Status == record.StatusOK && t.Variant == c.variant && t.Workload == c.workload && t.Pairs == c.pairs
}

// New computes what a report of these results shows. It keeps the summary and the trials but changes neither.
func New(exp *spec.Experiment, summary *stats.Summary, trials []record.Trial, env record.Environment) *Model {
	m := &Model{
		Name:        exp.Metadata.Name,
		Description: exp.Metadata.Description,
		Environment: env,
		exp:         exp,
		summary:     summary,
		trials:      record.LastEntries(trials),
		rows:        map[cell]*stats.Row{},
	}
	for i := range summary.Rows {
		r := &summary.Rows[i]
		m.rows[cell{r.Variant, r.Workload, r.Pairs, r.Metric}] = r
		m.Blocks = max(m.Blocks, r.N)
	}
	m.describeSetup(trials)
	everywhere := m.everywhere()
	m.summarizeWarnings(everywhere)
	m.Failures = failures(trials)
	m.Tables = m.tables(everywhere)
	m.Costs = m.costs()
	m.Advice = m.advice()
	m.Crossovers = m.crossovers()
	m.Limits, m.Bounds, m.Prices = m.limits(), m.bounds(), m.prices()
	m.Meshes = m.meshes()
	m.Expected = expectations(summary.Expected)
	m.Published, m.PublishedCount = publishedFigures(summary.Published)
	m.Unfinished = unfinished(summary.Unfinished, m.Imported())
	m.conclude()
	m.Forest = m.forest()
	m.Figures = m.drawFigures()
	return m
}

// describeSetup fills in what was measured, and where.
func (m *Model) describeSetup(trials []record.Trial) {
	m.Variants, m.Workloads = definitions(m.exp)
	for i, v := range m.Variants {
		for _, text := range []string{vfText(trials, v.Name), fastText(trials, v.Name)} {
			if text != "" {
				m.Variants[i].Text += "; " + text
			}
		}
	}
	m.Clusters = clusters(m.Environment.Clusters)
	m.Design = design(m.exp, trials)
	for _, l := range m.Environment.LeftOut {
		m.LeftOut = append(m.LeftOut, "Left out here: "+l.String())
	}
	m.Machines = machines(m.Environment.Nodes)
}

// network describes the network of the cluster in which a variant ran, if there are several clusters: "flannel vxlan, kube-proxy
// nftables". It is empty if the network is not known.
func (m *Model) network(v spec.Variant) string {
	for _, c := range m.Environment.Clusters {
		if v.Cluster != "" && c.Name == v.Cluster {
			return c.Network()
		}
	}
	return ""
}

// unfinished turns the text of a summary into a sentence for people.
func unfinished(text string, imported bool) string {
	switch {
	case text == "":
		return ""
	case imported:
		return "Some results are missing: " + text + "."
	}
	return "This run is unfinished: " + text + "."
}

// InCluster reports whether the result is from a cluster.
func (m *Model) InCluster() bool { return m.exp.Spec.Target.Kubernetes != nil }

// InLab reports whether the result was measured between network namespaces of one machine.
func (m *Model) InLab() bool { return m.exp.Spec.Target.Lab != nil }

// Imported reports whether other programs measured the result, so that there is no run to resume.
func (m *Model) Imported() bool { return m.exp.Spec.Target.Imported != nil }

// pairsOf returns the numbers of pairs of a workload, rising.
func (m *Model) pairsOf(w spec.Workload) []int {
	return slices.Compact(slices.Sorted(slices.Values(m.exp.PairsOf(w))))
}

func (m *Model) variant(name string) spec.Variant {
	for _, v := range m.exp.Spec.Variants {
		if v.Name == name {
			return v
		}
	}
	return spec.Variant{Name: name}
}

// findOrAdd returns the element that matches, or adds one if there is none.
func findOrAdd[T any](all *[]T, matches func(T) bool, added T) *T {
	i := slices.IndexFunc(*all, matches)
	if i < 0 {
		i = len(*all)
		*all = append(*all, added)
	}
	return &(*all)[i]
}

// native reports whether a variant uses the host network.
func (m *Model) native(v spec.Variant) bool { return m.exp.PathOf(v).Native != nil }

// baselines returns all variants that others are compared with, in the file's order.
func (m *Model) baselines() []string {
	var out []string
	for _, v := range m.exp.Spec.Variants {
		if slices.ContainsFunc(m.summary.Rows, func(r stats.Row) bool {
			return r.Versus != nil && r.Versus.Baseline == v.Name
		}) {
			out = append(out, v.Name)
		}
	}
	return out
}

// comparison is a kind of comparison.
type comparison int

const (
	// overlayCost compares an overlay with the host network.
	overlayCost comparison = iota
	// podChoice compares two ways to run the same pods.
	podChoice
	// otherComparison compares tools, NICs or hosts: nothing that one could switch on.
	otherComparison
)

// hasComparison reports whether a row has a comparison of this kind, with a finite ratio.
func (m *Model) hasComparison(r *stats.Row, kind comparison) bool {
	return r != nil && r.Versus != nil && drawable(r.Versus) && m.comparison(r) == kind
}

func (m *Model) comparison(r *stats.Row) comparison {
	v, b := m.variant(r.Variant), m.variant(r.Versus.Baseline)
	switch {
	case m.native(v) != m.native(b):
		return overlayCost
	case !m.exp.MeasuredAlike(v, b):
		return otherComparison
	}
	return podChoice
}
