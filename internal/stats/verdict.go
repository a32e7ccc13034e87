package stats

import (
	"math"

	"slipstream.dev/internal/metrics"
)

// Verdict of a comparison. Faster and Slower are about performance: half the latency is faster.
type Verdict string

// Same means that the variants are equivalent: the whole interval lies within the margin. It takes precedence, because
// a difference can be significant and too small to matter. Faster
// and Slower need an adjusted p of at most 0.05. Inconclusive is everything else.
const (
	Faster       Verdict = "faster"
	Slower       Verdict = "slower"
	Same         Verdict = "same"
	Inconclusive Verdict = "inconclusive"
)

// versus converts an estimate from the scale of logs to that of ratios.
func versus(baseline string, e estimate) *Versus {
	ci := e.interval()
	return &Versus{
		Baseline: baseline, N: e.n, Ratio: math.Exp(e.mean),
		CI95: [2]float64{math.Exp(ci[0]), math.Exp(ci[1])}, P: e.p(),
	}
}

// judge adjusts the p-values of one family of comparisons and passes verdicts.
func judge(family []*Row, margin float64) {
	ps := make([]float64, len(family))
	for i, r := range family {
		ps[i] = r.Versus.P
	}
	for i, p := range holm(ps) {
		v := family[i].Versus
		v.P = p
		switch {
		case v.N < 2:
			v.Verdict = Inconclusive
		// The bounds are each other's inverse, so that swapping the variant and its baseline makes no
		// difference.
		case v.CI95[0] >= 1/(1+margin) && v.CI95[1] <= 1+margin:
			v.Verdict = Same
		case v.P > alpha:
			v.Verdict = Inconclusive
		case v.Ratio > 1 == metrics.Get(family[i].Metric).HigherIsBetter():
			v.Verdict = Faster
		default:
			v.Verdict = Slower
		}
	}
}
