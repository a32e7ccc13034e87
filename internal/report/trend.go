package report

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"slipstream.dev/internal/history"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/report/draw"
	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/words"
)

// TrendPage is the page of a trend.
type TrendPage struct {
	Links
	*history.Trend
	// Experiments and Metrics are the choices that the page offers.
	Experiments, Metrics []string
	// Last is the number of requested runs.
	Last int
}

// HTML writes the page.
func (p TrendPage) HTML(w io.Writer) error { return writePage(w, "trend", p) }

// Title says what the page shows.
func (p TrendPage) Title() string {
	what := "primary metrics"
	if p.Metric != "" {
		what = quantityOf(p.Metric).name
	}
	if p.Ratio {
		what += ", relative to the baseline,"
	}
	return fmt.Sprintf("%s: %s over %s", p.Experiment, what, words.Count(len(p.Runs), "run"))
}

// Event is a change at a run.
type Event struct {
	// Number of the line in the figures, for facts.
	Number int
	Date   string
	Run    string // name of the folder
	// Of is "environment", or the metric that changed.
	Of, What string
	// Verdict on a change of a level; empty for facts.
	Verdict stats.Verdict
}

// Events returns what changed, oldest first.
func (p TrendPage) Events() (all []Event) {
	lines := p.lines()
	for i, run := range p.Runs {
		at := Event{Date: run.Started.Format(time.DateOnly), Run: run.Name}
		for _, m := range p.Marks {
			if m.Run == i {
				at.Of, at.What, at.Number = "environment", markText(m), slices.Index(lines, i)+1
				all = append(all, at)
			}
		}
		at.Number = 0
		for _, e := range p.levels(i) {
			e.Date, e.Run = at.Date, at.Run
			all = append(all, e)
		}
	}
	return all
}

// levels returns the changes of levels at a run: one for each workload, metric and verdict.
func (p TrendPage) levels(run int) (all []Event) {
	for _, s := range p.Series {
		for _, shift := range s.Shifts {
			if shift.At != run {
				continue
			}
			of, v := s.Workload+" "+trendQuantity(s, p.Trend).name, shiftVerdict(shift, s.Metric)
			what := fmt.Sprintf("%s at %s %s%s", s.Variant, pairs(s.Pairs), shiftText(shift), between(p.Trend, shift))
			i := slices.IndexFunc(all, func(e Event) bool { return e.Of == of && e.Verdict == v })
			if i < 0 {
				all = append(all, Event{Of: of, What: what, Verdict: v})
				continue
			}
			all[i].What += "; " + what
		}
	}
	return all
}

// lines returns the runs at which a fact changed, each once.
func (p TrendPage) lines() (runs []int) {
	for _, m := range p.Marks {
		if len(runs) == 0 || runs[len(runs)-1] != m.Run {
			runs = append(runs, m.Run)
		}
	}
	return runs
}

// Figures returns a figure for each workload, metric and number of pairs, with a curve for each variant.
func (p TrendPage) Figures() (all []Figure) {
	type panel struct {
		workload, metric string
		pairs            int
	}
	var panels []panel
	series := make(map[panel][]history.Series)
	for _, s := range p.Series {
		at := panel{s.Workload, s.Metric, s.Pairs}
		if series[at] == nil {
			panels = append(panels, at)
		}
		series[at] = append(series[at], s)
	}
	for _, at := range panels {
		all = append(all, p.figure(series[at]))
	}
	return all
}

// figure draws the series of one workload, metric and number of pairs.
func (p TrendPage) figure(all []history.Series) Figure {
	first := all[0]
	q := trendQuantity(first, p.Trend)
	chart := draw.Trend{YTitle: q.unit, Ratios: p.Ratio, Events: p.lines()}
	if p.Ratio {
		chart.YTitle = "ratio to the baseline"
	}
	f := Figure{
		Name:    slug("trend", first.Workload, first.Metric, fmt.Sprint(first.Pairs)),
		Title:   fmt.Sprintf("%s %s, %s", first.Workload, q.name, pairs(first.Pairs)),
		Caption: "Each mark is a run with its 95% interval.", Data: Data{Columns: []string{"Run"}},
	}
	for _, run := range p.Runs {
		chart.Runs = append(chart.Runs, run.Started.Format(time.DateOnly))
		f.Data.Rows = append(f.Data.Rows, append([]string{run.Name}, slices.Repeat([]string{"–"}, len(all))...))
	}
	for i, s := range all {
		f.Data.Columns = append(f.Data.Columns, s.Variant)
		curve := draw.Curve{Name: s.Variant, Style: draw.SeriesStyle(i)}
		for _, v := range s.Points {
			curve.Marks = append(curve.Marks, draw.Mark{X: float64(v.Run), Y: v.Mean * q.scale, CI: number.Of(v.CI95, v.N).Scale(q.scale), Filled: true})
			f.Data.Rows[v.Run][i+1] = q.value(v)
		}
		for _, shift := range s.Shifts {
			chart.Shifts = append(chart.Shifts, draw.TrendShift{Curve: i, At: shift.At, From: shift.From, To: shift.To})
		}
		chart.Curves = append(chart.Curves, curve)
	}
	if len(chart.Events) > 0 {
		f.Caption += " Dashed lines are changes of the environment."
	}
	if len(chart.Shifts) > 0 {
		f.Caption += " Triangles are changes of the level, each with the interval of its place."
	}
	f.Alt = fmt.Sprintf("%s of %s over %s", f.Title, listFew(f.Data.Columns[1:]), words.Count(len(p.Runs), "run"))
	f.Picture = chart.Picture()
	return f
}

// trendQuantity says how to print the values of a series.
func trendQuantity(s history.Series, t *history.Trend) quantity {
	q := quantityOf(s.Metric)
	if t.Ratio {
		return quantity{q.name + " ratio", "", 1}
	}
	return q
}

// value formats a value of a series with its interval.
func (q quantity) value(v history.Value) string { return q.estimate(v.Mean, v.CI95, v.N).String() }

// shiftText formats a change of the level: "−12% (−14 to −9)".
func shiftText(s stats.Shift) string {
	return percentChange(s.Ratio, number.Interval{Low: s.CI95[0], High: s.CI95[1]})
}

// shiftVerdict returns Faster if a change of the level is an improvement, else Slower.
func shiftVerdict(s stats.Shift, metric string) stats.Verdict {
	if s.Ratio > 1 == metrics.Get(metric).HigherIsBetter() {
		return stats.Faster
	}
	return stats.Slower
}

// TrendText writes a trend as plain text: a table for each series.
func TrendText(w io.Writer, t *history.Trend) error {
	var b strings.Builder
	for _, s := range t.Series {
		q := trendQuantity(s, t)
		title := fmt.Sprintf("%s: %s of %s, %s, %s", t.Experiment, q.name, s.Variant, s.Workload, pairs(s.Pairs))
		if q.unit != "" {
			title += ", " + q.unit
		}
		fmt.Fprintf(&b, "\n%s\n", plain.Line(title))
		tw := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
		for _, v := range s.Points {
			run := t.Runs[v.Run]
			fmt.Fprintf(tw, "  %s\t%s\tn %d\t%s\n", run.Started.Format("2006-01-02 15:04"), q.value(v), v.N, plain.Line(strings.Join(notes(t, s, v.Run), "; ")))
		}
		if err := tw.Flush(); err != nil {
			return err
		}
	}
	for _, left := range t.LeftOut {
		b.WriteString(wrap("left out: "+plain.Line(left), textWidth))
	}
	return writePlain(w, strings.TrimPrefix(trimLines(b.String()), "\n"), "text")
}

// trimLines removes the spaces at the ends of lines.
func trimLines(s string) string {
	var b strings.Builder
	for line := range strings.Lines(s) {
		b.WriteString(strings.TrimRight(line, " \n") + "\n")
	}
	return b.String()
}

// notes says what changed at a run of a series: its level, and facts.
func notes(t *history.Trend, s history.Series, run int) (all []string) {
	for _, shift := range s.Shifts {
		if shift.At == run {
			all = append(all, fmt.Sprintf("%s level %s%s", verdictSign(shiftVerdict(shift, s.Metric)), shiftText(shift), between(t, shift)))
		}
	}
	for _, m := range t.Marks {
		if m.Run == run {
			all = append(all, markText(m))
		}
	}
	return all
}

// between names the runs that bound a change of the level, unless they are the same.
func between(t *history.Trend, s stats.Shift) string {
	if s.From == s.To {
		return ""
	}
	day := func(run int) string { return t.Runs[run].Started.Format(time.DateOnly) }
	return fmt.Sprintf(", between %s and %s", day(s.From), day(s.To))
}

func markText(m history.Mark) string { return fmt.Sprintf("%s %s → %s", m.Fact, m.From, m.To) }
