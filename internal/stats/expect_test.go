package stats

import (
	"slices"
	"testing"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

func TestExpected(t *testing.T) {
	exp := experiment("base", "fast", "slow", "noisy", "alike")
	exp.Spec.Runs.N = 6
	exp.Spec.Workloads = exp.Spec.Workloads[:1]
	exp.Spec.Pairs = []int{1}
	values := func(f float64) []float64 { return []float64{f * 100, f * 101, f * 99, f * 100, f * 102, f * 98} }
	var all []record.Trial
	for name, f := range map[string]float64{"base": 1, "fast": 1.5, "slow": 0.5, "alike": 1.0001} {
		all = slices.Concat(all, trials(name, "stream", 1, metrics.Throughput, values(f)...))
	}
	all = slices.Concat(all, trials("noisy", "stream", 1, metrics.Throughput, 50, 150, 70, 130, 200, 20))
	for _, c := range []struct {
		x    spec.Expectation
		want Outcome
	}{
		{spec.Expectation{Variant: "fast", Faster: "base"}, OutcomeMet},
		{spec.Expectation{Variant: "slow", Faster: "base"}, OutcomeFailed},
		{spec.Expectation{Variant: "alike", Faster: "base"}, OutcomeFailed},
		{spec.Expectation{Variant: "noisy", Faster: "base"}, OutcomeInconclusive},
		{spec.Expectation{Variant: "fast", NotSlower: "base"}, OutcomeMet},
		{spec.Expectation{Variant: "alike", NotSlower: "base"}, OutcomeMet},
		{spec.Expectation{Variant: "slow", NotSlower: "base"}, OutcomeFailed},
		{spec.Expectation{Variant: "noisy", NotSlower: "base"}, OutcomeInconclusive},
		{spec.Expectation{Variant: "alike", Same: "base"}, OutcomeMet},
		{spec.Expectation{Variant: "fast", Same: "base"}, OutcomeFailed},
		{spec.Expectation{Variant: "noisy", Same: "base"}, OutcomeInconclusive},
		// The experiment compares these only with base.
		{spec.Expectation{Variant: "fast", Faster: "slow"}, OutcomeMet},
		{spec.Expectation{Variant: "base", Faster: "fast"}, OutcomeFailed},
		{spec.Expectation{Variant: "fast", Faster: "base", Metric: metrics.LatencyP50}, OutcomeInconclusive}, // which no workload gives
	} {
		exp.Spec.Expect = []spec.Expectation{c.x}
		s, err := Analyze(exp, all)
		if err != nil {
			t.Fatal(err)
		}
		if got := s.Expected[0].Outcome; got != c.want {
			t.Errorf("%s: %s, want %s", c.x, got, c.want)
		}
	}
	exp.Spec.Expect = []spec.Expectation{{Variant: "fast", Faster: "base", Metric: metrics.InterruptsPerGB}}
	s, err := Analyze(exp, slices.Concat(trials("base", "stream", 1, metrics.InterruptsPerGB, values(1)...), trials("fast", "stream", 1, metrics.InterruptsPerGB, values(0.5)...)))
	if err != nil || s.Expected[0].Outcome != OutcomeMet {
		t.Errorf("half the interrupts: %v, %v, want met", s.Expected, err)
	}
	exp.Spec.Expect = []spec.Expectation{{Variant: "fast", Faster: "base"}}
	s, err = Analyze(exp, trials("base", "stream", 1, metrics.Throughput, 1, 2, 3))
	if err != nil || s.Expected[0].Outcome != OutcomeInconclusive {
		t.Errorf("nothing measured of the variant: %v, %v, want inconclusive", s.Expected, err)
	}
}

// TestExpectedOfLatency: the metric decides which end of the interval is worse.
func TestExpectedOfLatency(t *testing.T) {
	for name, c := range map[string]struct {
		metric string
		ci     [2]float64
		want   Outcome
	}{
		"latency that may fall":   {metrics.LatencyP50, [2]float64{0.5, 1.01}, OutcomeMet},
		"latency that may rise":   {metrics.LatencyP50, [2]float64{0.99, 1.5}, OutcomeInconclusive},
		"throughput that may":     {metrics.Throughput, [2]float64{0.99, 1.5}, OutcomeMet},
		"throughput that may not": {metrics.Throughput, [2]float64{0.5, 1.01}, OutcomeInconclusive},
	} {
		r := Row{Metric: c.metric, Versus: &Versus{N: 6, CI95: c.ci, Verdict: Inconclusive}}
		if got := r.meets(spec.Expectation{NotSlower: "base"}, 0.02); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// TestExpectedNamesWhatDecided: for a claim on several cells, Decided has only the rows
// that failed, or are inconclusive, the worst first.
func TestExpectedNamesWhatDecided(t *testing.T) {
	exp := experiment("base", "other")
	exp.Spec.Runs.N = 6
	exp.Spec.Workloads = exp.Spec.Workloads[:1]
	exp.Spec.Pairs = []int{1, 2, 4, 8}
	steady := func(f float64) []float64 { return []float64{f * 100, f * 101, f * 99, f * 100, f * 102, f * 98} }
	noise := []float64{50, 150, 70, 130, 200, 20}
	for name, c := range map[string]struct {
		x       spec.Expectation
		other   [][]float64 // by pairs
		want    []int       // pairs of the rows that decided
		missing []string
	}{
		"failed":       {spec.Expectation{Variant: "other", Faster: "base"}, [][]float64{steady(1.5), steady(0.9), noise, steady(0.5)}, []int{8, 2}, nil},
		"inconclusive": {spec.Expectation{Variant: "other", Faster: "base"}, [][]float64{steady(1.5), steady(1.6), noise, steady(1.7)}, []int{4}, nil},
		"met":          {spec.Expectation{Variant: "other", Faster: "base"}, [][]float64{steady(1.5), steady(1.3), steady(1.6), steady(1.4)}, []int{2, 8, 1, 4}, nil},
		"not the same": {spec.Expectation{Variant: "other", Same: "base"}, [][]float64{steady(1), steady(1.1), steady(2), steady(0.7)}, []int{4, 8, 2}, nil},
		"missing":      {spec.Expectation{Variant: "other", Faster: "base"}, [][]float64{steady(1.5), steady(1.3), steady(1.6)}, nil, []string{"stream at 8 pairs"}},
	} {
		var all []record.Trial
		for i, pairs := range exp.Spec.Pairs {
			all = slices.Concat(all, trials("base", "stream", pairs, metrics.Throughput, steady(1)...))
			if i < len(c.other) {
				all = slices.Concat(all, trials("other", "stream", pairs, metrics.Throughput, c.other[i]...))
			}
		}
		exp.Spec.Expect = []spec.Expectation{c.x}
		s, err := Analyze(exp, all)
		if err != nil {
			t.Fatal(err)
		}
		var got []int
		for _, r := range s.Expected[0].Decided {
			got = append(got, r.Pairs)
		}
		if !slices.Equal(got, c.want) || !slices.Equal(s.Expected[0].Missing, c.missing) {
			t.Errorf("%s: decided at %v pairs, missing %q; want %v, %q", name, got, s.Expected[0].Missing, c.want, c.missing)
		}
	}
}
