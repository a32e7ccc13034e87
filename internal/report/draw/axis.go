package draw

import (
	"fmt"
	"math"
	"slices"

	"slipstream.dev/internal/report/number"
)

// axis is an axis of values, from low to high.
type axis struct {
	low, high float64
	log       bool
	ticks     []float64
	text      func(float64) string
}

func linearAxis(bound float64) axis {
	step := niceAbove(bound / 7)
	a := axis{high: math.Ceil(bound/step-1e-9) * step, text: func(v float64) string { return tickText(v, step) }}
	for v := 0.0; v <= a.high+step/2; v += step {
		a.ticks = append(a.ticks, v)
	}
	return a
}

// logAxis returns a logarithmic axis with a tick at both ends.
func logAxis(low, high float64) axis {
	a := axis{low: niceBelow(low), high: niceAbove(high), log: true, text: func(v float64) string { return tickText(v, v) }}
	if a.low == a.high {
		a.high = niceAbove(a.high * 1.01)
	}
	for v := a.low; v <= a.high*1.001; v = niceAbove(v * 1.01) {
		a.ticks = append(a.ticks, v)
	}
	return a
}

// thin leaves only the powers of ten if there are too many ticks.
func (a axis) thin() axis {
	if len(a.ticks) > 8 {
		a.ticks = slices.DeleteFunc(a.ticks, func(v float64) bool {
			power := math.Log10(v)
			return math.Abs(power-math.Round(power)) > 1e-9
		})
	}
	return a
}

// share returns the share of the axis below a value.
func (a axis) share(v float64) float64 {
	v = min(max(v, a.low), a.high)
	if a.log {
		return math.Log(v/a.low) / math.Log(a.high/a.low)
	}
	return (v - a.low) / (a.high - a.low)
}

// valueAxis draws the axis at the left of a frame, with a line of the grid at each tick.
func (p *pen) valueAxis(a axis, f frame) {
	for _, v := range a.ticks {
		y := f.y(a.share(v))
		p.line(0.6, Grid, nil, point{f.left, y}, point{f.right, y})
		p.text(point{f.left - 6, y + 3}, a.text(v), small, Muted, alignRight)
	}
}

// shareLabel writes a share in % at the left of a frame.
func (p *pen) shareLabel(f frame, share float64) {
	p.text(point{f.left - 5, f.y(share) + 3}, fmt.Sprintf("%g%%", 100*share), small, Muted, alignRight)
}

// niceAbove returns the next 1, 2 or 5 × a power of ten that is not below v.
func niceAbove(v float64) float64 {
	unit := math.Pow(10, math.Floor(math.Log10(v)))
	for _, n := range []float64{1, 2, 5} {
		if n*unit >= v*(1-1e-9) {
			return n * unit
		}
	}
	return 10 * unit
}

// niceBelow returns the next 1, 2 or 5 × a power of ten that is not above v.
func niceBelow(v float64) float64 {
	if above := niceAbove(v); above <= v*(1+1e-9) {
		return above
	}
	unit := math.Pow(10, math.Floor(math.Log10(v)))
	for _, n := range []float64{5, 2} {
		if n*unit <= v*(1+1e-9) {
			return n * unit
		}
	}
	return unit
}

// tickText formats a tick of an axis with the given step.
func tickText(v, step float64) string {
	return number.Fixed(v, max(0, int(math.Ceil(-math.Log10(step)-1e-9))))
}
