package stats

import (
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/stats/estimate"
)

// Verdict of a comparison. Faster and Slower are about performance: half the latency is faster.
type Verdict string

// Same means that the variants are equivalent: the whole interval lies within the margin. It takes precedence, because
// a difference can be significant and yet too small to matter. Faster and Slower need an adjusted p of at most 0.05.
// Inconclusive is everything else.
const (
	Faster       Verdict = "faster"
	Slower       Verdict = "slower"
	Same         Verdict = "same"
	Inconclusive Verdict = "inconclusive"
)

// versus converts an estimate from the scale of logs to that of ratios.
func versus(baseline string, e estimate.Estimate) *Versus {
	ratio, ci := e.Ratio()
	return &Versus{Baseline: baseline, N: e.N, Ratio: ratio, CI95: ci, P: e.P()}
}

// judge adjusts the p-values of one family of comparisons and passes verdicts.
func judge(family []*Row, margin float64) {
	ps := make([]float64, len(family))
	for i, r := range family {
		ps[i] = r.Versus.P
	}
	for i, p := range estimate.Holm(ps) {
		v := family[i].Versus
		v.P = p
		switch side, ok := estimate.Judge(v.N, v.Ratio, v.CI95, p, margin); {
		case !ok:
			v.Verdict = Inconclusive
		case side == 0:
			v.Verdict = Same
		case side > 0 == metrics.Get(family[i].Metric).HigherIsBetter():
			v.Verdict = Faster
		default:
			v.Verdict = Slower
		}
	}
}
