package stats

import (
	"errors"
	"fmt"
	"math"

	"slipstream.dev/internal/stats/estimate"
)

// Point has the trials of two series at one value of an axis, such as a rate or a message size.
type Point struct {
	// At is the value on the axis. It is positive.
	At float64
	// Variant and Baseline have one value for each block, as for Paired. All points have the same blocks.
	Variant, Baseline []float64
}

// Crossing is the value on the axis at which the ratio of two series crosses a level.
type Crossing struct {
	At float64
	// CI95 are the ends of the 95% interval. An end that the blocks do not exclude is the first or the last point: the true one may lie
	// beyond.
	CI95 [2]float64
}

// ErrNoCrossing means that the ratio does not cross the level between the first point and the last.
var ErrNoCrossing = errors.New("the ratio does not cross the level")

// Crossover returns where the ratio variant / baseline crosses a level: 1, or the end of a margin such as 1.02. The points are in
// ascending order of At. Between two of them, the log ratio of each block is taken as a straight line over the logarithm of the axis, so
// the interval covers the crossing of that line: measure more points near a crossing that matters. It consists of the values at which Student's
// t on the blocks does not reject the level (Fieller, "Some problems in interval estimation", Journal of the Royal Statistical Society
// B 16, 1954). If the ratio crosses several times, the result is the last crossing with an interval over all of them.
//
// It returns ErrNoCrossing, or an error if there are fewer than two points or blocks, if the points are not in order, or if a value is
// not positive and finite.
func Crossover(points []Point, level float64) (Crossing, error) {
	if len(points) < 2 || len(points[0].Variant) < 2 {
		return Crossing{}, errors.New("a crossing needs two points and two blocks")
	}
	if !(level > 0) || math.IsInf(level, 0) {
		return Crossing{}, fmt.Errorf("the level %v is not a positive number", level)
	}
	var r estimate.Relation
	last := 0.0
	for i, p := range points {
		if !(p.At > last) || math.IsInf(p.At, 0) {
			return Crossing{}, fmt.Errorf("point %d: %v is not above %v", i, p.At, last)
		}
		last = p.At
		ratios, err := logRatios(p.Variant, p.Baseline)
		if err == nil && len(ratios) != len(points[0].Variant) {
			err = fmt.Errorf("it has %d blocks, and the first point has %d", len(ratios), len(points[0].Variant))
		}
		if err != nil {
			return Crossing{}, fmt.Errorf("point %d: %w", i, err)
		}
		r.At, r.Ratios = append(r.At, p.At), append(r.Ratios, ratios)
	}
	at, ci, ok := r.Crossing(math.Log(level))
	if !ok {
		return Crossing{}, ErrNoCrossing
	}
	return Crossing{At: at, CI95: ci}, nil
}
