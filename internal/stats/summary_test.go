package stats

import (
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// experiment has a workload for each kind of primary metric. The first of the variants
// is the baseline.
func experiment(variants ...string) *spec.Experiment {
	exp := &spec.Experiment{Metadata: spec.Metadata{Name: "test"}}
	exp.Spec = spec.Spec{
		Baseline: variants[0], Pairs: []int{1, 16}, Margin: 0.02, Runs: spec.Runs{N: 20},
		Workloads: []spec.Workload{
			{Name: "stream", Stream: &spec.Traffic{}},
			{Name: "pingpong", PingPong: &spec.Traffic{}, Pairs: []int{1}},
		},
	}
	for _, v := range variants {
		exp.Spec.Variants = append(exp.Spec.Variants, spec.Variant{Name: v})
	}
	return exp
}

// trials returns trials of one metric of one cell, one for each block.
func trials(variant, workload string, pairs int, metric string, values ...float64) []record.Trial {
	var ts []record.Trial
	for i, x := range values {
		ts = append(ts, record.Trial{
			Block: i + 1, Order: i + 1, Attempt: 1, Status: record.StatusOK,
			Variant: variant, Workload: workload, Pairs: pairs, Metrics: map[string]float64{metric: x},
		})
	}
	return ts
}

func analyze(t *testing.T, exp *spec.Experiment, ts ...[]record.Trial) []Row {
	t.Helper()
	s, err := Analyze(exp, slices.Concat(ts...))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := json.Marshal(s); err != nil {
		t.Error(err)
	}
	return s.Rows
}

// TestAnalyze: in the middle block a fault of the machine halves everything. Within the
// block it cancels out.
func TestAnalyze(t *testing.T) {
	rows := analyze(t, experiment("base", "rps"),
		trials("rps", "stream", 1, metrics.Throughput, 110, 121, 55, 110, 121),
		trials("base", "stream", 1, metrics.Throughput, 100, 110, 50, 100, 110))
	want := []Row{{
		Variant: "base", Workload: "stream", Pairs: 1, Metric: "throughput", Unit: "bit/s", Primary: true,
		N: 5, Mean: 94, CI95: [2]float64{62.8345, 125.1655}, Warnings: []record.Warning{},
		Blocks: []Block{{1, 100, 0}, {2, 110, 0}, {3, 50, 0}, {4, 100, 0}, {5, 110, 0}},
	}, {
		Variant: "rps", Workload: "stream", Pairs: 1, Metric: "throughput", Unit: "bit/s", Primary: true,
		N: 5, Mean: 103.4, CI95: [2]float64{69.1179, 137.6821}, Warnings: []record.Warning{},
		Versus: &Versus{Baseline: "base", N: 5, Ratio: 1.1, CI95: [2]float64{1.1, 1.1}, P: 0, Verdict: Faster},
		Blocks: []Block{{1, 110, 1.1}, {2, 121, 1.1}, {3, 55, 1.1}, {4, 110, 1.1}, {5, 121, 1.1}},
	}}
	if diff := cmp.Diff(want, rows, cmpopts.EquateApprox(0, 1e-4)); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
}

func TestVerdicts(t *testing.T) {
	base := []float64{100, 101, 99, 100, 102, 98}
	times := func(factor, scatter float64) []float64 {
		xs := slices.Clone(base)
		for i := range xs {
			xs[i] *= factor * (1 + scatter*float64(i%2*2-1))
		}
		return xs
	}
	for _, c := range []struct {
		name   string
		metric string
		values []float64
		want   Verdict
	}{
		{"more throughput", metrics.Throughput, times(1.1, 0.01), Faster},
		{"less throughput", metrics.Throughput, times(0.9, 0.01), Slower},
		{"more latency", metrics.LatencyP50, times(1.1, 0.01), Slower},
		{"less latency", metrics.LatencyP50, times(0.9, 0.01), Faster},
		{"less CPU", metrics.CPUPerGB, times(0.9, 0.01), Faster},
		{"equal", metrics.Throughput, times(1, 0.005), Same},
		{"beyond doubt, within the margin", metrics.Throughput, times(1.01, 0.001), Same},
		{"across the margin", metrics.Throughput, times(1.015, 0.02), Inconclusive},
		{"scatter", metrics.Throughput, times(1.1, 0.2), Inconclusive},
		{"one block", metrics.Throughput, times(2, 0)[:1], Inconclusive},
		{"one block, equal", metrics.Throughput, times(1, 0)[:1], Inconclusive},
	} {
		rows := analyze(t, experiment("base", "rps"),
			trials("base", "stream", 1, c.metric, base...), trials("rps", "stream", 1, c.metric, c.values...))
		if got := rows[1].Versus.Verdict; got != c.want {
			t.Errorf("%s: %s, want %s (%+v)", c.name, got, c.want, *rows[1].Versus)
		}
	}
}

// TestHolmFamilies: a p of 0.03 is a finding if one variant is compared with the
// baseline, but not if three are. Comparisons with another baseline, workload or number
// of pairs do not count.
func TestHolmFamilies(t *testing.T) {
	exp := experiment("base", "a", "b", "c", "other", "d")
	exp.Spec.Variants[5].Versus = "other"
	noisy := []float64{112, 102, 118, 99, 121, 107}
	var ts []record.Trial
	for _, v := range exp.Spec.Variants {
		for _, pairs := range exp.Spec.Pairs {
			xs := []float64{100, 100, 100, 100, 100, 100}
			if v.Name != "base" && v.Name != "other" {
				xs = noisy
			}
			ts = append(ts, trials(v.Name, "stream", pairs, metrics.Throughput, xs...)...)
		}
	}
	p := math.NaN()
	for _, r := range analyze(t, exp, ts) {
		switch r.Variant {
		case "a", "b", "c":
			if math.IsNaN(p) {
				p = r.Versus.P / 3
			}
			near(t, r.Variant, r.Versus.P, 3*p, 1e-12)
			near(t, r.Variant, r.Versus.Verdict, Inconclusive, 0)
		case "d":
			near(t, "d", r.Versus.P, p, 1e-12)
			near(t, "d", r.Versus.Verdict, Faster, 0)
			near(t, "d", r.Versus.Baseline, "other", 0)
		default:
			if r.Versus != nil {
				t.Errorf("%s is compared with %s", r.Variant, r.Versus.Baseline)
			}
		}
	}
	if !(p > 0.05/3 && p < 0.05) {
		t.Errorf("p is %v: the data do not tell adjusted from raw", p)
	}
}

// TestAttempts: the last successful attempt counts, a ratio needs both trials, and
// failures are reported.
func TestAttempts(t *testing.T) {
	base := trials("base", "stream", 1, metrics.Throughput, 100, 100, 100, 100, 100, 100)
	rps := trials("rps", "stream", 1, metrics.Throughput, 1, 200, 200, 200, 200, 1)
	rps[0].Status, rps[5].Status = record.StatusFailed, record.StatusFailed
	again := trials("rps", "stream", 1, metrics.Throughput, 200, 200)
	again[0].Attempt, again[1].Attempt = 2, 2
	rps[1].Metrics[metrics.Throughput] = 7 // was measured again after a success
	base[3].Status = record.StatusFailed
	rows := analyze(t, experiment("base", "rps"), again, base, rps)
	near(t, "baseline's blocks", rows[0].N, 5, 0)
	near(t, "blocks", rows[1].N, 5, 0)
	near(t, "mean", rows[1].Mean, 200, 0)
	near(t, "versus", rows[1].Versus, &Versus{
		Baseline: "base", N: 4, Ratio: 2, CI95: [2]float64{2, 2}, Verdict: Faster}, 1e-12)
	near(t, "warnings", rows[1].Warnings, []record.Warning{{Code: record.WarnFailedTrials,
		Message: "2 of 7 attempts failed; 5 blocks have a trial that succeeded"}}, 0)
}

// TestAllFailed: a cell in which everything failed is reported, not left out.
func TestAllFailed(t *testing.T) {
	ts := trials("rps", "pingpong", 1, metrics.LatencyP50, 1, 1)
	for i := range ts {
		ts[i].Status = record.StatusFailed
	}
	rows := analyze(t, experiment("base", "rps"), trials("base", "pingpong", 1, metrics.LatencyP50, 1, 1), ts)
	near(t, "row", rows[1], Row{Variant: "rps", Workload: "pingpong", Pairs: 1, Metric: "latency_p50", Unit: "s", Primary: true,
		Warnings: []record.Warning{{Code: record.WarnFailedTrials,
			Message: "2 of 2 attempts failed; 0 blocks have a trial that succeeded"}}}, 0)
}

// TestPrimaryWithoutMedian: a workload whose tool printed no median is judged by the next metric that trials have.
func TestPrimaryWithoutMedian(t *testing.T) {
	exp := experiment("base", "rps")
	exp.Spec.Workloads = append(exp.Spec.Workloads, spec.Workload{Name: "http", HTTP: &spec.Traffic{Tool: spec.ToolAB}})
	s, err := Analyze(exp, slices.Concat(
		trials("base", "http", 1, metrics.Rate, 100, 101, 99, 100, 102, 98), trials("rps", "http", 1, metrics.Rate, 50, 51, 49, 50, 52, 48)))
	if err != nil {
		t.Fatal(err)
	}
	if got := s.Primary("http"); got != metrics.Rate {
		t.Errorf("primary metric %q, want %s", got, metrics.Rate)
	}
	if p := s.Proof(exp, exp.Spec.Variants[1]); len(p.Slower) != 1 || p.Slower[0].Metric != metrics.Rate {
		t.Errorf("proof %+v, want one row that is slower", p)
	}
	if got := s.Primary("stream"); got != "" {
		t.Errorf("primary metric %q of a workload without trials", got)
	}
}

func TestNoRatio(t *testing.T) {
	for _, c := range []struct {
		metric string
		values []float64
		codes  []string
	}{
		{metrics.Loss, []float64{0, 0, 0.1, 0, 0}, nil},
		{metrics.Loss, []float64{0.1, 0.1, 0.1, 0.1, 0.1}, nil},
		{metrics.SoftirqPerGB, []float64{0, 1, 1, 1, 1}, []string{record.WarnNoRatio}},
		{metrics.Throughput, nil, []string{record.WarnNoRatio}},
	} {
		base := c.values
		if base == nil {
			base = []float64{1, 1, 1, 1, 1}
		}
		ts := trials("base", "stream", 1, c.metric, base...)
		for i := range ts {
			if c.values == nil {
				ts[i].Status = record.StatusFailed
			}
		}
		rows := analyze(t, experiment("base", "rps"), ts, trials("rps", "stream", 1, c.metric, 1, 1, 1, 1, 1))
		r := rows[len(rows)-1]
		if r.Versus != nil {
			t.Errorf("%s %v: compared: %+v", c.metric, c.values, *r.Versus)
		}
		near(t, c.metric, codes(r), c.codes, 0)
	}
}

func TestWarnings(t *testing.T) {
	base := trials("base", "stream", 1, metrics.Throughput, 100, 103, 106, 109, 112, 115, 118, 121)
	rps := trials("rps", "stream", 1, metrics.Throughput, 100, 103, 106, 109, 112, 115, 118, 121)
	few := trials("rps", "stream", 16, metrics.Throughput, 1, 1, 1, 1)
	retransmits := record.Warning{Code: record.WarnRetransmits, Message: "0.3% sent again"}
	rps[1].Warnings = []record.Warning{retransmits, {Code: record.WarnRetransmits, Message: "another pair"}}
	rps[4].Warnings = []record.Warning{{Code: record.WarnRetransmits, Message: "later"}}
	rows := analyze(t, experiment("base", "rps"), base, rps, few)
	near(t, "baseline", codes(rows[0]), []string{record.WarnDrift}, 0)
	if w := rows[0].Warnings[0].Message; !strings.Contains(w, "+18%") {
		t.Errorf("drift: %s", w)
	}
	near(t, "variant", rows[1].Warnings, []record.Warning{{Code: record.WarnRetransmits,
		Message: "in 2 of 8 trials: 0.3% sent again"}}, 0)
	near(t, "few", codes(rows[2]), []string{record.WarnFewBlocks, record.WarnNoRatio}[:1], 0)
	one := analyze(t, experiment("base"), trials("base", "stream", 1, metrics.Throughput, 100))
	near(t, "one", one[0].Warnings, []record.Warning{{Code: record.WarnFewBlocks, Message: "the interval rests on 1 block, and should rest on at least 5"}}, 0)
}

func codes(r Row) []string {
	var cs []string
	for _, w := range r.Warnings {
		cs = append(cs, w.Code)
	}
	return cs
}

func TestOrder(t *testing.T) {
	var got []string
	for _, r := range analyze(t, experiment("base", "rps"),
		trials("rps", "pingpong", 1, metrics.LatencyP50, 1, 1), trials("rps", "stream", 16, metrics.Throughput, 1, 1),
		trials("rps", "stream", 1, metrics.CPUPerGB, 1, 1), trials("base", "pingpong", 1, metrics.Rate, 1, 1)) {
		got = append(got, strings.Join([]string{r.Variant, r.Workload, r.Metric}, " "))
	}
	near(t, "rows", got, []string{"base pingpong rate", "rps stream cpu_per_gb", "rps stream throughput", "rps pingpong latency_p50"}, 0)
}

// TestDaemonSetMetrics: each observed DaemonSet has rows of its own, which are compared with nothing.
func TestDaemonSetMetrics(t *testing.T) {
	var got []string
	for _, r := range analyze(t, experiment("base", "rps"),
		trials("base", "stream", 1, "daemonset_memory:a/x", 1, 1), trials("base", "stream", 16, "daemonset_cpu:a/y", 1, 1),
		trials("rps", "stream", 16, "daemonset_cpu:a/y", 2, 2), trials("rps", "stream", 1, "daemonset_cpu:a/x", 1, 1)) {
		got = append(got, strings.Join([]string{r.Variant, r.Metric, r.Unit}, " "))
		if r.Versus != nil {
			t.Errorf("%s is compared: %+v", r.Metric, r.Versus)
		}
	}
	near(t, "rows", got, []string{"base daemonset_memory:a/x bytes", "base daemonset_cpu:a/y 1", "rps daemonset_cpu:a/x 1", "rps daemonset_cpu:a/y 1"}, 0)
	both := trials("base", "stream", 1, "daemonset_cpu:b/b", 1)
	both[0].Metrics["daemonset_cpu:a/a"] = 1
	both[0].Metrics[metrics.Throughput] = 1
	got = nil
	for _, r := range analyze(t, experiment("base", "rps"), both) {
		got = append(got, r.Metric)
	}
	near(t, "rows", got, []string{"throughput", "daemonset_cpu:a/a", "daemonset_cpu:b/b"}, 0)
}

func TestAnalyzeErrors(t *testing.T) {
	unknown := trials("rps", "stream", 1, metrics.Throughput, 1)
	unknown[0].Metrics = map[string]float64{"thruput": 1}
	early := trials("rps", "stream", 1, metrics.Throughput, 1)
	early[0].Block = 0
	late := trials("rps", "stream", 1, metrics.Throughput, 1)
	late[0].Block = math.MaxInt
	for _, c := range []struct {
		trials []record.Trial
		want   string
	}{
		{trials("rfs", "stream", 1, metrics.Throughput, 1), `analyze test: trials of variant "rfs", workload "stream", 1 pairs: the experiment has no such combination`},
		{trials("rps", "pingpong", 16, metrics.LatencyP50, 1), `analyze test: trials of variant "rps", workload "pingpong", 16 pairs: the experiment has no such combination`},
		{trials("rps", "stream", 1, metrics.Throughput, math.Inf(1)), "analyze test: trial 1: throughput is +Inf"},
		{unknown, `analyze test: trial 1: metric "thruput" is unknown`},
		{early, "analyze test: trial 1: block 0: blocks count from 1 to 100000 at most"},
		{late, "analyze test: trial 1: block 9223372036854775807: blocks count from 1 to 100000 at most"},
	} {
		if _, err := Analyze(experiment("base", "rps"), c.trials); err == nil || err.Error() != c.want {
			t.Errorf("error %v, want %s", err, c.want)
		}
	}
}

func near[T any](t *testing.T, name string, got, want T, within float64) {
	t.Helper()
	if diff := cmp.Diff(want, got, cmpopts.EquateApprox(0, within)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}
