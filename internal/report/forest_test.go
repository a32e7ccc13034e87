package report

import (
	"fmt"
	"strings"
	"testing"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/stats"
)

// TestForest: the picture has, for each workload, the best and the worst variant, proven
// ones first, and the host network at the same number of pairs as the best one. Better is to
// the right, whichever way a metric runs.
func TestForest(t *testing.T) {
	row := func(variant, workload, metric string, pairs int, ratio float64, v stats.Verdict) stats.Row {
		return stats.Row{Variant: variant, Workload: workload, Pairs: pairs, Metric: metric, Primary: metric != metrics.LatencyP99, N: 10, Mean: 1,
			Versus: &stats.Versus{Baseline: "vxlan", N: 10, Ratio: ratio, CI95: [2]float64{ratio * 0.99, ratio * 1.01}, Verdict: v}}
	}
	stream := func(variant string, pairs int, ratio float64, v stats.Verdict) stats.Row {
		return row(variant, "stream", metrics.Throughput, pairs, ratio, v)
	}
	for name, c := range map[string]struct {
		rows []stats.Row
		want string
	}{
		"proven before seeming": {
			[]stats.Row{stream("rps", 1, 1.9, stats.Inconclusive), stream("rps+", 1, 1.2, stats.Faster), stream("rfs", 4, 0.9, stats.Slower), stream("rfs+", 4, 0.5, stats.Inconclusive)},
			"stream throughput: best rps+ 1, worst rfs 4",
		},
		"nothing proven": {
			[]stats.Row{stream("rps", 1, 1.1, stats.Inconclusive), stream("rfs", 1, 0.9, stats.Inconclusive)},
			"stream throughput: best rps 1, worst rfs 1",
		},
		"one variant alone has its best and worst pairs": {
			[]stats.Row{stream("rps", 1, 1.1, stats.Faster), stream("rps", 4, 1.5, stats.Faster)},
			"stream throughput: best rps 4, worst rps 1",
		},
		"another variant is the worst, though all gain": {
			[]stats.Row{stream("rps", 1, 1.1, stats.Faster), stream("rps", 4, 1.5, stats.Faster), stream("rfs", 1, 1.2, stats.Faster)},
			"stream throughput: best rps 4, worst rfs 1",
		},
		"less latency is better, and the host network stands first": {
			[]stats.Row{
				row("native", "pingpong", metrics.LatencyP50, 1, 0.4, stats.Faster), row("native", "pingpong", metrics.LatencyP50, 4, 0.5, stats.Faster),
				row("rps", "pingpong", metrics.LatencyP50, 4, 0.8, stats.Faster), row("rfs", "pingpong", metrics.LatencyP50, 1, 1.3, stats.Slower),
			},
			"pingpong median latency: host network native 4, best rps 4, worst rfs 1",
		},
		"the host network alone": {[]stats.Row{stream("native", 1, 2, stats.Faster)}, "stream throughput: best native 1"},
		"nothing":                {[]stats.Row{{Variant: "vxlan", Workload: "stream", Pairs: 1, Metric: metrics.Throughput, N: 10, Mean: 1}}, ""},
	} {
		m := New(demo(t).exp, &stats.Summary{Baseline: "vxlan", Rows: c.rows}, nil, record.Environment{})
		var got []string
		if m.Forest != nil {
			for _, g := range m.Forest.Groups {
				var rows []string
				for _, r := range g.Rows {
					rows = append(rows, fmt.Sprintf("%s %s %d", r.Role, r.Variant, r.Pairs))
					var one, at float64
					if _, err := fmt.Sscanf(r.Bar.One+" "+r.Bar.Mean, "M%g -8V28 M%g 7h0", &one, &at); err != nil {
						t.Errorf("%s: bar %+v: %v", name, r.Bar, err)
					}
					if (at > one) != (r.row.Gain() > 1) {
						t.Errorf("%s: %s is drawn at %g, 1 at %g", name, r.Variant, at, one)
					}
				}
				got = append(got, g.Title+": "+strings.Join(rows, ", "))
			}
		}
		if text := strings.Join(got, "; "); text != c.want {
			t.Errorf("%s: %s, want %s", name, text, c.want)
		}
	}
}
