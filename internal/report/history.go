package report

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"slipstream.dev/internal/history"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/stats"
)

// Verdicts counts the verdicts of a result in signs: "▲3 ▼1 =2".
func Verdicts(count map[stats.Verdict]int) string {
	var all []string
	for _, v := range []stats.Verdict{stats.Faster, stats.Slower, stats.Same, stats.Inconclusive} {
		if n := count[v]; n > 0 {
			all = append(all, fmt.Sprint(verdictSign(v), n))
		}
	}
	return strings.Join(all, " ")
}

// Says tells what is most notable of a result: its largest gain, else its largest loss, else what is wrong with it.
func Says(r history.Result) string {
	switch {
	case r.Problem != "":
		return r.Problem
	case r.Best != nil:
		return r.Best.Variant + ": " + Describe(r.Best)
	case r.Worst != nil:
		return r.Worst.Variant + ": " + Describe(r.Worst)
	}
	return ""
}

// seriesTitle names a series of a trend.
func seriesTitle(s history.Series) string {
	return fmt.Sprintf("%s, %s, %s", s.Variant, s.Workload, pairs(s.Pairs))
}

// trendQuantity describes how people see the values of a series.
func trendQuantity(s history.Series, t *history.Trend) quantity {
	q := quantityOf(s.Metric)
	if t.Ratio {
		return quantity{"ratio of " + q.name, "", 1}
	}
	return q
}

// value formats a value of a series with its interval.
func (q quantity) value(v history.Value) string { return q.estimate(v.Mean, v.CI95, v.N).String() }

// shiftText says what a change of the level is: "−12 % (−14 to −9)".
func shiftText(s stats.Shift) string {
	ci := number.Interval{Low: s.CI95[0] - 1, High: s.CI95[1] - 1}
	text := number.Percent(s.Ratio-1, ci).With("%")
	if s.Ratio >= 1 {
		return "+" + text
	}
	return text
}

// shiftVerdict returns whether a change of the level is for the better.
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
		title := fmt.Sprintf("%s: %s of %s", t.Experiment, q.name, seriesTitle(s))
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
		fmt.Fprintln(&b, wrap("left out: "+plain.Line(left), textWidth))
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

// between says among which runs a change of the level may lie, unless that is one.
func between(t *history.Trend, s stats.Shift) string {
	if s.From == s.To {
		return ""
	}
	day := func(run int) string { return t.Runs[run].Started.Format(time.DateOnly) }
	return fmt.Sprintf(", between %s and %s", day(s.From), day(s.To))
}

func markText(m history.Mark) string { return fmt.Sprintf("%s %s → %s", m.Fact, m.From, m.To) }
