package report

import (
	"fmt"
	"strings"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/report/draw"
	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/stats"
)

// Bar draws a comparison in a table, on a scale that it shares with the other bars.
type Bar struct {
	draw.Bar
	Verdict stats.Verdict
	// Tooltip says the same in words, with every block.
	Tooltip string
}

// newBar draws the ratio of a row. Its tooltip lists the published ratios.
func newBar(s draw.Scale, ratio draw.Ratio, r *stats.Row, published []float64) *Bar {
	text := tooltip(r)
	if len(published) > 0 {
		text += "\npublished: " + ratios(published)
	}
	return &Bar{s.Bar(ratio), r.Versus.Verdict, text}
}

// drawable reports whether a comparison has a ratio to draw.
func drawable(v *stats.Versus) bool { return draw.Ratio{Value: v.Ratio}.Drawable() }

// ratioOf returns the ratio of a row with its blocks, and published ratios.
func ratioOf(r *stats.Row, published []float64) draw.Ratio {
	ratio := draw.Ratio{Value: r.Versus.Ratio, CI: number.Of(r.Versus.CI95, r.Versus.N), Rings: published}
	for _, b := range r.Blocks {
		if b.Ratio > 0 {
			ratio.Dots = append(ratio.Dots, b.Ratio)
		}
	}
	return ratio
}

// gainOf is ratioOf, inverted if lower values are better: a gain above 1 is always an improvement.
func gainOf(r *stats.Row, published []float64) draw.Ratio {
	ratio := ratioOf(r, published)
	if metrics.Get(r.Metric).HigherIsBetter() {
		return ratio
	}
	return ratio.Inverse()
}

// tooltip describes what a bar shows: the value, the comparison, and the trial of each block.
func tooltip(r *stats.Row) string {
	q := quantityOf(r.Metric)
	lines := []string{
		fmt.Sprintf("%s, %s %s, %s", r.Variant, r.Workload, q.name, pairs(r.Pairs)),
		fmt.Sprintf("%s, n %d", q.estimate(r.Mean, r.CI95, r.N).With(q.unit), r.N),
	}
	if v := r.Versus; v != nil {
		lines = append(lines, fmt.Sprintf("ratio to %s %s: %s", v.Baseline, ratio(v.Ratio, v.CI95, v.N), v.Verdict))
	}
	var blocks []string
	for _, b := range r.Blocks {
		text := number.Fixed(b.Value*q.scale, number.Decimals(r.Mean*q.scale))
		if b.Ratio > 0 {
			text += " (" + number.Fixed(b.Ratio, 2) + ")"
		}
		blocks = append(blocks, text)
	}
	if len(blocks) > 0 {
		lines = append(lines, "trials (ratio in the block): "+strings.Join(blocks, ", "))
	}
	return strings.Join(lines, "\n")
}
