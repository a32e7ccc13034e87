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

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

// Model has everything that a report shows, worded and formatted. New makes it; the writers lay
// it out.
type Model struct {
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
	// Limits say what limited each cell, and Bounds what more backends of a balancer bring.
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
	// Variants and Workloads say what was compared and under which traffic.
	Variants  []Definition
	Workloads []Definition
	// Tables compare the variants, one workload and metric each.
	Tables      []Table
	Warnings    []Warning
	Failures    []Failure
	Environment record.Environment
	Machines    []Machine

	exp     *spec.Experiment
	summary *stats.Summary
	trials  []record.Trial
	rows    map[cell]*stats.Row
	figures []Figure
	// conclusion has Headline and More in the order of the conclusions.
	conclusion []string
}

// Definition is a name and its meaning.
type Definition struct{ Name, Text string }

// Table compares the variants of one workload by one metric.
type Table struct {
	ID, Workload, Metric string
	// In a page of two results, Of names the result of the table, and Prefix is the prefix
	// of the anchors that the table links to.
	Of, Prefix string
	// Title is the workload and the metric, Unit that of every value.
	Title, Unit string
	// Better is the better direction: "higher" or "lower".
	Better string
	// Judged tables show what the workload is run for; the others explain.
	Judged bool
	Pairs  []int
	Rows   []Row
	// Baselines are the variants that others are compared with here.
	Baselines []string
	// Ticks are the axis under the bars.
	Ticks []Tick
	// Noted means that a row has Notes, in this table or in another one: all tables have
	// the same columns.
	Noted bool
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
	// Baseline is true for a variant that others are compared with, and that is compared
	// with none itself.
	Baseline bool
	// Compared is false for a baseline; what follows is then empty.
	Compared bool
	Versus   string
	Ratio    Estimate
	Verdict  stats.Verdict
	P        string
	// Bar is nil if there is no ratio to draw.
	Bar *Bar
	// Notes are the codes of warnings about this cell, except those about all cells.
	Notes []string

	row *stats.Row
	// theirs are published ratios to the same baseline.
	theirs []float64
}

// Failure is an error and the trials that it ended.
type Failure struct {
	Error string
	Where []string
}

// cell is the place of a figure in the experiment. metric is empty for a trial as a whole.
type cell struct {
	variant, workload string
	pairs             int
	metric            string
}

// holds reports whether a trial is a successful one of this cell.
func (c cell) holds(t record.Trial) bool {
	return t.Status == record.StatusOK && t.Variant == c.variant && t.Workload == c.workload && t.Pairs == c.pairs
}

// New computes what a report of these results shows. It keeps the summary and
// the trials but changes neither.
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
	m.Variants, m.Workloads = definitions(exp)
	for i, v := range m.Variants {
		if way := took(trials, v.Name); way != "" {
			m.Variants[i].Text += "; " + way
		}
	}
	m.Design = design(exp, trials)
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
	for _, l := range env.LeftOut {
		m.LeftOut = append(m.LeftOut, "Left out here: "+l.String())
	}
	costs, rest := m.conclude()
	var worse []string
	for _, mesh := range m.Meshes {
		worse = append(worse, mesh.Said...)
	}
	if len(worse) > 0 && len(m.exp.Spec.Variants) == 1 { // the mesh is the answer
		costs, rest = worse, nil
	} else {
		rest = append(rest, worse...)
	}
	m.conclusion = slices.Concat(costs, rest)
	m.Headline, m.More = m.conclusion[0], m.conclusion[1:]
	if len(rest) > 0 { // recommendations come first
		m.Headline, m.More = rest[0], slices.Concat(costs, rest[1:])
	}
	m.Forest = m.forest()
	m.Machines = machines(env.Nodes)
	m.figures = m.drawFigures()
	return m
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

func (m *Model) path(v spec.Variant) spec.Path {
	return m.exp.PathOf(v)
}

func (m *Model) native(v spec.Variant) bool { return m.path(v).Native != nil }

// tables returns a table for each workload and metric: first the metrics that the workload is
// judged by, even if they have no numbers, then the rest in alphabetical order.
func (m *Model) tables(everywhere map[string]bool) []Table {
	var out []Table
	for _, w := range m.exp.Spec.Workloads {
		measured := map[string]bool{}
		for c := range m.rows {
			if c.workload == w.Name {
				measured[c.metric] = true
			}
		}
		first := stats.Judged(m.exp, w)
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
	noted := slices.ContainsFunc(out, Table.noted)
	for i := range out {
		out[i].Noted = noted
	}
	return out
}

// noted reports whether some row of a table has notes.
func (t Table) noted() bool {
	return slices.ContainsFunc(t.Rows, func(r Row) bool {
		return slices.ContainsFunc(r.Cells, func(l Line) bool { return len(l.Notes) > 0 })
	})
}

func (m *Model) table(w spec.Workload, metric string, everywhere map[string]bool) Table {
	q := quantityOf(metric)
	t := Table{
		ID: slug(w.Name, metric), Workload: w.Name, Metric: metric,
		Title: w.Name + " " + q.name, Unit: q.unit, Better: string(metrics.Get(metric).Better),
		Pairs: m.pairsOf(w),
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
	t.draw(scaleOf(t.spreads(m)))
	return t
}

// spreads returns the values that the scale of a table must cover. The host network is often so
// far away that the others would shrink to one dot. So it may lie outside if there are others.
func (t *Table) spreads(m *Model) []spread {
	var choices, all []spread
	for _, row := range t.Rows {
		for _, l := range row.Cells {
			if !l.drawable() {
				continue
			}
			all = append(all, l.spread())
			if m.question(l.row) == choice {
				choices = append(choices, l.spread())
			}
		}
	}
	if len(choices) > 0 {
		return choices
	}
	return all
}

func (l Line) drawable() bool { return l.Compared && spreadOf(l.row).drawable() }

func (l Line) spread() spread { return spreadOf(l.row).beside(l.theirs) }

// draw makes the bars of all rows.
func (t *Table) draw(s scale) {
	t.Ticks = nil
	for _, row := range t.Rows {
		for i := range row.Cells {
			if l := &row.Cells[i]; l.drawable() {
				l.Bar, t.Ticks = s.bar(l.spread(), l.Verdict, tip(l.row)+tipOf(l.theirs)), s.ticks()
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
		N: r.N, row: r,
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
	l.Compared, l.Versus, l.Verdict, l.P = true, v.Baseline, v.Verdict, pValue(v.P)
	l.Ratio = estimate(v.Ratio, of(v.CI95, v.N), 2)
	l.theirs = theirs(m.summary.Published, r)
	return l
}

// of returns the interval of n blocks. One block has none, whatever ci is.
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
