package stats

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats/estimate"
)

// world simulates trials. A result is the truth of the variant, times the drift of the machine at that time,
// times noise.
type world struct {
	// truth of each variant; the first is the baseline's and is 1.
	truth []float64
	// drift of the machine, as a factor, after a number of trials.
	drift func(trials float64) float64
	// noise of one trial, as a log of mean 0, in a block.
	noise func(r *rand.Rand, variant, block int) float64
}

// True ratios of as many variants as were published, and of only two.
var (
	seven = []float64{1, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3}
	two   = seven[:2]
)

func (w world) trial(r *rand.Rand, variant, block, at int) record.Trial {
	x := w.truth[variant] * math.Exp(w.noise(r, variant, block))
	if w.drift != nil {
		x *= w.drift(float64(at))
	}
	return record.Trial{
		Block: block, Order: at + 1, Attempt: 1, Status: record.StatusOK,
		Variant: strconv.Itoa(variant), Workload: "stream", Pairs: 1,
		Metrics: map[string]float64{metrics.Throughput: x},
	}
}

// block returns a trial of every variant, in random order, at the time of the block.
func (w world) block(r *rand.Rand, block int) []record.Trial {
	return w.blockAt(r, block, (block-1)*len(w.truth))
}

// blockAt returns a block that starts after the given number of trials.
func (w world) blockAt(r *rand.Rand, block, at int) []record.Trial {
	ts := make([]record.Trial, 0, len(w.truth))
	for i, v := range r.Perm(len(w.truth)) {
		ts = append(ts, w.trial(r, v, block, at+i))
	}
	return ts
}

func (w world) experiment() *spec.Experiment {
	names := make([]string, len(w.truth))
	for i := range names {
		names[i] = strconv.Itoa(i)
	}
	exp := experiment(names...)
	exp.Spec.Pairs = []int{1}
	return exp
}

// covers reports whether a row's interval holds the true ratio.
func (w world) covers(r Row) bool {
	truth := w.truth[r.Variant[0]-'0']
	return r.Versus.CI95[0] <= truth && truth <= r.Versus.CI95[1]
}

func rows(t *testing.T, exp *spec.Experiment, ts []record.Trial) []Row {
	t.Helper()
	s, err := Analyze(exp, ts)
	if err != nil {
		t.Fatal(err)
	}
	return s.Rows
}

func normal(sd float64) func(*rand.Rand, int, int) float64 {
	return func(r *rand.Rand, _, _ int) float64 { return sd * r.NormFloat64() }
}

// heavy has noise by Student's t with three degrees of freedom, which has rare and wide outliers, scaled to
// the standard deviation.
func heavy(sd float64) func(*rand.Rand, int, int) float64 {
	return func(r *rand.Rand, _, _ int) float64 {
		a, b, c := r.NormFloat64(), r.NormFloat64(), r.NormFloat64()
		return sd * r.NormFloat64() / math.Sqrt(a*a+b*b+c*c)
	}
}

// disturbed has normal noise, and of the variants from the given one on, one trial in twenty loses 10 to 50%.
func disturbed(sd float64, from int) func(*rand.Rand, int, int) float64 {
	// The mean of ln x for x uniform in 0.5–0.9 is the increase of x·ln x − x, divided by 0.4.
	integral := func(x float64) float64 { return x*math.Log(x) - x }
	shift := 0.05 * (integral(0.9) - integral(0.5)) / 0.4
	return func(r *rand.Rand, v, _ int) float64 {
		x := sd * r.NormFloat64()
		if v < from {
			return x
		}
		if r.Float64() < 0.05 {
			x += math.Log(0.5 + 0.4*r.Float64())
		}
		return x - shift
	}
}

// skewed has trials that are slower by random factors, whose logs are exponentially distributed. For variants other
// than the baseline, these logs are a multiple of the baseline's.
func skewed(sd, multiple float64) func(*rand.Rand, int, int) float64 {
	return func(r *rand.Rand, v, _ int) float64 {
		if v > 0 {
			return multiple * sd * (1 - r.ExpFloat64())
		}
		return sd * (1 - r.ExpFloat64())
	}
}

// rising drifts up by 18% within a number of trials. The published baseline did that within its own twenty
// (TestPublished).
func rising(trials float64) func(float64) float64 {
	return func(at float64) float64 { return 1 + 0.18*at/trials }
}

// published is the number of experiments of each kind behind the figures in docs/results/method.md.
const published = 10_000

// simulated is the number of experiments of each kind in this run. The published number takes minutes of both
// CPUs, so only make soak runs it: a twentieth finds an interval that is too narrow by two or three points of
// coverage.
var simulated = flag.Int("simulated", published/20, fmt.Sprintf("experiments of each kind in a simulation, %d for those of docs/results/method.md", published))

// TestMain simulates few experiments with -short: with the race detector, the others take minutes.
func TestMain(m *testing.M) {
	flag.Parse()
	if testing.Short() {
		*simulated = min(*simulated, 25)
	}
	os.Exit(m.Run())
}

// shown checks that a page of the docs has exactly this line. With fewer experiments than published, it only
// checks that the page has a line about this simulation.
func shown(t *testing.T, doc, line string) {
	t.Helper()
	t.Log(line)
	text, err := os.ReadFile("../../docs/" + doc)
	if err != nil {
		t.Fatal(err)
	}
	if *simulated != published {
		what, _, _ := strings.Cut(strings.TrimPrefix(line, "| "), " |")
		line = "| " + what + " |"
	} else {
		line += "\n"
	}
	if !strings.Contains(string(text), "\n"+line) {
		t.Errorf("docs/%s does not have the line: %s", doc, line)
	}
}

// within checks that a simulated share lies in the bounds. With the published number of experiments, the
// standard error of a share is 0.22 points. Three standard errors are allowed if the truth lies on a bound.
// With fewer experiments the error is larger.
func within(t *testing.T, share, low, high float64) {
	t.Helper()
	slack := 3 * (standardError(float64(*simulated)) - standardError(published))
	low, high = low-slack, high+slack
	if share < low || share > high {
		t.Errorf("%.2f%% is not in %.2f–%.2f%%", 100*share, 100*low, 100*high)
	}
}

// standardError returns the standard error of a share whose true value is 5 or 95%, over n experiments.
func standardError(n float64) float64 { return math.Sqrt(0.05 * 0.95 / n) }

func TestCoverage(t *testing.T) {
	t.Parallel()
	for i, c := range []struct {
		name      string
		world     world
		blocks    int
		low, high float64
	}{
		{"log-normal noise, SD 5%", world{seven[:4], nil, normal(0.05)}, 20, 0.94, 0.96},
		{"upward drift of 18% over the run, seven variants", world{seven, rising(140), normal(0.05)}, 20, 0.94, 0.96},
		{"upward drift of 18% every 20 trials, seven variants", world{seven, rising(20), normal(0.05)}, 20, 0.94, 0.96},
		{"upward drift of 18% over the run; 1 trial in 20 loses 10–50%", world{seven, rising(140), disturbed(0.05, 0)}, 20, 0.93, 1},
		{"log-normal noise, SD 5%, five blocks only", world{two, nil, normal(0.05)}, 5, 0.94, 0.96},
		{"heavy tails (Student's t, 3 degrees of freedom)", world{two, nil, heavy(0.05)}, 20, 0.93, 1},
		{"skewed noise (exponential)", world{two, nil, skewed(0.05, 1)}, 20, 0.93, 1},
		{"skewed noise, SD twice as large for the variant", world{two, nil, skewed(0.05, 2)}, 20, 0.93, 1},
		{"1 trial in 20 of the variant loses 10–50%, none of the baseline's", world{two, nil, disturbed(0.05, 1)}, 20, 0.9, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(1, uint64(i)))
			exp := c.world.experiment()
			hits, of := 0, 0
			for range *simulated {
				var ts []record.Trial
				for b := 1; b <= c.blocks; b++ {
					ts = append(ts, c.world.block(r, b)...)
				}
				for _, row := range rows(t, exp, ts)[1:] {
					of++
					if c.world.covers(row) {
						hits++
					}
				}
			}
			share := float64(hits) / float64(of)
			shown(t, "results/method.md", fmt.Sprintf("| %s | %.1f%% |", c.name, 100*share))
			within(t, share, c.low, c.high)
		})
	}
}

// TestCoverageSequential simulates twenty runs of one variant, then twenty of the next, on the machines of
// TestCoverage. The original experiment did that, and the test uses the interval for it.
func TestCoverageSequential(t *testing.T) {
	t.Parallel()
	for i, c := range []struct {
		name      string
		world     world
		low, high float64
	}{
		{"log-normal noise, SD 5%", world{two, nil, normal(0.05)}, 0.94, 0.96},
		{"upward drift of 18% over 140 trials", world{two, rising(140), normal(0.05)}, 0, 0.8},
		{"upward drift of 18% every 20 trials", world{two, rising(20), normal(0.05)}, 0, 0.05},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(2, uint64(i)))
			hits := 0
			for range *simulated {
				var logs [2][]float64
				for at := range 40 {
					x := c.world.trial(r, at/20, at%20+1, at).Metrics[metrics.Throughput]
					logs[at/20] = append(logs[at/20], math.Log(x))
				}
				ci := estimate.Mean(logs[1], 0).Minus(estimate.Mean(logs[0], 0)).Interval()
				if truth := math.Log(c.world.truth[1]); ci[0] <= truth && truth <= ci[1] {
					hits++
				}
			}
			share := float64(hits) / float64(*simulated)
			shown(t, "results/method.md", fmt.Sprintf("| sequential: %s | %.1f%% |", c.name, 100*share))
			within(t, share, c.low, c.high)
		})
	}
}

// TestCoverageAuto simulates runs: auto, from the pilot to the interval. A single comparison is the hardest
// case, because its own pilot decides how long it runs. The test also shows the coverage of two other
// intervals after the same blocks: Stein's, which uses only the pilot's scatter, and one that ignores how the
// number of blocks was chosen.
func TestCoverageAuto(t *testing.T) {
	t.Parallel()
	loud := func(r *rand.Rand, _, block int) float64 {
		if block > PilotBlocks {
			return 0.04 * r.NormFloat64()
		}
		return 0.02 * r.NormFloat64()
	}
	for i, c := range []struct {
		name  string
		world world
		// For normal noise the true coverage is exactly 95%, so the bound leaves three standard
		// errors of a simulated share.
		low float64
	}{
		{"log-normal noise, SD 1%", world{two, nil, normal(0.01)}, 0.95},
		{"log-normal noise, SD 2%", world{two, nil, normal(0.02)}, 0.95},
		{"log-normal noise, SD 3%", world{two, nil, normal(0.03)}, 0.95},
		{"log-normal noise, SD 8%", world{two, nil, normal(0.08)}, 0.95},
		{"log-normal noise, SD 3%, two variants", world{seven[:3], nil, normal(0.03)}, 0.95},
		{"log-normal noise, SD 3%, upward drift of 18% every 20 trials", world{two, rising(20), normal(0.03)}, 0.95},
		{"skewed noise, SD twice as large for the variant", world{two, nil, skewed(0.015, 2)}, 0.95},
		{"skewed noise", world{two, nil, skewed(0.03, 1)}, 0.95},
		{"heavy tails", world{two, nil, heavy(0.03)}, 0.95},
		{"1 trial in 20 loses 10–50%", world{two, nil, disturbed(0.02, 0)}, 0.95},
		{"noise doubles after the pilot", world{two, nil, loud}, 0.95},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(3, uint64(i)))
			exp := c.world.experiment()
			exp.Spec.Runs = spec.Runs{Auto: true, Max: 40, Width: 0.02}
			hits, stein, naive, of, blocks := 0, 0, 0, 0, 0
			var narrow, wide float64 // half-widths, ours and Stein's
			for range *simulated {
				var ts []record.Trial
				for b := 1; b <= PilotBlocks; b++ {
					ts = append(ts, c.world.block(r, b)...)
				}
				wanted, _, err := BlocksWanted(exp, ts)
				if err != nil {
					t.Fatal(err)
				}
				for b := PilotBlocks + 1; b <= wanted; b++ {
					ts = append(ts, c.world.block(r, b)...)
				}
				blocks += wanted
				for _, row := range rows(t, exp, ts)[1:] {
					of++
					if c.world.covers(row) {
						hits++
					}
				}
				// The other intervals, for the first variant.
				tb, err := sortTrials(exp, ts)
				if err != nil {
					t.Fatal(err)
				}
				_, ratios, err := logRatios(tb.cells[1], tb.cells[0], metrics.Throughput)
				if err != nil {
					t.Fatal(err)
				}
				miss := math.Abs(estimate.Mean(ratios, 0).Mean - math.Log(c.world.truth[1]))
				pilot := estimate.Mean(ratios[:PilotBlocks], 0)
				w := pilot.HalfWidth() * math.Sqrt(PilotBlocks/float64(wanted))
				if miss <= w {
					stein++
				}
				if miss <= estimate.Mean(ratios, 0).HalfWidth() {
					naive++
				}
				narrow += estimate.Mean(ratios, PilotBlocks).HalfWidth()
				wide += w
			}
			share := float64(hits) / float64(of)
			n := float64(*simulated)
			shown(t, "results/method.md", fmt.Sprintf("| %s | %.0f | %.1f%% | ±%.1f%% | %.1f%% | ±%.1f%% | %.1f%% |", c.name,
				float64(blocks)/n, 100*share, 100*narrow/n, 100*float64(stein)/n, 100*wide/n, 100*float64(naive)/n))
			within(t, share, c.low-3*standardError(published), 1)
		})
	}
}

// TestCoverageFamily tests Holm's procedure: if all variants, or half of them, are like the baseline, at most one
// experiment in twenty calls any of those faster or slower.
func TestCoverageFamily(t *testing.T) {
	t.Parallel()
	for i, c := range []struct {
		name  string
		truth []float64
	}{
		{"six variants equal to the baseline", []float64{1, 1, 1, 1, 1, 1, 1}},
		{"two equal to it, two faster", []float64{1, 1, 1, 1.1, 1.1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(4, uint64(i)))
			w := world{c.truth, rising(140), normal(0.05)}
			exp := w.experiment()
			exp.Spec.Margin = 0 // nothing counts as the same, so that every finding shows
			wrong := 0
			for range *simulated {
				var ts []record.Trial
				for b := 1; b <= 20; b++ {
					ts = append(ts, w.block(r, b)...)
				}
				for v, row := range rows(t, exp, ts)[1:] {
					if c.truth[v+1] == 1 && row.Versus.Verdict != Inconclusive {
						wrong++
						break
					}
				}
			}
			share := float64(wrong) / float64(*simulated)
			shown(t, "results/method.md", fmt.Sprintf("| %s: any false positive | %.1f%% |", c.name, 100*share))
			within(t, share, 0.01, 0.05+3*standardError(published))
		})
	}
}

// TestCoverageSame: if a variant differs by exactly the margin, at most one experiment in twenty calls it the
// same.
func TestCoverageSame(t *testing.T) {
	t.Parallel()
	for i, c := range []struct {
		name      string
		truth     float64
		low, high float64
	}{
		{"true ratio 1.02", 1.02, 0.01, 0.05},
		{"true ratio 1/1.02", 1 / 1.02, 0.01, 0.05},
		{"true ratio 1.01", 1.01, 0.95, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(5, uint64(i)))
			w := world{[]float64{1, c.truth}, rising(140), normal(0.005)}
			exp := w.experiment()
			same := 0
			for range *simulated {
				var ts []record.Trial
				for b := 1; b <= 20; b++ {
					ts = append(ts, w.block(r, b)...)
				}
				if rows(t, exp, ts)[1].Versus.Verdict == Same {
					same++
				}
			}
			share := float64(same) / float64(*simulated)
			shown(t, "results/method.md", fmt.Sprintf("| %s: verdict `same` | %.1f%% |", c.name, 100*share))
			within(t, share, c.low, c.high)
		})
	}
}

// TestCoverageAgreement compares published effects with simulated results, some without an effect and some
// with the same one. A result that could not tell one from the other must not count as an agreement.
func TestCoverageAgreement(t *testing.T) {
	t.Parallel()
	const comparisons = 200
	for i, c := range []struct {
		name   string
		noise  float64
		blocks int
		same   int // minimum number that agree if ours has their effect
	}{
		{"noise of SD 5%, 20 blocks", 0.05, 20, 190},
		{"noise of SD 5%, 5 blocks", 0.05, 5, 170},
		{"noise of SD 20%, 5 blocks", 0.2, 5, 10},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(10, uint64(i)))
			// verdicts counts the verdicts of 200 comparisons, whose effects are spread evenly on
			// logs from 1.05 to 2
			verdicts := func(truth func(effect float64) float64) (count map[Agreement]int, met int) {
				count = map[Agreement]int{}
				for k := range comparisons {
					effect := 1.05 * math.Pow(2/1.05, float64(k)/(comparisons-1))
					w := world{[]float64{1, truth(effect)}, nil, normal(c.noise)}
					exp := w.experiment()
					exp.Spec.Margin, exp.Spec.Precision = 0.02, 1.5
					exp.Spec.Published = []spec.Published{{Variant: "1", Versus: "0", Workload: "stream", Pairs: 1, Metric: metrics.Throughput, Ratio: effect}}
					var ts []record.Trial
					for b := 1; b <= c.blocks; b++ {
						ts = append(ts, w.block(r, b)...)
					}
					p := analyzed(t, exp, ts).Published[0]
					count[p.Verdict]++
					if p.Verdict != Differs {
						met++
					}
				}
				return count, met
			}
			placebo, met := verdicts(func(float64) float64 { return 1 })
			same, _ := verdicts(func(effect float64) float64 { return effect })
			text, err := os.ReadFile("../../docs/results/method.md")
			if err != nil {
				t.Fatal(err)
			}
			line := fmt.Sprintf("| %s | %d | %d | %d | %d | %d | %d | %d |\n", c.name, met, placebo[Agrees], placebo[TooImprecise], placebo[Differs], same[Agrees], same[TooImprecise], same[Differs])
			if t.Log(line); !strings.Contains(string(text), "\n"+line) {
				t.Errorf("docs/results/method.md does not have the line: %s", line)
			}
			if placebo[Agrees] > 2 || same[Agrees] < c.same {
				t.Errorf("%d agree without an effect, and %d with it", placebo[Agrees], same[Agrees])
			}
		})
	}
}
