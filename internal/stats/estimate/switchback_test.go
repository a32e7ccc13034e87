package estimate

import (
	"math"
	"testing"
)

// The ratios are 0.08 + 0.02·apart, and differ from that by ±0.01. By hand, the slope is 0.02,
// the sum of squares is 4 · 0.01², the standard error is √(0.0004 / 2 / 4), and t(2) = 4.3027.
func TestSwitchBack(t *testing.T) {
	e := SwitchBack([]float64{0.11, 0.05, 0.09, 0.07}, []float64{1, -1, 1, -1})
	near(t, "estimate", e.Mean, 0.08, 1e-12)
	near(t, "interval", e.Interval(), [2]float64{0.08 - 4.3027*0.0070711, 0.08 + 4.3027*0.0070711}, 1e-6)

	// Two of three blocks have the same order. The mean of apart is 1/3, its spread 8/3, the
	// slope 0.025, the sum of squares 2 · 0.01², and the standard error √(0.0002 · (1/3 +
	// 1/24)).
	e = SwitchBack([]float64{0.11, 0.05, 0.09}, []float64{1, -1, 1})
	near(t, "three", e.Mean, 0.075, 1e-12)
	near(t, "three: standard error", e.SE, math.Sqrt(0.000075), 1e-12)

	for name, apart := range map[string][]float64{"one order": {1, 1, 1}, "two blocks": {1, -1}, "one block": {1}} {
		if e := SwitchBack([]float64{0.1, 0.1, 0.1}[:len(apart)], apart); e.N != 1 || math.Abs(e.Mean-0.1) > 1e-12 || e.P() != 1 {
			t.Errorf("%s: %+v, want 0.1 without an interval", name, e)
		}
	}
}
