package stats

import (
	"math"
	"math/rand/v2"
	"testing"

	"gonum.org/v1/gonum/stat/distuv"
)

// TestModerated checks that variances with the same true value become the common one, and that those with different
// true values keep most of their own. It also checks that the prior's parameters are found again in variances drawn
// from it.
func TestModerated(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	const n, df = 4000, 4
	draw := func(nature func() float64) (variances, dfs []float64) {
		chi := distuv.ChiSquared{K: df, Src: r}
		for range n {
			variances, dfs = append(variances, nature()*chi.Rand()/df), append(dfs, df)
		}
		return variances, dfs
	}
	same, dfs := draw(func() float64 { return 2 })
	if typical, prior := priorOf(same, dfs); math.Abs(typical-2) > 0.1 || prior < 100 {
		t.Errorf("the same by nature: typical %g with %g degrees of freedom", typical, prior)
	}
	const worth = 6
	chi := distuv.ChiSquared{K: worth, Src: r}
	differ, dfs := draw(func() float64 { return 2 * worth / chi.Rand() })
	typical, prior := priorOf(differ, dfs)
	if math.Abs(typical-2) > 0.15 || math.Abs(prior-worth) > 1 {
		t.Errorf("drawn from 2 with 6 degrees of freedom: typical %g with %g", typical, prior)
	}
	results, total := moderated(differ, dfs)
	for i, v := range differ[:10] {
		if want := (prior*typical + df*v) / (prior + df); math.Abs(results[i]/want-1) > 1e-12 || total[i] != prior+df {
			t.Errorf("%g became %g with %g degrees of freedom", v, results[i], total[i])
		}
	}
	for _, zeros := range [][]float64{{0, 0, 0, 0}, {1}, {0, 1}} {
		results, _ := moderated(zeros, []float64{2, 2, 2, 2}[:len(zeros)])
		for _, v := range results {
			if math.IsNaN(v) || v < 0 {
				t.Errorf("%v became %v", zeros, results)
			}
		}
	}
}

func TestInverseTrigamma(t *testing.T) {
	for _, x := range []float64{0.05, 0.5, 1, 3, 50, 1e4} {
		if got := inverseTrigamma(trigamma(x)); math.Abs(got/x-1) > 1e-6 {
			t.Errorf("of %g: %g", x, got)
		}
	}
}
