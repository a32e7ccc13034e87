package report

import (
	"maps"
	"slices"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report/draw"
	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

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
	// Judged tables show the metrics that the workload is judged by; the others help to explain them.
	Judged bool
	Pairs  []int
	Rows   []Row
	// Baselines are the variants that others are compared with here.
	Baselines []string
	// Ticks are the axis under the bars.
	Ticks []draw.Tick
	// HasNotes means that a row has Notes, in this table or in another one: all tables have
	// the same columns.
	HasNotes bool
}

// Row has the cells of a variant, one for each number of pairs of the table.
type Row struct {
	Variant string
	// Network is that of the variant's cluster, if clusters are compared and it is known.
	Network string
	Cells   []Line
}

// Line is one cell of the experiment: one variant at one number of pairs.
type Line struct {
	N        int
	Estimate number.Estimate
	// Missing says why there is no estimate.
	Missing string
	// Baseline is true for a variant that is a baseline and has none itself.
	Baseline bool
	// Compared is false for a baseline. The following fields are then empty.
	Compared bool
	Versus   string
	Ratio    number.Estimate
	Verdict  stats.Verdict
	P        string
	// Bar is nil if there is no ratio to draw.
	Bar *Bar
	// Notes are the codes of warnings about this cell, except those about all cells.
	Notes []string

	row *stats.Row
	// published are published ratios to the same baseline.
	published []float64
}

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
	notes := slices.ContainsFunc(out, Table.hasNotes)
	for i := range out {
		out[i].HasNotes = notes
	}
	return out
}

// hasNotes reports whether some row of this table has notes.
func (t Table) hasNotes() bool {
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
		row := Row{Variant: v.Name, Network: m.network(v)}
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
	t.draw(draw.ScaleOf(t.ratios(m)))
	return t
}

// ratios returns the ratios that the scale of a table must cover. They leave out comparisons with the host network,
// unless there are no others: it is often so far away that everything else would shrink to one dot.
func (t *Table) ratios(m *Model) []draw.Ratio {
	var choices, all []draw.Ratio
	for _, row := range t.Rows {
		for _, l := range row.Cells {
			if !l.drawable() {
				continue
			}
			all = append(all, ratioOf(l.row, l.published))
			if m.comparison(l.row) == podChoice {
				choices = append(choices, ratioOf(l.row, l.published))
			}
		}
	}
	if len(choices) > 0 {
		return choices
	}
	return all
}

func (l Line) drawable() bool { return l.Compared && drawable(l.row.Versus) }

// draw makes the bars of all rows.
func (t *Table) draw(s draw.Scale) {
	t.Ticks = nil
	for _, row := range t.Rows {
		for i := range row.Cells {
			if l := &row.Cells[i]; l.drawable() {
				l.Bar, t.Ticks = newBar(s, ratioOf(l.row, l.published), l.row, l.published), s.Ticks()
			}
		}
	}
}

func (m *Model) line(c cell, q quantity, everywhere map[string]bool) Line {
	r := m.rows[c]
	if r == nil || r.N == 0 {
		return Line{Missing: m.whyMissing(c)}
	}
	l := Line{N: r.N, row: r, Estimate: q.estimate(r.Mean, r.CI95, r.N)}
	l.Notes = slices.DeleteFunc(warningCodes(r), func(code string) bool { return everywhere[code] })
	v := r.Versus
	if v == nil {
		return l
	}
	l.Compared, l.Versus, l.Verdict, l.P = true, v.Baseline, v.Verdict, number.PValue(v.P)
	l.Ratio = ratio(v.Ratio, v.CI95, v.N)
	l.published = m.publishedRatios(r)
	return l
}

// whyMissing says why a cell has no estimate.
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

// judgedTables returns the tables of the metrics that a workload is judged by.
func (m *Model) judgedTables(workload string) []Table {
	return slices.DeleteFunc(slices.Clone(m.Tables), func(t Table) bool {
		return t.Workload != workload || !t.Judged
	})
}
