package stats

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// seriesOf returns the series of an experiment with the given trials.
func seriesOf(t *testing.T, exp *spec.Experiment, ts ...[]record.Trial) []Series {
	t.Helper()
	s, err := Analyze(exp, slices.Concat(ts...))
	if err != nil {
		t.Fatal(err)
	}
	return s.Series
}

// five returns values with little scatter, for five blocks.
func five(x float64) []float64 { return []float64{x, 1.001 * x, 0.999 * x, 1.0005 * x, 0.9995 * x} }

// brief describes a series in a few words: its points, with the variants of its steps.
func brief(s Series) string {
	text := fmt.Sprintf("%s, %s", s.Name, s.Workload)
	if s.Pairs > 0 {
		text += fmt.Sprintf(" %d", s.Pairs)
	}
	text += " " + s.Metric + ":"
	for _, p := range s.Points {
		text += fmt.Sprintf(" %g %s", p.Value, p.Variant)
		if p.Step != nil {
			text += fmt.Sprintf(" (%.2f of %s, %s)", p.Step.Ratio, p.Step.Baseline, p.Step.Verdict)
		}
		if p.Versus != nil {
			text += fmt.Sprintf(" [%.2f of %s, %s]", p.Versus.Ratio, p.Versus.Baseline, p.Versus.Verdict)
		}
	}
	return text
}

// TestSeries: a series is in the order of its values, for every traffic. A point is compared with the one
// before, and with the other series if that has the same value. Values that were not measured are missing.
func TestSeries(t *testing.T) {
	exp := experiment("4", "2", "1", "slow/1", "slow/4", "slow/8")
	exp.Spec.Target.Lab = &spec.Lab{Nodes: 2}
	for i, n := range []int{4, 2, 1, 1, 4, 8} {
		exp.Spec.Variants[i].Path = &spec.Path{Service: &spec.Service{Mode: spec.ServiceIPTables, Backends: n}}
	}
	exp.Spec.Series = []spec.Series{
		{Name: "slow", Axis: spec.AxisBackends, Of: []string{"slow/1", "slow/4", "slow/8"}, Versus: "fast"},
		{Name: "fast", Axis: spec.AxisBackends, Of: []string{"4", "2", "1"}},
	}
	var ts []record.Trial
	for name, x := range map[string]float64{"1": 100, "2": 200, "4": 200.2, "slow/1": 100, "slow/4": 100, "slow/8": 90} {
		ts = slices.Concat(ts, trials(name, "stream", 1, metrics.Throughput, five(x)...))
		if name != "slow/8" {
			ts = slices.Concat(ts, trials(name, "pingpong", 1, metrics.LatencyP50, five(1/x)...))
		}
	}
	ts = slices.Concat(ts, trials("1", "stream", 16, metrics.Throughput, five(7)...))
	var got []string
	for _, s := range seriesOf(t, exp, ts) {
		got = append(got, brief(s))
	}
	if diff := cmp.Diff([]string{
		"slow, stream 1 throughput: 1 slow/1 [1.00 of 1, same] 4 slow/4 (1.00 of slow/1, same) [0.50 of 4, slower] 8 slow/8 (0.90 of slow/4, slower)",
		"slow, pingpong 1 latency_p50: 1 slow/1 [1.00 of 1, same] 4 slow/4 (1.00 of slow/1, same) [2.00 of 4, slower]",
		"fast, stream 1 throughput: 1 1 2 2 (2.00 of 1, faster) 4 4 (1.00 of 2, same)",
		"fast, pingpong 1 latency_p50: 1 1 2 2 (0.50 of 1, faster) 4 4 (1.00 of 2, same)",
	}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestSeriesOverSize: workloads that differ only in their size are one series. If they differ in more,
// they are separate series.
func TestSeriesOverSize(t *testing.T) {
	exp := experiment("native", "vxlan")
	exp.Spec.Pairs = []int{1}
	exp.Spec.Workloads = nil
	var ts []record.Trial
	for _, w := range []struct {
		name, protocol string
		size           spec.Bytes
	}{{"tcp-64", "tcp", 64}, {"udp-1472", "udp", 1472}, {"udp-64", "udp", 64}, {"tcp-1k", "tcp", 1000}, {"again", "tcp", 64}} {
		exp.Spec.Workloads = append(exp.Spec.Workloads, spec.Workload{Name: w.name, Stream: &spec.Traffic{Protocol: w.protocol, Size: w.size}})
		ts = slices.Concat(ts, trials("native", w.name, 1, metrics.Throughput, five(float64(w.size))...), trials("vxlan", w.name, 1, metrics.Throughput, five(float64(w.size)/2)...))
	}
	exp.Spec.Series = []spec.Series{
		{Name: "native", Axis: spec.AxisSize, Of: []string{"native"}},
		{Name: "vxlan", Axis: spec.AxisSize, Of: []string{"vxlan"}, Versus: "native"},
	}
	var got []string
	for _, s := range seriesOf(t, exp, ts) {
		text := s.Name + " " + s.Workload + ":"
		for _, p := range s.Points {
			text += fmt.Sprintf(" %g %s", p.Value, p.Workload)
			if p.Versus != nil {
				text += fmt.Sprintf(" %.2f", p.Versus.Ratio)
			}
		}
		got = append(got, text)
	}
	if diff := cmp.Diff([]string{
		"native tcp: 64 tcp-64 1000 tcp-1k", "native udp: 64 udp-64 1472 udp-1472",
		"vxlan tcp: 64 tcp-64 0.50 1000 tcp-1k 0.50", "vxlan udp: 64 udp-64 0.50 1472 udp-1472 0.50",
	}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestSeriesTraffic: a series has a name for each traffic, from the names of its workloads.
func TestSeriesTraffic(t *testing.T) {
	for names, want := range map[[4]string][]string{
		{"stream-64", "stream-1472", "udp-64", "udp-1472"}: {"stream", "udp"},
		{"64-tcp", "1464-tcp", "64-udp", "1464-udp"}:       {"tcp", "udp"},
		{"s1000", "s10000", "v1000-udp", "v10000-udp"}:     {"s", "v-udp"},
		{"c8-64", "c8-1464", "c16-64", "c16-1464"}:         {"c8", "c16"},
		{"tcp-1k", "tcp-64k", "udp1k", "udp16k"}:           {"tcp", "udp"},
		{"64c8", "1464c8", "64c16", "1464c16"}:             {"stream", "64c16"},
		{"small", "large", "low", "high"}:                  {"stream", "low"},
	} {
		exp := experiment("native")
		exp.Spec.Pairs, exp.Spec.Workloads = []int{1}, nil
		exp.Spec.Series = []spec.Series{{Name: "native", Axis: spec.AxisSize, Of: []string{"native"}}}
		var ts []record.Trial
		for i, name := range names {
			exp.Spec.Workloads = append(exp.Spec.Workloads, spec.Workload{Name: name, Stream: &spec.Traffic{
				Size: []spec.Bytes{64, 1472}[i%2], Connections: 8 + i/2,
			}})
			ts = slices.Concat(ts, trials("native", name, 1, metrics.Throughput, 1, 2))
		}
		var got []string
		for _, s := range seriesOf(t, exp, ts) {
			got = append(got, s.Workload)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", names, diff)
		}
	}
}

// TestCrossovers: where a crossover is found, with ratios at 1 to 16 pairs, and where there is none.
func TestCrossovers(t *testing.T) {
	const m = 1.02
	for name, c := range map[string]struct {
		metric string
		ratios []float64
		noise  map[int][]float64 // of points, instead of 0.1%
		want   []Crossover
	}{
		"faster everywhere":          {metrics.Throughput, straight(1.1, 1.3), nil, nil},
		"proven nowhere":             {metrics.Throughput, straight(1.01, 1.03), map[int][]float64{0: wide, 1: wide, 2: wide, 3: wide, 4: wide}, nil},
		"slower, then faster":        {metrics.Throughput, []float64{0.5, 0.8, 1.25, 2, 2}, nil, []Crossover{{From: Slower, To: Faster, Value: math.Exp2(1.5)}}},
		"of a latency":               {metrics.LatencyP50, []float64{2, 1.25, 0.8, 0.5, 0.5}, nil, []Crossover{{From: Slower, To: Faster, Value: math.Exp2(1.5)}}},
		"same, then slower":          {metrics.Throughput, []float64{1, 1, 1, 0.5, 0.5}, nil, []Crossover{{From: Same, To: Slower, Value: 4 * math.Exp2(math.Log(m)/math.Ln2)}}},
		"faster, then same":          {metrics.Throughput, []float64{2, 2, 1, 1, 1}, nil, []Crossover{{From: Faster, To: Same, Value: 4 / math.Exp2(math.Log(m)/math.Ln2)}}},
		"faster, slower, and faster": {metrics.Throughput, []float64{2, 0.5, 0.5, 0.5, 2}, nil, []Crossover{{From: Faster, To: Slower, Value: math.Exp2(0.5)}, {From: Slower, To: Faster, Value: math.Exp2(3.5)}}},
		"not proven in between":      {metrics.Throughput, []float64{0.5, 1.1, 1.1, 1.1, 2}, map[int][]float64{1: wide, 2: wide, 3: wide}, []Crossover{{From: Slower, To: Faster}}},
		"faster, not by the margin":  {metrics.Throughput, []float64{1, 1, 1, 1.03, 2}, map[int][]float64{3: {0.985, 1.015, 1, 0.99, 1.01}}, []Crossover{{From: Same, To: Faster}}},
		"never by the margin":        {metrics.Throughput, []float64{1, 1, 1, 1, 1.03}, map[int][]float64{4: {0.985, 1.015, 1, 0.99, 1.01}}, nil},
	} {
		exp := lines()
		exp.Spec.Workloads[0] = spec.Workload{Name: "stream", Stream: &spec.Traffic{}}
		if c.metric == metrics.LatencyP50 {
			exp.Spec.Workloads[0] = spec.Workload{Name: "stream", PingPong: &spec.Traffic{}}
		}
		var ts []record.Trial
		for i, pairs := range exp.Spec.Pairs {
			values := five(c.ratios[i])
			for b, x := range c.noise[i] {
				values[b] = c.ratios[i] * x
			}
			ts = slices.Concat(ts, trials("0", "stream", pairs, c.metric, 1, 1, 1, 1, 1), trials("1", "stream", pairs, c.metric, values...))
		}
		got := seriesOf(t, exp, ts)[1].Crossovers
		if len(got) != len(c.want) {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
			continue
		}
		for i, want := range c.want {
			g := got[i]
			if g.From != want.From || g.To != want.To || want.Value != 0 && math.Abs(g.Value/want.Value-1) > 0.003 || g.CI95[0] > g.Value || g.CI95[1] < g.Value || g.CI95[0] < 1 || g.CI95[1] > 16 {
				t.Errorf("%s: %+v, want %+v", name, g, want)
			}
		}
	}
}

var wide = []float64{0.5, 2, 1, 0.7, 1.4}

// TestCrossoverBlocks: a crossover is based on the blocks that have all of its points. Without noise its
// interval is a point. If runs are not paired, there is no crossover.
func TestCrossoverBlocks(t *testing.T) {
	exp := lines()
	measured := func(ratios []float64, values ...float64) []record.Trial {
		var ts []record.Trial
		for i, pairs := range exp.Spec.Pairs {
			own := make([]float64, len(values))
			for b := range values {
				own[b] = ratios[i] * values[b]
			}
			ts = slices.Concat(ts, trials("0", "stream", pairs, metrics.Throughput, 1, 1, 1, 1, 1), trials("1", "stream", pairs, metrics.Throughput, own...))
		}
		return ts
	}
	ratios := []float64{0.5, 0.8, 1.25, 2, 2}
	ts := measured(ratios, 1, 1, 1, 1, 1)
	at := math.Exp2(1.5)
	for _, c := range seriesOf(t, exp, ts)[1].Crossovers {
		if math.Abs(c.Value/at-1) > 1e-6 || c.CI95[0] < c.Value*(1-1e-6) || c.CI95[1] > c.Value*(1+1e-6) {
			t.Errorf("without noise: %+v, want %g", c, at)
		}
	}
	// In the second block the ratios are twice as high, but it lacks one of them at 2 pairs.
	ts = slices.DeleteFunc(measured(ratios, 1, 2, 1.001, 0.999, 1), func(t record.Trial) bool { return t.Pairs == 2 && t.Block == 2 && t.Variant == "1" })
	got := seriesOf(t, exp, ts)[1].Crossovers
	if len(got) != 1 || math.Abs(got[0].Value/at-1) > 0.01 {
		t.Errorf("with a block that lacks a point: %+v, want %g", got, at)
	}
	exp.Spec.Target.Imported = &spec.Imported{}
	if s := seriesOf(t, exp, measured(ratios, 1, 1, 1, 1, 1))[1]; s.Crossovers != nil || s.Points[0].Versus == nil {
		t.Errorf("of runs that nothing pairs: %+v", s)
	}
}
