package estimate

import "math"

// Relation is the log ratio of two series along an axis. In every block it is interpolated linearly between
// the points, on a logarithmic axis.
type Relation struct {
	At []float64 // values of the points on the axis, ascending, of which there are at least two
	// Ratios has the log ratios of each point by block. Apart has what Within takes as apart, for each point.
	Ratios, Apart [][]float64
	Pilot         int // as for Mean
}

// at estimates the log ratio at a place between points: 1.5 is in the middle between the second and the third
// point.
func (r Relation) at(place float64) Estimate {
	i := min(int(place), len(r.At)-2)
	between := func(of [][]float64) (out []float64) {
		if of == nil {
			return nil
		}
		for b := range of[i] {
			out = append(out, of[i][b]+(place-float64(i))*(of[i+1][b]-of[i][b]))
		}
		return out
	}
	return Within(between(r.Ratios), between(r.Apart), r.Pilot)
}

// value returns the value on the axis for a place between points.
func (r Relation) value(place float64) float64 {
	i := int(place)
	share := place - float64(i)
	if share == 0 {
		return r.At[i]
	}
	low, high := math.Log(r.At[i]), math.Log(r.At[i+1])
	return math.Exp(low + share*(high-low))
}

// Crossing returns the value on the axis at which the log ratio crosses a level, with its 95% interval; ok is false if it does not,
// or if there are fewer than two blocks. At each place, a t-test of the blocks' log ratios tests whether the log ratio equals
// the level there. The interval consists of the places where the test does not reject that (Fieller, "Some
// problems in interval estimation", Journal of the Royal Statistical Society B 16, 1954), so it has the same
// coverage as the interval of a ratio. If there are several crossings, Crossing returns the last one, and the
// interval contains all of them.
func (r Relation) Crossing(level float64) (value float64, ci95 [2]float64, ok bool) {
	if len(r.Ratios[0]) < 2 {
		return 0, ci95, false
	}
	last := float64(len(r.At) - 1)
	above := func(place float64) bool { return r.at(place).Mean > level }
	crossing, ok := change(last, 0, above)
	if !ok {
		return 0, ci95, false
	}
	rejected := func(place float64) bool {
		e := r.at(place)
		e.Mean -= level
		return e.P() < Alpha
	}
	ci95 = [2]float64{r.value(0), r.value(last)}
	for i, end := range []float64{0, last} {
		if rejected(end) {
			edge, _ := change(end, crossing, rejected)
			ci95[i] = r.value(edge)
		}
	}
	return r.value(crossing), ci95, true
}

// change returns the first place between from and to at which a condition changes.
func change(from, to float64, condition func(float64) bool) (float64, bool) {
	const steps, halvings = 64, 24
	first, before := condition(from), from
	for i := 1; i <= steps; i++ {
		place := from + (to-from)*float64(i)/steps
		if condition(place) == first {
			before = place
			continue
		}
		for range halvings {
			if middle := (before + place) / 2; condition(middle) == first {
				before = middle
			} else {
				place = middle
			}
		}
		return place, true
	}
	return to, false
}
