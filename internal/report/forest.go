package report

import (
	"slices"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/report/draw"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

// Forest shows the answer in one picture: for each workload the best and the worst variant against their baseline, and
// the host network if it was measured. All bars share one scale of gains.
type Forest struct {
	Groups []ForestGroup
	Ticks  []draw.Tick
}

// ForestGroup is one workload, by its primary metric, and one baseline.
type ForestGroup struct {
	// Better is the better direction of the metric. Bars further right are better, whichever direction that is.
	Title, Better, Versus string
	Rows                  []ForestRow
}

// ForestRow is one comparison. Role says why it was chosen: "best", "worst" or "host network".
type ForestRow struct {
	Role, Variant string
	Pairs         int
	Change        string
	Verdict       stats.Verdict
	Bar           *Bar

	row       *stats.Row
	published []float64
}

func (r ForestRow) gain() draw.Ratio { return gainOf(r.row, r.published) }

// forest shows the subject of the headline: accelerators if there are some, otherwise
// tools or NICs, otherwise overlays and the host network. It is nil if nothing was
// compared.
func (m *Model) forest() *Forest {
	f := &Forest{}
	for _, kind := range []comparison{podChoice, otherComparison, overlayCost} {
		for _, w := range m.exp.Spec.Workloads {
			for _, versus := range m.baselines() {
				if rows := m.bestAndWorst(w, versus, kind); len(rows) > 0 {
					metric := rows[0].row.Metric
					f.Groups = append(f.Groups, ForestGroup{w.Name + " " + quantityOf(metric).name, string(metrics.Get(metric).Better), versus, rows})
				}
			}
		}
		if len(f.Groups) > 0 {
			f.draw(draw.ScaleOf(f.gains()))
			return f
		}
	}
	return nil
}

func (f *Forest) gains() []draw.Ratio {
	var all []draw.Ratio
	for _, g := range f.Groups {
		for _, r := range g.Rows {
			all = append(all, r.gain())
		}
	}
	return all
}

// HasRings reports whether a published figure is drawn.
func (f *Forest) HasRings() bool {
	return slices.ContainsFunc(f.Groups, func(g ForestGroup) bool {
		return slices.ContainsFunc(g.Rows, func(r ForestRow) bool { return len(r.published) > 0 })
	})
}

func (f *Forest) draw(s draw.Scale) {
	f.Ticks = s.Ticks()
	for _, g := range f.Groups {
		for i := range g.Rows {
			r := &g.Rows[i]
			r.Bar = newBar(s, r.gain(), r.row, r.published)
		}
	}
}

// bestAndWorst returns the rows of a workload and a baseline: the host network, the best and the worst variant.
func (m *Model) bestAndWorst(w spec.Workload, versus string, kind comparison) []ForestRow {
	metric := m.summary.Primary(w.Name)
	var rows, natives []*stats.Row
	for _, v := range m.exp.Spec.Variants {
		for _, p := range m.pairsOf(w) {
			r := m.rows[cell{v.Name, w.Name, p, metric}]
			switch {
			case r == nil || r.Versus == nil || r.Versus.Baseline != versus:
			case m.hasComparison(r, kind):
				rows = append(rows, r)
			case m.hasComparison(r, overlayCost) && m.native(v):
				natives = append(natives, r)
			}
		}
	}
	if len(rows) == 0 {
		return nil
	}
	best := slices.MaxFunc(proven(rows, stats.Faster), compareGain)
	out := []ForestRow{{Role: "best", row: best}}
	for _, others := range []func(*stats.Row) bool{
		func(r *stats.Row) bool { return r.Variant == best.Variant },
		func(r *stats.Row) bool { return r == best },
	} {
		if rest := slices.DeleteFunc(slices.Clone(rows), others); len(rest) > 0 {
			out = append(out, ForestRow{Role: "worst", row: slices.MinFunc(proven(rest, stats.Slower), compareGain)})
			break
		}
	}
	for _, r := range natives {
		if r.Pairs == best.Pairs {
			out = append([]ForestRow{{Role: "host network", row: r}}, out...)
		}
	}
	for i := range out {
		r := &out[i]
		r.Variant, r.Pairs, r.Change, r.Verdict = r.row.Variant, r.row.Pairs, change(r.row), r.row.Versus.Verdict
		r.published = m.publishedRatios(r.row)
	}
	return out
}

// proven returns the rows with verdict v, or all rows if there are none.
func proven(rows []*stats.Row, v stats.Verdict) []*stats.Row {
	if with := slices.DeleteFunc(slices.Clone(rows), func(r *stats.Row) bool { return r.Versus.Verdict != v }); len(with) > 0 {
		return with
	}
	return rows
}
