package stats

import (
	"math"
	"slices"

	"gonum.org/v1/gonum/stat"
)

// withinBlocks estimates the mean of a variant's log ratios to its baseline within blocks. apart
// has the distances between their periods.
func (t *table) withinBlocks(blocks []int, ratios, apart []float64) estimate {
	if slices.ContainsFunc(apart, func(x float64) bool { return x != 0 }) {
		return switchback(ratios, apart)
	}
	return t.mean(blocks, ratios)
}

// periodsApart returns, for each block, by how many periods a cell comes after its
// baseline.
func periodsApart(c, base *cell, blocks []int) []float64 {
	apart := make([]float64, len(blocks))
	for i, b := range blocks {
		apart[i] = float64(c.trials[b-1][0].Period - base.trials[b-1][0].Period)
	}
	return apart
}

// switchback estimates the log ratio of two variants between which something is switched.
// Each block has one ratio. apart is by how many periods the variant comes after its
// baseline; it is negative if the variant comes first. For two neighbouring blocks in the
// order A B B A, the ratios are B2 − A1 with apart 1, and B3 − A4 with apart −1.
//
// A ratio is the truth, plus the drift times apart, plus the effects of the switches and
// the trials of its two periods. No two ratios share a period or a switch, so these effects
// are independent, whether each switch draws a new level (a virtual machine that starts on
// any host) or changes the last one. The regression on apart removes the drift, and its
// value at 0 is the estimate. In complete rounds apart adds up to 0, and the estimate is
// the mean of the ratios. The slope costs a degree of freedom: there are two fewer than
// ratios. With normal noise the interval is exact, for three or more ratios.
func switchback(ratios, apart []float64) estimate {
	n := float64(len(ratios))
	mean, middle := stat.Mean(ratios, nil), stat.Mean(apart, nil)
	var spread, together float64
	for i, x := range apart {
		spread += (x - middle) * (x - middle)
		together += (x - middle) * (ratios[i] - mean)
	}
	if spread == 0 { // one order only: drift cannot be told from the variant
		return estimate{n: 1, mean: mean}
	}
	slope := together / spread
	e := estimate{n: len(ratios), mean: mean - slope*middle, df: n - 2}
	if e.df < 1 {
		return estimate{n: 1, mean: e.mean}
	}
	var squares float64
	for i, x := range apart {
		off := ratios[i] - e.mean - slope*x
		squares += off * off
	}
	e.se = math.Sqrt(squares / e.df * (1/n + middle*middle/spread))
	return e
}
