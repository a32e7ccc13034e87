package report

import (
	"fmt"
	"strings"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/words"
)

// quantity says how to print a metric.
type quantity struct {
	name  string  // for headings: "throughput"
	unit  string  // "Gb/s"
	scale float64 // from the metric's unit to unit
}

func quantityOf(metric string) quantity {
	m := metrics.Get(metric)
	return quantity{m.Title, m.Shown, m.Scale}
}

// estimate formats a value of n blocks, in the metric's unit, for people. It has three significant digits.
func (q quantity) estimate(v float64, ci [2]float64, n int) number.Estimate {
	return number.Format(v*q.scale, number.Of(ci, n).Scale(q.scale), number.Decimals(v*q.scale))
}

// Quantity formats a value of a metric for people, with its unit.
func Quantity(v float64, metric string) string {
	q := quantityOf(metric)
	return number.WithUnit(number.Significant(v*q.scale), q.unit)
}

// ratio formats a ratio of n blocks: "1.10 (0.90–1.30)".
func ratio(v float64, ci [2]float64, n int) number.Estimate {
	return number.Format(v, number.Of(ci, n), 2)
}

// ratios formats ratios without intervals: "1.08 and 1.10".
func ratios(all []float64) string {
	var texts []string
	for _, x := range all {
		texts = append(texts, number.Fixed(x, 2))
	}
	return words.And(texts)
}

// change formats the change of the metric itself: "+12% (10–14)", or "−37% (−49 to −23)" for a latency that falls. A
// ratio of 2 or more is a factor: "×2.4 (2.3–2.5)".
func change(r *stats.Row) string {
	ratio, ci := r.Versus.Ratio, number.Of(r.Versus.CI95, r.Versus.N)
	if ratio >= 2 {
		return "×" + number.Format(ratio, ci, 2).String()
	}
	return percentChange(ratio, ci)
}

// percentChange formats a ratio as a change with its sign: "+12% (10–14)", or "−12% (−14 to −9)".
func percentChange(ratio float64, ci number.Interval) string {
	text := number.Percent(ratio-1, ci.Map(func(x float64) float64 { return x - 1 })).With("%")
	if ratio >= 1 {
		return "+" + text
	}
	return text
}

// Describe describes a comparison with its metric: "stream throughput +12% (10–14) at 4 pairs".
func Describe(r *stats.Row) string {
	return fmt.Sprintf("%s %s %s at %s", r.Workload, quantityOf(r.Metric).name, change(r), pairs(r.Pairs))
}

// describeFew describes the first comparisons.
func describeFew(rows []*stats.Row) string {
	var all []string
	for _, r := range rows[:min(len(rows), few)] {
		all = append(all, Describe(r))
	}
	return strings.Join(all, ", ")
}
