package stats

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// types returns an experiment with one workload, stream. Its variants are instance types with a
// price for each of two nodes.
func types(prices map[string]spec.Price) *spec.Experiment {
	var names []string
	for name := range prices {
		names = append(names, name)
	}
	slices.Sort(names)
	exp := experiment(names...)
	exp.Spec.Target.Lab = &spec.Lab{Nodes: 2}
	for i, name := range names {
		exp.Spec.Variants[i].NIC = &spec.NIC{Price: prices[name]}
	}
	return exp
}

// around returns values with a scatter of their own, which blocks do not share.
func around(x, scatter float64) []float64 {
	var xs []float64
	for _, d := range []float64{0.3, -1, 0.8, -0.2, 1, -0.6, -0.4, 0.1} {
		xs = append(xs, x*(1+scatter*d))
	}
	return xs
}

func pricesOf(t *testing.T, exp *spec.Experiment, ts ...[]record.Trial) []Price {
	t.Helper()
	s, err := Analyze(exp, slices.Concat(ts...))
	if err != nil {
		t.Fatal(err)
	}
	return s.Prices
}

func TestPerPrice(t *testing.T) {
	exp := types(map[string]spec.Price{"a": "0.25 USD", "b": ""})
	got := pricesOf(t, exp,
		trials("a", "stream", 1, metrics.Throughput, 90, 110), trials("b", "stream", 1, metrics.Throughput, 1, 1),
		trials("a", "pingpong", 1, metrics.LatencyP50, 4e-5, 6e-5))
	want := []Price{{Variant: "a", Price: 0.5, Currency: "USD", Values: []PerPrice{
		{Workload: "stream", Pairs: 1, Metric: metrics.Throughput, Unit: "bit/s per USD/h", Value: 200, CI95: [2]float64{-54.1241, 454.1241}},
		{Workload: "pingpong", Pairs: 1, Metric: metrics.LatencyP50, Unit: "s × USD/h", Value: 2.5e-5, CI95: [2]float64{-3.85310e-5, 8.85310e-5}},
	}}}
	if diff := cmp.Diff(want, got, cmpopts.EquateApprox(0, 1e-4)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestDominated(t *testing.T) {
	const cheap, dear = "cheap", "dear"
	for name, c := range map[string]struct {
		prices      [2]spec.Price // of cheap and dear
		cheap, dear []float64     // throughput
		by, maybe   []string      // dear
		back        []string      // cheap
	}{
		"as fast for more":             {[2]spec.Price{"1 USD", "2 USD"}, around(100, 0.001), around(100, 0.002), []string{cheap}, nil, nil},
		"slower for more":              {[2]spec.Price{"1 USD", "2 USD"}, around(100, 0.1), around(50, 0.1), []string{cheap}, nil, nil},
		"faster for more":              {[2]spec.Price{"1 USD", "2 USD"}, around(100, 0.001), around(110, 0.002), nil, nil, nil},
		"faster by less than matters":  {[2]spec.Price{"1 USD", "2 USD"}, around(100, 0.001), around(101, 0.001), []string{cheap}, nil, nil},
		"inconclusive":                 {[2]spec.Price{"1 USD", "2 USD"}, around(100, 0.1), around(100, 0.2), nil, []string{cheap}, nil},
		"the same for the same":        {[2]spec.Price{"1 USD", "1 USD"}, around(100, 0.001), around(100, 0.001), nil, nil, nil},
		"slower for the same":          {[2]spec.Price{"1 USD", "1 USD"}, around(100, 0.001), around(90, 0.001), []string{cheap}, nil, nil},
		"one block is none":            {[2]spec.Price{"1 USD", "2 USD"}, []float64{100}, []float64{50}, nil, nil, nil},
		"the other has no such result": {[2]spec.Price{"1 USD", "2 USD"}, nil, around(50, 0.1), nil, nil, nil},
	} {
		exp := types(map[string]spec.Price{cheap: c.prices[0], dear: c.prices[1]})
		got := pricesOf(t, exp, trials(cheap, "stream", 1, metrics.Throughput, c.cheap...), trials(dear, "stream", 1, metrics.Throughput, c.dear...))
		back, forth := got[0], got[1]
		if !slices.Equal(forth.DominatedBy, c.by) || !slices.Equal(forth.MaybeBy, c.maybe) || !slices.Equal(back.DominatedBy, c.back) {
			t.Errorf("%s: dear by %v, maybe by %v, cheap by %v", name, forth.DominatedBy, forth.MaybeBy, back.DominatedBy)
		}
	}
}

// TestPrimary: the tool reports the primary metric of a workload. That metric is also judged
// first, except under load.
func TestPrimary(t *testing.T) {
	for _, c := range []struct {
		workload        spec.Workload
		primary, judged string
		tool            string // tool of a second variant
	}{
		{spec.Workload{Stream: &spec.Traffic{Tool: spec.ToolQperf}}, metrics.Throughput, metrics.Throughput, ""},
		{spec.Workload{PingPong: &spec.Traffic{Tool: spec.ToolQperf}}, metrics.LatencyMean, metrics.LatencyMean, ""},
		{spec.Workload{PingPong: &spec.Traffic{Tool: spec.ToolSockperf}}, metrics.LatencyP50, metrics.LatencyP50, ""},
		{spec.Workload{PingPong: &spec.Traffic{Tool: spec.ToolSockperf}}, metrics.LatencyMean, metrics.LatencyMean, spec.ToolQperf},
		{spec.Workload{Stream: &spec.Traffic{Tool: spec.ToolIperf3}}, metrics.Throughput, metrics.Throughput, spec.ToolQperf},
		{spec.Workload{UnderLoad: &spec.Traffic{}}, metrics.LatencyP50, metrics.LatencyP99, ""},
	} {
		c.workload.Name = "traffic"
		exp := &spec.Experiment{Spec: spec.Spec{Variants: []spec.Variant{{Name: "own"}}}}
		if c.tool != "" {
			exp.Spec.Variants = append(exp.Spec.Variants, spec.Variant{Name: "other", Tools: map[string]string{"traffic": c.tool}})
		}
		if got := mainMetric(exp, c.workload); got != c.primary {
			t.Errorf("%s by %s and %q: primary %s, want %s", c.workload.Kind(), c.workload.Traffic().Tool, c.tool, got, c.primary)
		}
		if got := Judged(exp, c.workload)[0]; got != c.judged {
			t.Errorf("%s by %s and %q: judged by %s first, want %s", c.workload.Kind(), c.workload.Traffic().Tool, c.tool, got, c.judged)
		}
	}
}

// TestNotDominated: a variant is not dominated if it is better in one metric of one workload.
func TestNotDominated(t *testing.T) {
	exp := types(map[string]spec.Price{"cheap": "1 USD", "dear": "2 USD"})
	common := [][]record.Trial{
		trials("cheap", "stream", 1, metrics.Throughput, around(100, 0.001)...), trials("dear", "stream", 1, metrics.Throughput, around(50, 0.001)...),
		trials("cheap", "pingpong", 1, metrics.LatencyP50, around(100, 0.001)...),
	}
	for latency, want := range map[float64][]string{80: nil, 100: {"cheap"}, 120: {"cheap"}} {
		got := pricesOf(t, exp, append(common, trials("dear", "pingpong", 1, metrics.LatencyP50, around(latency, 0.001)...))...)
		if diff := cmp.Diff(want, got[1].DominatedBy); diff != "" {
			t.Errorf("with a latency of %g of 100 (-want +got):\n%s", latency, diff)
		}
	}
}
