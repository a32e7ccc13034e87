package estimate

import (
	"math"
	"slices"

	"gonum.org/v1/gonum/stat"
)

// Within estimates the mean of the log ratios of blocks. apart has the distance in periods between the two trials of each block; it
// is nil or all 0 if they ran in the same period. pilot is as for Mean.
func Within(ratios, apart []float64, pilot int) Estimate {
	if slices.ContainsFunc(apart, func(x float64) bool { return x != 0 }) {
		return SwitchBack(ratios, apart)
	}
	return Mean(ratios, pilot)
}

// SwitchBack estimates the log ratio of two variants between which something is switched.
// Each block has one ratio. apart is the number of periods by which the variant comes after
// its baseline, negative if the variant comes first. For two neighbouring blocks in the
// order A B B A, the ratios are B2 − A1 with apart 1, and B3 − A4 with apart −1.
//
// A ratio is the truth, plus the drift times apart, plus the effects of the switches and
// the trials of its two periods. No two ratios share a period or a switch, so these effects
// are independent, whether each switch draws a new level (a virtual machine that starts on
// any host) or changes the last one. The regression on apart removes the drift, and its
// value at 0 is the estimate. In complete rounds apart adds up to 0, and the estimate is
// the mean of the ratios. The slope costs a degree of freedom: there are two fewer than
// ratios. With normal noise the interval is exact, for three or more ratios.
func SwitchBack(ratios, apart []float64) Estimate {
	n := float64(len(ratios))
	mean, middle := stat.Mean(ratios, nil), stat.Mean(apart, nil)
	var spread, together float64
	for i, x := range apart {
		spread += (x - middle) * (x - middle)
		together += (x - middle) * (ratios[i] - mean)
	}
	if spread == 0 { // one order only: drift cannot be told from the variant
		return Estimate{N: 1, Mean: mean}
	}
	slope := together / spread
	e := Estimate{N: len(ratios), Mean: mean - slope*middle, DF: n - 2}
	if e.DF < 1 {
		return Estimate{N: 1, Mean: e.Mean}
	}
	var squares float64
	for i, x := range apart {
		off := ratios[i] - e.Mean - slope*x
		squares += off * off
	}
	e.SE = math.Sqrt(squares / e.DF * (1/n + middle*middle/spread))
	return e
}
