package report

import (
	"fmt"
	"slices"
	"strings"

	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/words"
)

// PublishedSource has the figures of one source beside ours.
type PublishedSource struct {
	Name string
	Rows []PublishedRow
}

// PublishedRow is one published figure and ours.
type PublishedRow struct {
	// Figure says where in the source the figure is, Cell what was measured, and Versus what a
	// ratio is relative to.
	Figure, Cell, Versus string
	// Theirs and Ours include their units. Ours is empty if we have no figure.
	Theirs, Ours string
	Verdict      stats.Agreement
	// Why says by how much they differ, or why there is no such verdict. Note is a remark on
	// theirs.
	Why, Note string
}

// publishedFigures groups the published figures by source, and counts the verdicts.
func publishedFigures(all []stats.Published) (sources []PublishedSource, count string) {
	verdicts := map[stats.Agreement]int{}
	for _, p := range all {
		source := findOrAdd(&sources, func(s PublishedSource) bool { return s.Name == p.Source }, PublishedSource{Name: p.Source})
		source.Rows = append(source.Rows, publishedRow(p))
		verdicts[p.Verdict]++
	}
	if len(all) == 0 {
		return nil, ""
	}
	return sources, fmt.Sprintf("%s beside ours: %s.", words.Count(len(all), "published figure"), words.And(countAgreements(verdicts)))
}

func countAgreements(verdicts map[stats.Agreement]int) []string {
	var counts []string
	for _, v := range []struct {
		stats.Agreement
		one, more string
	}{
		{stats.Agrees, "agrees", "agree"}, {stats.Differs, "differs", "differ"},
		{stats.TooImprecise, "of ours is too imprecise", "of ours are too imprecise"}, {stats.NotComparable, "is not comparable", "are not comparable"},
	} {
		switch n := verdicts[v.Agreement]; {
		case n == 1:
			counts = append(counts, "1 "+v.one)
		case n > 1:
			counts = append(counts, fmt.Sprintf("%d %s", n, v.more))
		}
	}
	return counts
}

func publishedRow(p stats.Published) PublishedRow {
	q := quantityOf(p.Metric)
	row := PublishedRow{
		Figure: p.Figure, Cell: fmt.Sprintf("%s, %s %s, %s", p.Variant, p.Workload, q.name, pairs(p.Pairs)),
		Versus: p.Versus, Verdict: p.Verdict, Why: p.Why, Note: p.Note,
	}
	if p.Versus != "" {
		q = quantity{scale: 1} // a ratio
	}
	if p.Ours != nil {
		row.Ours = figureIn(*p.Ours, q)
	}
	row.Theirs = figureIn(p.Theirs, q)
	if p.OneWay {
		oneWay := stats.Figure{Value: p.Theirs.Value / 2}
		row.Note = "published for one way as " + figureIn(oneWay, q) + ": theirs is twice that, a round trip"
		if p.Note != "" {
			row.Note += "; " + p.Note
		}
	}
	if p.Verdict == stats.Differs {
		row.Why = fmt.Sprintf("ours is %s times theirs", number.Significant(p.Times))
	}
	return row
}

// figureIn formats a figure for people: "0.86 (0.84–0.88)", "0.81–0.92" for a range, or "below 0.50" for one from 0.
func figureIn(f stats.Figure, q quantity) string {
	if len(f.Interval) == 2 && f.Interval[0] == 0 && f.Value == 0 {
		return "below " + figureIn(stats.Figure{Value: f.Interval[1]}, q)
	}
	decimals, ci := 2, number.Interval{Low: 1, High: 0} // none
	if len(f.Interval) == 2 {
		ci = number.Interval{Low: f.Interval[0] * q.scale, High: f.Interval[1] * q.scale}
	}
	if q.unit != "" {
		decimals = number.Decimals(max(f.Value*q.scale, ci.Low))
	}
	e := number.Format(f.Value*q.scale, ci, decimals)
	if f.Value == 0 {
		e = number.Estimate{Value: e.Interval}
	}
	return e.With(q.unit)
}

// publishedRatios returns the published ratios for a row, with both ends of a range, and the upper end of a bound.
func (m *Model) publishedRatios(r *stats.Row) []float64 {
	var out []float64
	for _, p := range m.summary.Published {
		switch {
		case p.Variant != r.Variant || p.Workload != r.Workload || p.Pairs != r.Pairs || p.Metric != r.Metric,
			r.Versus == nil || p.Versus != r.Versus.Baseline:
		case p.Theirs.Value == 0:
			out = append(out, slices.DeleteFunc(slices.Clone(p.Theirs.Interval), func(end float64) bool { return end == 0 })...)
		default:
			out = append(out, p.Theirs.Value)
		}
	}
	return out
}

// Class returns the verdict as a class of the style sheet.
func (r PublishedRow) Class() string { return strings.ReplaceAll(string(r.Verdict), " ", "-") }
