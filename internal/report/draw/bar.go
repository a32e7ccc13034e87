package draw

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"slipstream.dev/internal/report/number"
)

// Bar draws a ratio with its interval in a cell of a table. Its paths are for an SVG of barWidth × barHeight that
// stretches to its cell; CSS sets their line width and colour.
type Bar struct {
	One, Interval, Mean, Dots, Rings string
	// Off is an arrow that replaces the rest if the ratio is off the scale.
	Off string
}

// The size of a bar, and the heights of the interval and the dots in it.
const (
	barWidth, barHeight = 1000, 20
	intervalAt, dotsAt  = 7, 16
)

// Ratio has the content of a bar: a ratio and its interval, dots below them, and rings around other ratios.
type Ratio struct {
	Value       float64
	CI          number.Interval
	Dots, Rings []float64
}

// Inverse returns the inverse of all ratios.
func (r Ratio) Inverse() Ratio {
	inverse := func(all []float64) (out []float64) {
		for _, x := range all {
			out = append(out, 1/x)
		}
		return out
	}
	return Ratio{1 / r.Value, r.CI.Inverse(), inverse(r.Dots), inverse(r.Rings)}
}

// Drawable reports whether the ratio has a place on a scale.
func (r Ratio) Drawable() bool { return r.Value > 0 && !math.IsInf(r.Value, 0) }

// Scale is a logarithmic scale of ratios, so that twice and half are equally far from 1. 1 is always on it.
type Scale struct{ low, high float64 }

// ScaleOf chooses a scale that shows every ratio, dot and ring. With few blocks, an interval may be far wider than
// the range of these. So on each side it extends the scale by at most that range, and is cut off beyond.
func ScaleOf(all []Ratio) Scale {
	s := Scale{1, 1}
	for _, a := range all {
		for _, x := range slices.Concat(a.Dots, a.Rings, []float64{a.Value}) {
			s.low, s.high = min(s.low, x), max(s.high, x)
		}
	}
	room := max(s.high/s.low, 1.02)
	low, high := s.low/room, s.high*room
	for _, a := range all {
		if a.CI.Known() && a.CI.Low > 0 {
			s.low, s.high = min(s.low, max(low, a.CI.Low)), max(s.high, min(high, a.CI.High))
		}
	}
	return s
}

// at returns the position of a ratio, from 0 to barWidth.
func (s Scale) at(ratio float64) float64 {
	if s.low == s.high {
		return barWidth / 2
	}
	const air = 0.04 * barWidth
	x := air + (barWidth-2*air)*math.Log(ratio/s.low)/math.Log(s.high/s.low)
	return math.Round(min(max(x, 0), barWidth))
}

// Bar draws a ratio on the scale.
func (s Scale) Bar(r Ratio) Bar {
	b := Bar{One: fmt.Sprintf("M%g -8V%d", s.at(1), barHeight+8)}
	switch {
	case r.Value > s.high:
		b.Off = fmt.Sprintf("M960 %dL995 %dL960 %d", intervalAt-4, intervalAt, intervalAt+4)
		return b
	case r.Value < s.low:
		b.Off = fmt.Sprintf("M40 %dL5 %dL40 %d", intervalAt-4, intervalAt, intervalAt+4)
		return b
	}
	b.Mean = s.dots([]float64{r.Value}, intervalAt)
	if r.CI.Known() && r.CI.Low > 0 {
		b.Interval = fmt.Sprintf("M%g %dH%g", s.at(r.CI.Low), intervalAt, s.at(r.CI.High))
	}
	b.Dots, b.Rings = s.dots(r.Dots, dotsAt), s.dots(r.Rings, intervalAt)
	return b
}

// dots draws lines of length 0, which are dots because their ends are round.
func (s Scale) dots(ratios []float64, height int) string {
	var b strings.Builder
	for _, x := range ratios {
		fmt.Fprintf(&b, "M%g %dh0", s.at(x), height)
	}
	return b.String()
}

// Tick is a number on an axis. At is its position in % of the width.
type Tick struct {
	At   float64
	Text string
}

// Ticks returns round numbers, 1 among them, and few enough to be readable.
func (s Scale) Ticks() []Tick {
	const apart = 0.16 * barWidth
	out := []Tick{{s.at(1) / (barWidth / 100), "1"}}
	for _, r := range s.roundRatios() {
		at := s.at(r)
		if !slices.ContainsFunc(out, func(t Tick) bool { return math.Abs(t.At*barWidth/100-at) < apart }) {
			out = append(out, Tick{at / (barWidth / 100), strconv.FormatFloat(math.Round(1e6*r)/1e6, 'f', -1, 64)})
		}
	}
	slices.SortFunc(out, func(a, b Tick) int { return int(math.Copysign(1, a.At-b.At)) })
	return out
}

func (s Scale) roundRatios() []float64 {
	var ratios []float64
	if s.high/s.low > 4 {
		for r := niceAbove(s.low); r <= s.high*1.0001; r = niceAbove(r * 1.01) {
			ratios = append(ratios, r)
		}
	} else if s.high > s.low {
		step := niceAbove((s.high - s.low) / 5)
		for n := math.Ceil(s.low/step - 1e-9); n*step <= s.high*1.0001; n++ {
			ratios = append(ratios, n*step)
		}
	}
	return ratios
}
