package stats

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// lines returns an experiment with two series over 1 to 16 pairs. The second is compared with the
// first.
func lines() *spec.Experiment {
	exp := experiment("0", "1")
	exp.Spec.Pairs, exp.Spec.Workloads = []int{1, 2, 4, 8, 16}, exp.Spec.Workloads[:1]
	exp.Spec.Series = []spec.Series{
		{Name: "0", Axis: spec.AxisPairs, Of: []string{"0"}},
		{Name: "1", Axis: spec.AxisPairs, Of: []string{"1"}, Versus: "0"},
	}
	return exp
}

// alongPairs returns the second series after a number of blocks, given its true ratios to the first.
func alongPairs(t *testing.T, r *rand.Rand, w world, ratios []float64, blocks int) Series {
	t.Helper()
	exp := lines()
	var ts []record.Trial
	for b := 1; b <= blocks; b++ {
		for i, pairs := range exp.Spec.Pairs {
			w.truth = []float64{1, ratios[i]}
			for _, one := range w.blockAt(r, b, len(ts)) {
				one.Pairs = pairs
				ts = append(ts, one)
			}
		}
	}
	table, err := sortTrials(exp, ts)
	if err != nil {
		t.Fatal(err)
	}
	return table.series()[1]
}

// straight returns ratios from one at the first number of pairs to one at the last, evenly spaced.
func straight(from, to float64) []float64 {
	out := make([]float64, 5)
	for i := range out {
		out[i] = from * math.Pow(to/from, float64(i)/4)
	}
	return out
}

// where returns the value at which the line through ratios crosses a level.
func where(ratios []float64, level float64) float64 {
	for i := range ratios[1:] {
		a, b := math.Log(ratios[i]/level), math.Log(ratios[i+1]/level)
		if a*b <= 0 && a != b {
			return math.Exp2(float64(i) + a/(a-b))
		}
	}
	return math.NaN()
}

// TestCoverageCrossover shows how many of the experiments that report a crossover have the true one in
// its interval.
func TestCoverageCrossover(t *testing.T) {
	t.Parallel()
	for i, c := range []struct {
		name      string
		ratios    []float64
		level     float64
		world     world
		blocks    int
		low, high float64
	}{
		{"0.5 to 2", straight(0.5, 2), 1, world{noise: normal(0.05)}, 20, 0.94, 0.96},
		{"0.8 to 1.25", straight(0.8, 1.25), 1, world{noise: normal(0.05)}, 20, 0.94, 0.96},
		{"0.8 to 1.25, upward drift of 18% every 20 trials", straight(0.8, 1.25), 1, world{drift: rising(20), noise: normal(0.05)}, 20, 0.94, 0.96},
		{"0.8 to 1.25, five blocks only", straight(0.8, 1.25), 1, world{noise: normal(0.05)}, 5, 0.94, 0.96},
		{"0.8 to 1.25, heavy tails", straight(0.8, 1.25), 1, world{noise: heavy(0.05)}, 20, 0.94, 1},
		{"0.6 to 1.1", straight(0.6, 1.1), 1, world{noise: normal(0.05)}, 20, 0.94, 0.96},
		{"0.9 to 1.1", straight(0.9, 1.1), 1, world{noise: normal(0.05)}, 20, 0.94, 0.96},
		{"0.95 to 1.05", straight(0.95, 1.05), 1, world{noise: normal(0.05)}, 20, 0.94, 1},
		{"0.8 to 1.02", straight(0.8, 1.02), 1, world{noise: normal(0.05)}, 20, 0.85, 1}, // crossovers are found too soon
		{"1 up to 4 pairs, 0.9 at 8, 0.7 at 16, noise of SD 1%", []float64{1, 1, 1, 0.9, 0.7}, 1 / 1.02, world{noise: normal(0.01)}, 20, 0.94, 0.96},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(6, uint64(i)))
			truth := where(c.ratios, c.level)
			reported, hits := 0, 0
			for range *simulated {
				s := alongPairs(t, r, c.world, c.ratios, c.blocks)
				if len(s.Crossovers) > 0 {
					reported++
				}
				if slices.ContainsFunc(s.Crossovers, func(c Crossover) bool { return c.CI95[0] <= truth && truth <= c.CI95[1] }) {
					hits++
				}
			}
			share, n := float64(hits)/float64(reported), float64(*simulated)
			shown(t, "results/method.md", fmt.Sprintf("| %s | %.1f | %.1f%% | %.1f%% |", c.name, truth, 100*float64(reported)/n, 100*share))
			within(t, share, c.low, c.high)
		})
	}
}

// TestCoverageNoCrossover shows how many experiments report a crossover that does not exist, and how
// many find a difference at a value without one.
func TestCoverageNoCrossover(t *testing.T) {
	t.Parallel()
	for i, c := range []struct {
		name  string
		ratio float64
	}{{"equal at every value", 1}, {"better by 3% at every value", 1.03}, {"better by 10% at every value", 1.1}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(7, uint64(i)))
			reported, faster := 0, 0
			for range *simulated {
				s := alongPairs(t, r, world{noise: normal(0.05)}, straight(c.ratio, c.ratio), 20)
				if len(s.Crossovers) > 0 {
					reported++
				}
				if slices.ContainsFunc(s.Points, func(p Point) bool { return p.Versus.Verdict == Faster || p.Versus.Verdict == Slower }) {
					faster++
				}
			}
			n := float64(*simulated)
			shown(t, "results/method.md", fmt.Sprintf("| %s | %.1f%% | %.1f%% |", c.name, 100*float64(reported)/n, 100*float64(faster)/n))
			within(t, float64(reported)/n, 0, 0.01)
			if c.ratio == 1 {
				within(t, float64(faster)/n, 0.01, 0.05+3*standardError(published))
			}
		})
	}
}
