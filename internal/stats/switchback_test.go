package stats

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats/estimate"
)

// TestAnalyzePeriods: a period's value is the mean of its trials, whatever other attempts there
// were. A drift from period to period cancels out.
func TestAnalyzePeriods(t *testing.T) {
	exp := experiment("base", "an", "an/rps")
	on := &spec.Switch{To: []string{"on"}, Back: []string{"off"}}
	exp.Spec.Variants[1].Switch, exp.Spec.Variants[2].Switch = on, on
	exp.Spec.TrialsPerPeriod = 2
	var ts []record.Trial
	entry := 1
	add := func(block, period, repeat, attempt int, variant string, x float64) {
		ts = append(ts, record.Trial{Block: block, Period: period, Entry: entry, Repeat: repeat, Attempt: attempt, Order: len(ts) + 1,
			Variant: variant, Workload: "stream", Pairs: 1, Status: record.StatusOK, Metrics: map[string]float64{metrics.Throughput: x}})
	}
	// base and an are a period apart, which makes 1%; an/rps has the periods of an.
	for i, period := range []int{1, 4, 5, 8} { // periods of base
		block, other := i+1, period+1-2*(i%2)
		at := func(period int) float64 { return 100 * math.Pow(1.01, float64(period)) }
		fails := func() { ts[len(ts)-1].Status, ts[len(ts)-1].Metrics = record.StatusFailed, nil }
		entry = 1
		add(block, period, 1, 1, "base", 5) // in a period that was interrupted
		add(block, period, 3, 1, "base", 7) // failed after the interrupted one
		entry = 2
		add(block, period, 3, 1, "base", 0)
		fails()
		add(block, period, 1, 1, "base", 0)
		fails()
		add(block, period, 1, 2, "base", at(period)*0.9)
		add(block, period, 2, 1, "base", at(period)*1.1)
		add(block, other, 1, 1, "an", at(other)*1.19)
		add(block, other, 2, 1, "an", at(other)*1.21)
		add(block, other, 1, 1, "an/rps", at(other)*(1.2+0.1*float64(i%2)))
	}
	rows := analyze(t, exp, ts)
	near(t, "base", []float64{rows[0].Blocks[0].Value, rows[0].Blocks[1].Value}, []float64{101, 104.060401}, 1e-9)
	for i, want := range []float64{1.2, math.Sqrt(1.2 * 1.3)} {
		near(t, rows[i+1].Variant, rows[i+1].Versus.Ratio, want, 1e-9)
		near(t, rows[i+1].Variant, float64(rows[i+1].Versus.N), 4, 0)
	}
	near(t, "an", rows[1].Versus.CI95, [2]float64{1.2, 1.2}, 1e-6)

	exp.Spec.Variants[2].Versus = "an"
	within := analyze(t, exp, ts)[2].Versus
	// In the same periods: the logs of 1, 1.3/1.2, 1, 1.3/1.2 with three degrees of freedom.
	near(t, "within a period", math.Log(within.CI95[1]/within.Ratio), 3.18245*math.Log(1.3/1.2)/2/math.Sqrt(3), 1e-6)

	few := analyze(t, exp, slices.DeleteFunc(slices.Clone(ts), func(tr record.Trial) bool { return tr.Block > 3 }))
	if got := few[1].Warnings[0].Message; got != "the interval rests on 3 periods of the variant, and should rest on at least 4" {
		t.Errorf("warning: %s", got)
	}
}

func TestUnfinishedPeriods(t *testing.T) {
	exp := experiment("base", "an")
	exp.Spec.Variants[1].Switch = &spec.Switch{To: []string{"on"}, Back: []string{"off"}}
	exp.Spec.Runs, exp.Spec.TrialsPerPeriod, exp.Spec.Workloads = spec.Runs{N: 2}, 2, exp.Spec.Workloads[1:]
	var ts []record.Trial
	for i := range 7 {
		ts = append(ts, record.Trial{Block: 1 + i/4, Repeat: 1 + i%2, Variant: []string{"base", "an"}[i/2%2], Workload: "pingpong", Pairs: 1, Status: record.StatusOK})
	}
	got, err := Unfinished(exp, ts)
	if want := "7 of 8 trials are done, 1 of 2 blocks are complete"; got != want || err != nil {
		t.Errorf("%s, %v; want %s", got, err, want)
	}
}

// switchWorld simulates a machine whose performance is at another level after every switch.
type switchWorld struct {
	drift bool // upward, of 18% over the run
	// jump draws the log of a level. Levels add up if wanders is true.
	jump    func(r *rand.Rand) float64
	wanders bool
	noise   float64 // SD of a trial
}

// switchTruth is the true effect of the switch.
const switchTruth = 1.1

// levels returns the levels of n periods. Each comes after a switch, unless it stays at the level
// of the one before.
func (w switchWorld) levels(r *rand.Rand, n int, stays func(period int) bool) []float64 {
	levels := make([]float64, n)
	level := 0.0
	for p := range levels {
		if w.jump != nil && (p == 0 || !stays(p)) {
			if !w.wanders {
				level = 0
			}
			level += w.jump(r)
		}
		levels[p] = level
	}
	return levels
}

// trial measures a variant at a time of the run, from 0 to 1.
func (w switchWorld) trial(r *rand.Rand, level, at float64, on bool) float64 {
	x := math.Exp(level + w.noise*r.NormFloat64())
	if w.drift {
		x *= 1 + 0.18*at
	}
	if on {
		x *= switchTruth
	}
	return x
}

// abba returns the order of the periods: true if the switch is on. Rounds are A B B A or B A A B.
func abba(r *rand.Rand, rounds int) (on []bool) {
	for range rounds {
		first := r.IntN(2) == 0
		on = append(on, first, !first, !first, first)
	}
	return on
}

// run returns the trials of a run in periods.
func (w switchWorld) run(r *rand.Rand, on []bool, each int, levels []float64) []record.Trial {
	var ts []record.Trial
	for p, is := range on {
		for i := range each {
			at := float64(p*each+i) / float64(len(on)*each)
			ts = append(ts, record.Trial{
				Block: p/2 + 1, Period: p + 1, Repeat: i + 1, Order: len(ts) + 1, Attempt: 1, Status: record.StatusOK,
				Variant: map[bool]string{false: "0", true: "1"}[is], Workload: "stream", Pairs: 1,
				Metrics: map[string]float64{metrics.Throughput: w.trial(r, levels[p], at, is)},
			})
		}
	}
	return ts
}

// holds reports whether an interval on logs contains the truth.
func holds(ci [2]float64) bool {
	return ci[0] <= math.Log(switchTruth) && math.Log(switchTruth) <= ci[1]
}

// TestCoverageSwitchback simulates experiments with a switch: 12 periods of three trials each,
// unless a row says otherwise. It compares slipstream's interval with three others. The first
// treats the same trials as independent, paired in the order in which they ran. The second is for
// the same design, but without a switch between neighbouring periods of one variant. The third is
// Welch's, for the same number of trials of one variant, one switch, and as many trials of the
// other.
func TestCoverageSwitchback(t *testing.T) {
	t.Parallel()
	five := func(r *rand.Rand) float64 { return 0.05 * r.NormFloat64() }
	slow := func(r *rand.Rand) float64 { // one host in four is 10% slower
		if r.IntN(4) == 0 {
			return math.Log(0.9)
		}
		return 0
	}
	for i, c := range []struct {
		name      string
		world     switchWorld
		runs      int // periods of each variant
		low, high float64
	}{
		{"no drift, no jumps", switchWorld{noise: 0.05}, 6, 0.94, 0.96},
		{"upward drift of 18% over the run", switchWorld{drift: true, noise: 0.05}, 6, 0.94, 0.96},
		{"a jump of SD 5% at each switch", switchWorld{jump: five, noise: 0.05}, 6, 0.94, 0.96},
		{"drift and jumps", switchWorld{drift: true, jump: five, noise: 0.05}, 6, 0.94, 0.96},
		{"drift and jumps, four periods of each variant", switchWorld{drift: true, jump: five, noise: 0.05}, 4, 0.94, 0.96},
		{"drift and jumps, 20 periods of each variant", switchWorld{drift: true, jump: five, noise: 0.05}, 20, 0.94, 0.96},
		{"drift and jumps, each from the level before", switchWorld{drift: true, jump: five, wanders: true, noise: 0.05}, 6, 0.94, 0.96},
		{"drift and jumps, noise of SD 1%", switchWorld{drift: true, jump: five, noise: 0.01}, 6, 0.94, 0.96},
		{"drift; one switch in four ends on a host that is 10% slower", switchWorld{drift: true, jump: slow, noise: 0.05}, 6, 0.94, 0.97},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(6, uint64(i)))
			const each = 3
			exp := world{truth: two}.experiment()
			exp.Spec.Variants[1].Switch = &spec.Switch{To: []string{"on"}, Back: []string{"off"}}
			exp.Spec.Runs, exp.Spec.TrialsPerPeriod = spec.Runs{N: c.runs}, each
			var ours, independent, kept, once, width, narrow float64
			count := func(to *float64, ci [2]float64) {
				if holds(ci) {
					*to++
				}
			}
			for range *simulated {
				on := abba(r, c.runs/2)
				always := func(int) bool { return false }
				ts := c.world.run(r, on, each, c.world.levels(r, len(on), always))
				v := rows(t, exp, ts)[1].Versus
				ci := [2]float64{math.Log(v.CI95[0]), math.Log(v.CI95[1])}
				count(&ours, ci)
				width += (ci[1] - ci[0]) / 2

				pairs := make([]float64, 0, c.runs*each)
				for b := range c.runs {
					for i := range each {
						x, y := ts[b*2*each+i], ts[(b*2+1)*each+i]
						if x.Variant > y.Variant {
							x, y = y, x
						}
						pairs = append(pairs, math.Log(y.Metrics[metrics.Throughput]/x.Metrics[metrics.Throughput]))
					}
				}
				e := estimate.Mean(pairs, 0)
				count(&independent, e.Interval())
				narrow += e.HalfWidth()

				same := c.world.levels(r, len(on), func(p int) bool { return on[p] == on[p-1] })
				v = rows(t, exp, c.world.run(r, on, each, same))[1].Versus
				count(&kept, [2]float64{math.Log(v.CI95[0]), math.Log(v.CI95[1])})

				levels := c.world.levels(r, 2, always)
				var logs [2][]float64
				n := c.runs * each
				for at := range 2 * n {
					x := c.world.trial(r, levels[at/n], float64(at)/float64(2*n), at >= n)
					logs[at/n] = append(logs[at/n], math.Log(x))
				}
				count(&once, estimate.Mean(logs[1], 0).Minus(estimate.Mean(logs[0], 0)).Interval())
			}
			n := float64(*simulated)
			shown(t, "results/method.md", fmt.Sprintf("| %s | %.1f%% | ±%.1f%% | %.1f%% | ±%.1f%% | %.1f%% | %.1f%% |", c.name,
				100*ours/n, 100*width/n, 100*independent/n, 100*narrow/n, 100*kept/n, 100*once/n))
			within(t, ours/n, c.low, c.high)
		})
	}
}
