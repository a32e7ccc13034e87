package stats

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
)

func TestCompare(t *testing.T) {
	steady := []float64{100, 101, 99, 100, 102, 98}
	scaled := func(f float64) []float64 {
		var xs []float64
		for _, x := range steady {
			xs = append(xs, f*x)
		}
		return xs
	}
	result := func(name string, ts ...[]record.Trial) Result {
		r := Result{Name: name, Experiment: experiment("base", "rps")}
		for _, t := range ts {
			r.Trials = append(r.Trials, t...)
		}
		return r
	}
	stream := func(xs ...float64) []record.Trial { return trials("base", "stream", 1, metrics.Throughput, xs...) }
	latency := func(xs ...float64) []record.Trial { return trials("base", "pingpong", 1, metrics.LatencyP50, xs...) }
	withTail := func(xs []float64, factor float64) []record.Trial {
		ts := latency(xs...)
		for i := range ts {
			ts[i].Metrics[metrics.LatencyP99] = factor * xs[i]
		}
		return ts
	}
	tailOnly := func(xs ...float64) []record.Trial { return trials("base", "pingpong", 1, metrics.LatencyP99, xs...) }

	for _, c := range []struct {
		name    string
		a, b    Result
		gate    Gate
		missing []string
	}{
		{"as before", result("a", stream(steady...)), result("b", stream(steady...)), GateGood, nil},
		{"faster", result("a", stream(steady...)), result("b", stream(scaled(1.2)...)), GateGood, nil},
		{"slower", result("a", stream(steady...), latency(steady...)), result("b", stream(scaled(1.2)...), latency(scaled(1.2)...)), GateSlower, nil},
		{"noise", result("a", stream(steady...)), result("b", stream(50, 150, 70, 130)), GateInconclusive, nil},
		{"slower beats noise", result("a", stream(steady...), latency(steady...)), result("b", stream(50, 150, 70, 130), latency(scaled(1.2)...)), GateSlower, nil},
		{"a tail has no say", result("a", withTail(steady, 2)), result("b", withTail(steady, 9)), GateGood, nil},
		{"not even alone", result("a", stream(steady...), tailOnly(steady...)), result("b", stream(steady...), tailOnly(scaled(9)...)), GateInconclusive,
			[]string{"base pingpong at 1 pair: no latency_p50 in a"}},
		{"a median that is gone", result("a", withTail(steady, 2)), result("b", tailOnly(scaled(2)...)), GateInconclusive,
			[]string{"base pingpong at 1 pair: no latency_p50 in b"}},
		{"a median that is new", result("a", tailOnly(scaled(2)...)), result("b", withTail(steady, 2)), GateInconclusive,
			[]string{"base pingpong at 1 pair: no latency_p50 in a"}},
		{"a median of 0", result("a", latency(steady...)), result("b", latency(1, 0, 1)), GateInconclusive,
			[]string{"base pingpong at 1 pair: no ratio of latency_p50, because a value is 0"}},
		{"itself, however noisy", result("a", stream(50, 150, 70, 130)), result("a", stream(50, 150, 70, 130)), GateGood, nil},
		{"gone", result("a", stream(steady...), latency(steady...)), result("b", stream(steady...)), GateInconclusive,
			[]string{"base pingpong at 1 pair: not in b"}},
		{"new", result("a", stream(steady...)), result("b", stream(steady...), latency(steady...)), GateInconclusive,
			[]string{"base pingpong at 1 pair: not in a"}},
		{"nothing", result("a"), result("b"), GateInconclusive, nil},
	} {
		got, err := Compare(c.a, c.b, Only{})
		if err != nil {
			t.Fatal(err)
		}
		if got.Gate != c.gate {
			t.Errorf("%s: gate %s, want %s", c.name, got.Gate, c.gate)
		}
		if diff := cmp.Diff(c.missing, got.Missing, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s: missing (-want +got):\n%s", c.name, diff)
		}
	}

	got, err := Compare(result("a", stream(100, 110)), result("b", stream(200, 220, 200, 220, 210)), Only{})
	if err != nil {
		t.Fatal(err)
	}
	want := Change{Before: 105, Decides: true, Row: Row{
		Variant: "base", Workload: "stream", Pairs: 1, Metric: "throughput", Unit: "bit/s", Primary: true,
		N: 5, Mean: 210, CI95: [2]float64{197.5834, 222.4166}, Warnings: []record.Warning{},
		Versus: &Versus{Baseline: "a", N: 2, Ratio: 2.00044, CI95: [2]float64{1.42665, 2.80504}, P: 0.01818, Verdict: Faster},
	}}
	if diff := cmp.Diff([]Change{want}, got.Changes, cmpopts.IgnoreFields(Row{}, "Blocks"), cmpopts.EquateApprox(0, 1e-4)); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
}

// TestCompareOnly: metrics that were not requested do not decide, and a requested one
// does.
func TestCompareOnly(t *testing.T) {
	made := func(name string, stream, p50, p99 float64) Result {
		r := Result{Name: name, Experiment: experiment("base", "rps")}
		for _, v := range []string{"base", "rps"} {
			f := map[string]float64{"base": 1, "rps": stream}[v]
			r.Trials = append(r.Trials, trials(v, "stream", 1, metrics.Throughput, f*100, f*101, f*99, f*100, f*100, f*101)...)
			for i, x := range []float64{100, 101, 99, 100, 100, 101} {
				r.Trials = append(r.Trials, record.Trial{
					Block: i + 1, Order: i + 1, Attempt: 1, Status: record.StatusOK, Variant: v, Workload: "pingpong", Pairs: 1,
					Metrics: map[string]float64{metrics.LatencyP50: x * p50, metrics.LatencyP99: x * p99},
				})
			}
		}
		return r
	}
	before, after := made("a", 1, 1, 1), made("b", 0.5, 1, 2)
	for name, c := range map[string]struct {
		only Only
		gate Gate
	}{
		"all":                    {Only{}, GateSlower},
		"the variant that fell":  {Only{Variants: []string{"rps"}}, GateSlower},
		"the other":              {Only{Variants: []string{"base"}}, GateGood},
		"the other workload":     {Only{Workloads: []string{"pingpong"}}, GateGood},
		"its tail":               {Only{Workloads: []string{"pingpong"}, Metrics: []string{metrics.LatencyP99}}, GateSlower},
		"a metric that none has": {Only{Metrics: []string{metrics.Completion}}, GateInconclusive},
	} {
		got, err := Compare(before, after, c.only)
		if err != nil || got.Gate != c.gate {
			t.Errorf("%s: gate %s, %v, want %s", name, got.Gate, err, c.gate)
		}
	}
}
