// Package stats compares a variant with a baseline by trials that were measured in blocks, as slipstream does for its own
// experiments: paired blocks, switch-backs, equivalence, and the crossover of two series.
//
// A block has one trial of everything that is compared, in random order and close in time, so that a change of the machine from one
// block to the next cancels. The unit is the trial: packets or seconds within one are not independent, so give the mean of a trial as
// one value. All values are positive and in any unit, as long as it is the same for variant and baseline. Comparisons are of logs,
// so a ratio of 2 and one of 1/2 are equally far from 1.
//
// Intervals have 95 %. For normally distributed logs they are exact; docs/results/method.md of the project has simulations for drift,
// outliers and skew. docs/explanation/method.md explains the method.
package stats

import (
	"errors"
	"fmt"
	"math"

	"slipstream.dev/internal/stats/estimate"
)

// Ratio is the ratio of a variant to its baseline.
type Ratio struct {
	// N is the number of blocks. It is 1 if they give no interval.
	N int
	// Value is the geometric mean of the ratios within blocks: 1.1 if the variant has 10% more.
	Value float64
	// CI95 are the ends of the 95% interval. With N 1 both are Value.
	CI95 [2]float64
	// P is the two-sided p-value of "the ratio is 1". With N 1 it is 1.
	P float64
}

// Paired compares values that were measured in blocks: variant[i] and baseline[i] are of block i. Interval and p-value are those of
// Student's t on the differences of logs. It returns an error if there is no block, if the lengths differ, or if a value is not
// positive and finite. To leave out only the block of such a value would favour one side.
func Paired(variant, baseline []float64) (Ratio, error) {
	ratios, err := logRatios(variant, baseline)
	if err != nil {
		return Ratio{}, err
	}
	return ratioOf(estimate.Mean(ratios, 0)), nil
}

// Period is the value of one period of a switch-back.
type Period struct {
	// Number counts the periods of the whole experiment in order of time, so that the drift from one to the next is about the same.
	Number int
	// Value is the mean of the period's trials. They share what the switch has changed, so they are one observation.
	Value float64
}

// SwitchBack compares a variant with its baseline where something is switched between periods, such as in the order A B B A:
// variant[i] and baseline[i] are the two periods of block i. A linear drift from period to period cancels, at the price of one
// degree of freedom. It does so by least squares of the log ratios on the distance of their periods, with Student's t on n − 2
// degrees of freedom. There is no interval for fewer than three blocks, nor if the variant always comes before its baseline, or
// always after it, at the same distance: then the drift cannot be told from the variant. The errors are those of Paired, and a block whose
// two periods have the same number.
func SwitchBack(variant, baseline []Period) (Ratio, error) {
	values := func(periods []Period) (all []float64) {
		for _, p := range periods {
			all = append(all, p.Value)
		}
		return all
	}
	ratios, err := logRatios(values(variant), values(baseline))
	if err != nil {
		return Ratio{}, err
	}
	var apart []float64
	for i := range variant {
		by := variant[i].Number - baseline[i].Number
		if by == 0 {
			return Ratio{}, fmt.Errorf("block %d: variant and baseline have the same period %d", i, variant[i].Number)
		}
		apart = append(apart, float64(by))
	}
	return ratioOf(estimate.SwitchBack(ratios, apart)), nil
}

// Verdict is what a ratio proves.
type Verdict string

// Same means that variant and baseline are equivalent: the whole interval lies within the margin. Higher and Lower mean that the ratio
// is not 1. Inconclusive is everything else: more blocks may settle it.
const (
	Higher       Verdict = "higher"
	Lower        Verdict = "lower"
	Same         Verdict = "same"
	Inconclusive Verdict = "inconclusive"
)

// Verdict judges the ratio. margin is the largest difference that does not matter, as a share: with 0.02 a ratio from 1/1.02 to 1.02 is
// the same. Same takes precedence, because a difference can be significant and too small to matter. It asks for more than two
// one-sided tests at 5% (Schuirmann, "A comparison of the two one-sided tests procedure and the power approach for assessing the
// equivalence of average bioavailability", Journal of Pharmacokinetics and Biopharmaceutics 15, 1987), which look at the 90% interval.
// Higher and Lower need a P of at most 0.05; with several variants, adjust P by Holm first.
func (r Ratio) Verdict(margin float64) Verdict {
	side, ok := estimate.Judge(r.N, r.Value, r.CI95, r.P, margin)
	switch {
	case !ok:
		return Inconclusive
	case side > 0:
		return Higher
	case side < 0:
		return Lower
	}
	return Same
}

// Holm adjusts the p-values of several comparisons, such as of all variants with one baseline. The probability of any false
// difference among those with at most 0.05 is then at most 5% (Holm, "A simple sequentially rejective multiple test procedure",
// Scandinavian Journal of Statistics 6, 1979). The result has the order of its argument.
func Holm(ps []float64) []float64 { return estimate.Holm(ps) }

func ratioOf(e estimate.Estimate) Ratio {
	r := Ratio{N: e.N, P: e.P()}
	r.Value, r.CI95 = e.Ratio()
	return r
}

// logRatios returns the log ratio of each block.
func logRatios(variant, baseline []float64) ([]float64, error) {
	if len(variant) != len(baseline) {
		return nil, fmt.Errorf("%d values of the variant and %d of the baseline: each block has one of both", len(variant), len(baseline))
	}
	if len(variant) == 0 {
		return nil, errors.New("there is no block")
	}
	var ratios []float64
	for i, x := range variant {
		for _, v := range []float64{x, baseline[i]} {
			if !(v > 0) || math.IsInf(v, 0) {
				return nil, fmt.Errorf("block %d: %v is not a positive number", i, v)
			}
		}
		ratios = append(ratios, math.Log(x)-math.Log(baseline[i]))
	}
	return ratios, nil
}
