package stats

import (
	"math"
	"slices"
	"testing"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats/estimate"
)

// alternating is a series of values that differ from 1 by a factor, up and down in turn,
// so that the scatter of their logs is known.
func alternating(blocks int, by float64) []float64 {
	xs := make([]float64, blocks)
	for i := range xs {
		xs[i] = 100 * math.Pow(1+by, float64(i%2*2-1))
	}
	return xs
}

func flat(blocks int) []float64 { return alternating(blocks, 0) }

func TestBlocksWanted(t *testing.T) {
	quiet := slices.Concat(
		trials("base", "stream", 1, metrics.Throughput, flat(8)...), trials("rps", "stream", 1, metrics.Throughput, alternating(8, 0.005)...))
	loud := slices.Concat(
		trials("base", "pingpong", 1, metrics.LatencyP50, flat(8)...), trials("rps", "pingpong", 1, metrics.LatencyP50, alternating(8, 0.04)...))
	wild := slices.Concat(
		trials("base", "stream", 16, metrics.Throughput, flat(8)...), trials("rps", "stream", 16, metrics.Throughput, alternating(8, 0.3)...))
	tail := slices.Concat(
		trials("base", "pingpong", 1, metrics.LatencyP99, flat(8)...), trials("rps", "pingpong", 1, metrics.LatencyP99, alternating(8, 0.3)...))
	later := trials("rps", "stream", 1, metrics.Throughput, alternating(20, 0.3)...)[8:]
	auto := spec.Runs{Auto: true, Max: 40, Width: 0.02}
	const least = "an unbiased interval, which takes four blocks more than the pilot"
	for _, c := range []struct {
		name   string
		runs   spec.Runs
		trials []record.Trial
		want   int
		why    string
	}{
		{"set", spec.Runs{N: 5}, wild, 5, "the experiment"},
		{"nothing yet", auto, nil, 12, least},
		{"within the pilot", auto, slices.DeleteFunc(slices.Clone(wild), func(tr record.Trial) bool { return tr.Block > 7 }), 12, least},
		{"quiet", auto, quiet, 12, least},
		// The logs are ±ln 1.04, their standard deviation 0.04193. With 21 blocks
		// t(13) = 2.160 makes that ±0.01977, just below ln 1.02 = 0.01980; with 20
		// t(12) = 2.179 makes it ±0.02043.
		{"loud", auto, slices.Concat(quiet, loud), 21, "rps pingpong at 1 pair, where the interval is ±3.6% so far"},
		{"wild", auto, slices.Concat(quiet, wild, loud), 40, "rps stream at 16 pairs, where the interval is ±26.4% so far"},
		{"a tail has no say", auto, slices.Concat(quiet, tail), 12, least},
		{"what came after the pilot has no say", auto, slices.Concat(quiet, later), 12, least},
		{"a limit below the least", spec.Runs{Auto: true, Max: 10, Width: 0.02}, wild, 10, "the limit"},
	} {
		exp := experiment("base", "rps")
		exp.Spec.Runs = c.runs
		blocks, why, err := BlocksWanted(exp, c.trials)
		if blocks != c.want || why != c.why || err != nil {
			t.Errorf("%s: %d for %s, %v; want %d for %s", c.name, blocks, why, err, c.want, c.why)
		}
	}
}

// TestAnalyzeAuto: the blocks that decided the number of blocks do not count for the
// scatter. Here they are quiet and the others are not. If the number was set, all blocks
// count.
func TestAnalyzeAuto(t *testing.T) {
	xs := slices.Concat(flat(8), alternating(12, 0.1))
	logs := make([]float64, len(xs))
	for i, x := range xs {
		logs[i] = math.Log(x / 100)
	}
	for _, c := range []struct {
		name   string
		runs   spec.Runs
		blocks int
		pilot  int
		codes  []string
	}{
		{"auto", spec.Runs{Auto: true, Max: 40, Width: 0.02}, 20, 8, []string{record.WarnFewBlocks}},
		{"wide enough", spec.Runs{Auto: true, Max: 40, Width: 0.2}, 20, 8, nil},
		{"cut short", spec.Runs{Auto: true, Max: 40, Width: 0.2}, 11, 0, nil},
		{"the limit left no choice", spec.Runs{Auto: true, Max: 12, Width: 0.2}, 12, 0, nil},
		{"set", spec.Runs{N: 20}, 20, 0, nil},
	} {
		exp := experiment("base", "rps")
		exp.Spec.Runs = c.runs
		rows := analyze(t, exp, trials("base", "stream", 1, metrics.Throughput, flat(c.blocks)...),
			trials("rps", "stream", 1, metrics.Throughput, xs[:c.blocks]...))
		near(t, c.name+": ratio", math.Log(rows[1].Versus.CI95[1]), estimate.Mean(logs[:c.blocks], c.pilot).Interval()[1], 1e-9)
		near(t, c.name+": mean", rows[1].CI95, estimate.Mean(xs[:c.blocks], c.pilot).Interval(), 1e-9)
		near(t, c.name, codes(rows[1]), c.codes, 0)
	}
}
