package report

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/stats"
)

// Bar draws a ratio with its interval and the blocks behind it, on a scale that it shares
// with the other bars of its table. Its paths are for an SVG of barWidth × barHeight that
// stretches to its cell; CSS sets their line width and colour.
type Bar struct {
	Verdict             stats.Verdict
	One, Interval, Mean string
	Blocks              string
	// Theirs draws the published ratios.
	Theirs string
	// Off is an arrow that replaces the rest if the ratio is off the scale.
	Off string
	// Tip says the same in words, with every block.
	Tip string
}

// The size of a bar, and the heights of the interval and the blocks in it.
const (
	barWidth, barHeight = 1000, 20
	intervalAt, dotsAt  = 7, 16
)

// spread has what a bar shows of a comparison: its ratio, interval and blocks, and published
// ratios.
type spread struct {
	at             float64
	ci             interval
	blocks, theirs []float64
}

func spreadOf(r *stats.Row) spread {
	s := spread{at: r.Versus.Ratio, ci: of(r.Versus.CI95, r.Versus.N)}
	for _, b := range r.Blocks {
		if b.Ratio > 0 {
			s.blocks = append(s.blocks, b.Ratio)
		}
	}
	return s
}

// beside adds published ratios to a spread.
func (s spread) beside(theirs []float64) spread {
	s.theirs = theirs
	return s
}

// gains converts a spread to how many times better the variant is, whichever way the metric
// runs.
func (s spread) gains(metric string) spread {
	if metrics.Get(metric).HigherIsBetter() {
		return s
	}
	inverse := func(x float64) float64 { return 1 / x }
	g := spread{at: inverse(s.at), ci: s.ci.mapped(inverse)}
	for _, b := range s.blocks {
		g.blocks = append(g.blocks, inverse(b))
	}
	for _, x := range s.theirs {
		g.theirs = append(g.theirs, inverse(x))
	}
	return g
}

func (s spread) drawable() bool { return s.at > 0 && !math.IsInf(s.at, 0) }

// scale is a logarithmic scale of ratios, so that twice and half are equally far from 1. 1
// is always on it.
type scale struct{ lo, hi float64 }

// scaleOf chooses a scale that shows every ratio and block. The interval of a few blocks may
// be far wider than they are. On each side, an interval may add at most that range again;
// the scale cuts it off beyond that.
func scaleOf(all []spread) scale {
	s := scale{1, 1}
	for _, a := range all {
		for _, x := range slices.Concat(a.blocks, a.theirs, []float64{a.at}) {
			s.lo, s.hi = min(s.lo, x), max(s.hi, x)
		}
	}
	room := max(s.hi/s.lo, 1.02)
	lo, hi := s.lo/room, s.hi*room
	for _, a := range all {
		if a.ci.known() && a.ci.lo > 0 {
			s.lo, s.hi = min(s.lo, max(lo, a.ci.lo)), max(s.hi, min(hi, a.ci.hi))
		}
	}
	return s
}

// at returns the position of a ratio, from 0 to barWidth.
func (s scale) at(ratio float64) float64 {
	if s.lo == s.hi {
		return barWidth / 2
	}
	const air = 0.04 * barWidth
	x := air + (barWidth-2*air)*math.Log(ratio/s.lo)/math.Log(s.hi/s.lo)
	return math.Round(min(max(x, 0), barWidth))
}

// bar draws a spread on the scale.
func (s scale) bar(a spread, v stats.Verdict, tip string) *Bar {
	b := &Bar{Verdict: v, Tip: tip, One: fmt.Sprintf("M%g -8V%d", s.at(1), barHeight+8)}
	switch {
	case a.at > s.hi:
		b.Off = fmt.Sprintf("M960 %dL995 %dL960 %d", intervalAt-4, intervalAt, intervalAt+4)
		return b
	case a.at < s.lo:
		b.Off = fmt.Sprintf("M40 %dL5 %dL40 %d", intervalAt-4, intervalAt, intervalAt+4)
		return b
	}
	// A line of length 0 is a dot, because its ends are round.
	b.Mean = fmt.Sprintf("M%g %dh0", s.at(a.at), intervalAt)
	if a.ci.known() && a.ci.lo > 0 {
		b.Interval = fmt.Sprintf("M%g %dH%g", s.at(a.ci.lo), intervalAt, s.at(a.ci.hi))
	}
	var dots strings.Builder
	for _, x := range a.blocks {
		fmt.Fprintf(&dots, "M%g %dh0", s.at(x), dotsAt)
	}
	b.Blocks = dots.String()
	for _, x := range a.theirs {
		b.Theirs += fmt.Sprintf("M%g %dh0", s.at(x), intervalAt)
	}
	return b
}

// Tick is a number on an axis. At is its position in % of the width.
type Tick struct {
	At   float64
	Text string
}

// ticks returns round numbers, 1 among them, and few enough to be readable.
func (s scale) ticks() []Tick {
	const apart = 0.16 * barWidth
	var ratios []float64
	if s.hi/s.lo > 4 {
		for r := ladder(s.lo, true); r <= s.hi*1.0001; r = ladder(r*1.01, true) {
			ratios = append(ratios, r)
		}
	} else if s.hi > s.lo {
		step := niceStep((s.hi - s.lo) / 5)
		for n := math.Ceil(s.lo/step - 1e-9); n*step <= s.hi*1.0001; n++ {
			ratios = append(ratios, n*step)
		}
	}
	one := Tick{s.at(1) / (barWidth / 100), "1"}
	out := []Tick{one}
	for _, r := range ratios {
		at := s.at(r)
		if !slices.ContainsFunc(out, func(t Tick) bool { return math.Abs(t.At*barWidth/100-at) < apart }) {
			out = append(out, Tick{at / (barWidth / 100), strconv.FormatFloat(math.Round(1e6*r)/1e6, 'f', -1, 64)})
		}
	}
	slices.SortFunc(out, func(a, b Tick) int { return int(math.Copysign(1, a.At-b.At)) })
	return out
}

// tip describes what a bar shows: the value, the comparison, and the trial of each block.
func tip(r *stats.Row) string {
	q := quantityOf(r.Metric)
	mean := r.Mean * q.scale
	decimals := decimalsFor(mean)
	value := estimate(mean, of(r.CI95, r.N).mapped(func(x float64) float64 { return x * q.scale }), decimals)
	lines := []string{
		fmt.Sprintf("%s, %s %s, %s", r.Variant, r.Workload, q.name, pairs(r.Pairs)),
		fmt.Sprintf("%s, n %d", value.with(q.unit), r.N),
	}
	if v := r.Versus; v != nil {
		lines = append(lines, fmt.Sprintf("ratio to %s %s: %s", v.Baseline, estimate(v.Ratio, of(v.CI95, v.N), 2), v.Verdict))
	}
	var blocks []string
	for _, b := range r.Blocks {
		text := fixed(b.Value*q.scale, decimals)
		if b.Ratio > 0 {
			text += " (" + fixed(b.Ratio, 2) + ")"
		}
		blocks = append(blocks, text)
	}
	if len(blocks) > 0 {
		lines = append(lines, "trials (ratio in the block): "+strings.Join(blocks, ", "))
	}
	return strings.Join(lines, "\n")
}
