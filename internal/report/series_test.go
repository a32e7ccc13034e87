package report

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/testenv/golden"
)

// services is a result of services with 1 to 16,000 backends, in two modes.
func services(t *testing.T) *Model {
	t.Helper()
	exp := &spec.Experiment{
		APIVersion: v1alpha1.APIVersion, Kind: spec.KindExperiment,
		Metadata: spec.Metadata{Name: "services", Description: "Services of 1 to 16,000 backends."},
		Spec: spec.Spec{
			Target: spec.Target{Lab: &spec.Lab{Nodes: 2}}, Baseline: "iptables/1", Pairs: []int{1}, Margin: 0.02, Runs: spec.Runs{N: 6},
			Workloads: []spec.Workload{{Name: "ab", HTTP: &spec.Traffic{Protocol: "tcp", Connections: 8, Requests: 50000, Tool: spec.ToolAB, Duration: spec.Duration(60 * time.Second)}}},
			Series: []spec.Series{
				{Name: "iptables", Axis: spec.AxisBackends}, {Name: "ebpf", Axis: spec.AxisBackends, Versus: "iptables"},
			},
			Published: []spec.Published{{Source: "a paper", Figure: "in the text", Variant: "ebpf/16000", Workload: "ab", Pairs: 1, Metric: metrics.Completion, Ratio: 0.7, Versus: "iptables/16000"}},
		},
	}
	seconds := map[string][]float64{"iptables": {5.6, 5.8, 8.5, 18, 43}, "ebpf": {5.9, 5.9, 6, 6.1, 6.2}}
	metrics := func(x float64) map[string]float64 {
		return map[string]float64{metrics.Completion: x, metrics.LatencyP50: 1.5e-4 * x}
	}
	var trials []record.Trial
	for i, backends := range []int{1, 100, 1000, 5000, 16000} {
		for s, mode := range []string{"iptables", "ebpf"} {
			name := fmt.Sprintf("%s/%d", mode, backends)
			exp.Spec.Series[s].Of = append(exp.Spec.Series[s].Of, name)
			exp.Spec.Variants = append(exp.Spec.Variants, spec.Variant{Name: name, Path: &spec.Path{Service: &spec.Service{Mode: mode, Backends: backends, Services: 1}}})
			for block := range 6 {
				trials = append(trials, record.Trial{
					Block: block + 1, Order: len(trials) + 1, Variant: name, Workload: "ab", Pairs: 1, Attempt: 1, Window: 60, Status: record.StatusOK,
					Metrics: metrics(seconds[mode][i] * (1 + 0.01*float64((block*(s+2)+i)%5-2))),
				})
			}
		}
	}
	summary, err := stats.Analyze(exp, trials)
	if err != nil {
		t.Fatal(err)
	}
	return New(exp, summary, trials, record.Environment{Version: "0.1.0", Command: "slipstream run services"})
}

// TestGoldenSeries: the report has a figure of two lines and one of their ratio, and says where they
// cross.
func TestGoldenSeries(t *testing.T) {
	m := services(t)
	for ending, write := range writers() {
		if ending == "html" || ending == "csv" {
			continue // as in the other golden files
		}
		t.Run(ending, func(t *testing.T) {
			golden.Compare(t, "testdata/series."+ending, render(t, write, m))
		})
	}
}

// TestSeriesFigures: a figure of values and one of ratios replace the figure at a single number of pairs,
// and show published figures.
func TestSeriesFigures(t *testing.T) {
	m := services(t)
	var names []string
	for _, f := range m.Figures {
		names = append(names, f.Name)
	}
	if diff := cmp.Diff([]string{"ab-completion-over-backends-1", "ab-completion-over-backends-1-versus-iptables"}, names); diff != "" {
		t.Fatalf("(-want +got):\n%s", diff)
	}
	if svg := m.Figures[0].Picture.SVG(); !strings.Contains(svg, ">0<") || !strings.Contains(svg, ">50<") {
		t.Error("5.6 to 43 s do not stand on an axis from 0 to 50")
	}
	ratios := m.Figures[1].Data
	if got, want := fmt.Sprint(ratios.Columns), "[Series 1 backend 100 backends 1000 backends 5000 backends 16000 backends]"; got != want {
		t.Errorf("columns %s, want %s", got, want)
	}
	if row := ratios.Rows[0]; row[0] != "ebpf" || !strings.HasSuffix(row[1], "slower") || !strings.HasSuffix(row[5], "faster, published 0.70") {
		t.Errorf("ratios %q", row)
	}
	page := render(t, HTML, m)
	for _, want := range []string{`href="#series"`, `id="series"`, "ab time of all requests, 1\u00a0pair"} {
		if !strings.Contains(strings.ReplaceAll(page, "1 pair", "1\u00a0pair"), want) {
			t.Errorf("the page has no %s", want)
		}
	}
}

// TestScalingWithoutSeries: the ratios of a series over pairs are drawn only once. If a series has no
// figure, because nothing differs along it, its variants stay in the usual figure.
func TestScalingWithoutSeries(t *testing.T) {
	f := demo(t)
	f.exp.Spec.Series = []spec.Series{
		{Name: "overlay", Axis: spec.AxisPairs, Of: []string{"vxlan"}},
		{Name: "rfs", Axis: spec.AxisPairs, Of: []string{"rfs"}, Versus: "overlay"},
		{Name: "rps", Axis: spec.AxisPairs, Of: []string{"rps"}},
		{Name: "rate", Axis: spec.AxisRate, Of: []string{"rps+"}},
	}
	f.exp.Spec.Target.Lab.NIC.Rate = "1Gbit"
	drawn := map[string][]string{}
	for _, figure := range f.model().Figures {
		for _, row := range figure.Data.Rows {
			drawn[figure.Name] = append(drawn[figure.Name], row[0])
		}
	}
	for name, want := range map[string][]string{
		"stream-throughput-versus-vxlan":                 {"native", "rps", "rps+", "rfs+"},
		"stream-throughput-over-pairs-versus-overlay":    {"rfs"},
		"pingpong-latency_p50-versus-vxlan":              {"native", "rps", "rps+", "rfs+"},
		"pingpong-latency_p50-over-pairs-versus-overlay": {"rfs"},
		"pingpong-latency_p50-over-pairs":                {"overlay", "rfs", "rps"},
		"stream-throughput-over-rate-1":                  nil,
	} {
		if diff := cmp.Diff(want, drawn[name]); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestCrossoverSentences checks the sentences about two series, for different verdicts and crossovers.
func TestCrossoverSentences(t *testing.T) {
	const faster, slower, same, open = stats.Faster, stats.Slower, stats.Same, stats.Inconclusive
	at := func(from, to stats.Verdict, value float64) stats.Crossover {
		return stats.Crossover{From: from, To: to, Value: value, CI95: [2]float64{value / 2, value * 2}}
	}
	for want, c := range map[string]struct {
		axis       string
		verdicts   []stats.Verdict
		crossovers []stats.Crossover
	}{
		"a is faster than b everywhere measured, at 1, 2, 4 and 8 pairs":                                      {spec.AxisPairs, []stats.Verdict{faster, faster, faster, faster}, nil},
		"a is the same as b everywhere measured, at 1 and 2 backends":                                         {spec.AxisBackends, []stats.Verdict{same, same}, nil},
		"no difference of a from b is proven at 1, 2 and 4 connections":                                       {spec.AxisConnections, []stats.Verdict{open, open, open}, nil},
		"a is faster than b at 2 and 8 pairs; no difference is proven at 1 and 4 pairs":                       {spec.AxisPairs, []stats.Verdict{open, faster, open, faster}, nil},
		"a is faster than b from 3.0 (1.5–6.0) backends on, and slower below":                                 {spec.AxisBackends, []stats.Verdict{slower, open, faster, faster}, []stats.Crossover{at(slower, faster, 3)}},
		"a is slower than b from 23 (12–47) bytes on, and the same below":                                     {spec.AxisSize, []stats.Verdict{same, slower}, []stats.Crossover{at(same, slower, 23.4)}},
		"a is the same as b from 3.0 (1.5–6.0) pairs on, and slower below; no difference is proven at 1 pair": {spec.AxisPairs, []stats.Verdict{open, slower, same}, []stats.Crossover{at(slower, same, 3)}},
		"a is faster than b from 6.0 (3.0–12.0) pairs on, the same from 3.0 (1.5–6.0) pairs on, and slower below": {
			spec.AxisPairs, []stats.Verdict{slower, same, same, faster}, []stats.Crossover{at(slower, same, 3), at(same, faster, 6)}},
		"a is the same as b at 1 and 2 pairs, faster at 8 pairs; no difference is proven at 4 pairs": {spec.AxisPairs, []stats.Verdict{same, same, open, faster}, nil},
		"a is slower than b at 1 pair, the same at 2 pairs, faster at 4 pairs":                       {spec.AxisPairs, []stats.Verdict{slower, same, faster}, []stats.Crossover{at(slower, same, 1.5)}},
	} {
		s := stats.Series{Name: "a", Axis: c.axis, Versus: "b", Crossovers: c.crossovers}
		for i, v := range c.verdicts {
			s.Points = append(s.Points, stats.Point{Value: float64(int(1) << i), Versus: &stats.Versus{Verdict: v}})
		}
		m := &Model{exp: &spec.Experiment{}}
		if got := m.crossover(s, s.Points); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestAxis checks the values of each axis, below a figure and in a sentence.
func TestAxis(t *testing.T) {
	m := &Model{exp: &spec.Experiment{Spec: spec.Spec{
		Target:   spec.Target{Lab: &spec.Lab{Nodes: 2}},
		Variants: []spec.Variant{{Name: "small", NIC: &spec.NIC{Price: "0.04 USD"}}},
	}}}
	for _, c := range []struct {
		axis     string
		x        float64
		mark, at string
	}{
		{spec.AxisPairs, 1, "1 pair", "1 pair"}, {spec.AxisPairs, 16, "16 pairs", "16 pairs"},
		{spec.AxisBackends, 16000, "16000", "16000 backends"}, {spec.AxisSize, 1, "1", "1 byte"},
		{spec.AxisPolicies, 1, "1", "1 policy"}, {spec.AxisPolicies, 2000, "2000", "2000 policies"},
		{spec.AxisRate, 4.7e6, "4.7", "4.7 Mb/s"}, {spec.AxisRate, 1e9, "1000", "1000 Mb/s"},
		{spec.AxisPrice, 0.085, "0.085", "0.085 USD/h"}, {spec.AxisPrice, 1, "1", "1 USD/h"},
	} {
		a := m.axis(c.axis)
		if a.tick(c.x) != c.mark || a.at(c.x) != c.at {
			t.Errorf("%s %g: %q, %q, want %q, %q", c.axis, c.x, a.tick(c.x), a.at(c.x), c.mark, c.at)
		}
	}
	if got, want := m.axis(spec.AxisRate).between(47.3e6, number.Interval{Low: 31e6, High: 60e6}), "47 (31–60) Mb/s"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
