package report

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/stats"
)

func TestScaleShowsRatiosAndBlocks(t *testing.T) {
	none := interval{math.Inf(-1), math.Inf(1)}
	for name, c := range map[string]struct {
		all  []spread
		want scale
	}{
		"nothing":               {nil, scale{1, 1}},
		"an interval":           {[]spread{{1.2, interval{1.1, 1.3}, nil}}, scale{1, 1.3}},
		"a block beyond it":     {[]spread{{1.2, interval{1.1, 1.3}, []float64{1.6, 0.9}}}, scale{0.9, 1.6}},
		"one block":             {[]spread{{0.5, none, []float64{0.5}}}, scale{0.5, 1}},
		"an interval of guests": {[]spread{{1.25, interval{0.01, 100}, nil}}, scale{0.8, 1.5625}}, // as much room again, either way
	} {
		got := scaleOf(c.all)
		if math.Abs(got.lo-c.want.lo) > 1e-9 || math.Abs(got.hi-c.want.hi) > 1e-9 {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestTicks(t *testing.T) {
	for s, want := range map[scale]string{
		{0.9, 1.35}:    "0.9 1 1.1 1.2 1.3",
		{0.98, 1.003}:  "0.98 0.985 0.99 0.995 1",
		{0.1, 1}:       "0.1 0.2 0.5 1",
		{1, 1}:         "1",
		{0.96, 2.5}:    "1 1.5 2 2.5",
		{1, 1000}:      "1 5 20 100 500",
		{0.999, 1.001}: "0.999 0.9995 1 1.0005 1.001",
	} {
		var got []string
		last := math.Inf(-1)
		for _, tick := range s.ticks() {
			got = append(got, tick.Text)
			if tick.At-last < 10 || tick.At < 0 || tick.At > 100 {
				t.Errorf("%v: a tick at %g %%, after one at %g %%", s, tick.At, last)
			}
			last = tick.At
		}
		if text := strings.Join(got, " "); text != want {
			t.Errorf("%v: ticks %s, want %s", s, text, want)
		}
	}
}

func TestBar(t *testing.T) {
	s := scale{0.5, 2} // 1 is in the middle
	b := s.bar(spread{1, interval{0.5, 2}, []float64{0.5, 2}}, stats.Same, "")
	if b.Off != "" || b.Mean != "M500 7h0" || b.Interval != "M40 7H960" || b.Blocks != "M40 16h0M960 16h0" {
		t.Errorf("within the scale: %+v", b)
	}
	if b := s.bar(spread{1, interval{0.1, 9}, nil}, stats.Same, ""); b.Interval != "M0 7H1000" {
		t.Errorf("an interval beyond the scale: %+v", b)
	}
	if b := s.bar(spread{1, interval{math.Inf(-1), math.Inf(1)}, []float64{1}}, stats.Inconclusive, ""); b.Interval != "" || b.Mean == "" {
		t.Errorf("without an interval: %+v", b)
	}
	above, below := s.bar(spread{at: 3}, stats.Faster, ""), s.bar(spread{at: 0.1}, stats.Slower, "")
	if above.Mean+below.Mean != "" || above.Off == "" || below.Off == "" || above.Off == below.Off {
		t.Errorf("off the scale: %+v and %+v", above, below)
	}
}

func TestTip(t *testing.T) {
	r := &stats.Row{
		Variant: "rfs", Workload: "stream", Pairs: 4, Metric: record.Throughput, N: 2, Mean: 11e9, CI95: [2]float64{9e9, 13e9},
		Versus: &stats.Versus{Baseline: "vxlan", N: 2, Ratio: 1.1, CI95: [2]float64{0.9, 1.3}, Verdict: stats.Inconclusive},
		Blocks: []stats.Block{{Block: 1, Value: 10e9, Ratio: 1.05}, {Block: 3, Value: 12e9}},
	}
	want := "rfs, stream throughput, 4 pairs\n11.0 Gb/s (9.0–13.0), n 2\nratio to vxlan 1.10 (0.90–1.30): inconclusive\ntrials (ratio in the block): 10.0 (1.05), 12.0"
	if got := tip(r); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestForest: of each workload the best and the worst variant, proven ones first, and the
// host network at the best one's pairs; better is to the right, whichever way a metric runs.
func TestForest(t *testing.T) {
	row := func(variant, workload, metric string, pairs int, ratio float64, v stats.Verdict) stats.Row {
		return stats.Row{Variant: variant, Workload: workload, Pairs: pairs, Metric: metric, N: 10, Mean: 1,
			Versus: &stats.Versus{Baseline: "vxlan", N: 10, Ratio: ratio, CI95: [2]float64{ratio * 0.99, ratio * 1.01}, Verdict: v}}
	}
	stream := func(variant string, pairs int, ratio float64, v stats.Verdict) stats.Row {
		return row(variant, "stream", record.Throughput, pairs, ratio, v)
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
				row("native", "pingpong", record.LatencyP50, 1, 0.4, stats.Faster), row("native", "pingpong", record.LatencyP50, 4, 0.5, stats.Faster),
				row("rps", "pingpong", record.LatencyP50, 4, 0.8, stats.Faster), row("rfs", "pingpong", record.LatencyP50, 1, 1.3, stats.Slower),
			},
			"pingpong median latency: host network native 4, best rps 4, worst rfs 1",
		},
		"the host network alone": {[]stats.Row{stream("native", 1, 2, stats.Faster)}, "stream throughput: best native 1"},
		"nothing":                {[]stats.Row{{Variant: "vxlan", Workload: "stream", Pairs: 1, Metric: record.Throughput, N: 10, Mean: 1}}, ""},
	} {
		m := New(demo(t).exp, &stats.Summary{Baseline: "vxlan", Rows: c.rows}, nil, record.Environment{})
		var got []string
		if m.Forest != nil {
			for _, g := range m.Forest.Groups {
				var rows []string
				for _, r := range g.Rows {
					rows = append(rows, fmt.Sprintf("%s %s %d", r.Part, r.Variant, r.Pairs))
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

// TestBesideSharesScales: the same ratio stands at the same place on both sides.
func TestBesideSharesScales(t *testing.T) {
	before, after := demo(t), demo(t)
	for i := range after.trials {
		if tr := &after.trials[i]; tr.Variant == "rfs+" && tr.Workload == "stream" {
			tr.Metrics[record.Throughput] *= 3
		}
	}
	x, y := before.model(), after.model()
	one := func(m *Model) string { return m.Tables[0].Rows[2].Cells[0].Bar.One }
	own := one(x)
	b := beside(x, y, Changes{Comparison: &stats.Comparison{}})
	if one(x) != own || own == one(y) {
		t.Errorf("the reports of one result have 1 at %s and %s, and first had it at %s", one(x), one(y), own)
	}
	if one(b.Sides[0]) != one(b.Sides[1]) || !slices.Equal(b.Sides[0].Tables[0].Ticks, b.Sides[1].Tables[0].Ticks) || !slices.Equal(b.Sides[0].Forest.Ticks, b.Sides[1].Forest.Ticks) {
		t.Error("the two sides have scales of their own")
	}
}

// TestBesideAnchors: two results in one page have no anchor in common, and every link leads
// somewhere.
func TestBesideAnchors(t *testing.T) {
	f, s := eventful(t)
	m := New(f.exp, s, f.trials, f.env)
	f.env.Version = "0.2.0"
	page := render(t, func(w io.Writer, m *Model) error {
		return BesideHTML(w, m, New(f.exp, s, f.trials, f.env), Changes{Comparison: &stats.Comparison{Before: stats.Side{Name: "a"}, After: stats.Side{Name: "b"}}})
	}, m)
	anchorsFit(t, page)
	for _, caption := range []string{"stream throughput in a <", "stream throughput in b <"} {
		if !strings.Contains(page, caption) {
			t.Errorf("no table has the caption %q", caption)
		}
	}
	if !strings.Contains(page, `data-label="a">0.1.0</td><td class="text wide" data-label="b">0.2.0`) || strings.Contains(page, "node0 and node1: Kernel") {
		t.Error("the page does not tell what differs from what does not")
	}
}

// TestWarningsStandWhereTheyMatter: serious ones before the first table, those of every row
// at the head of the comparison, those of CPU time at its figures.
func TestWarningsStandWhereTheyMatter(t *testing.T) {
	f := demo(t)
	s := f.summary()
	warn(s, record.Warning{Code: record.WarnHeld, Message: "node0 is accelerated"}, func(r stats.Row) bool { return r.Variant == "rps" })
	warn(s, record.Warning{Code: record.WarnSteal, Message: "2 % was stolen"}, func(stats.Row) bool { return true })
	warn(s, record.Warning{Code: record.WarnNoEBPF, Message: "no eBPF"}, func(stats.Row) bool { return true })
	page := render(t, HTML, New(f.exp, s, f.trials, f.env))
	var at []int
	for _, text := range []string{"<h1>", "gains are understated", `id="comparison"`, "took CPU time", "<table class=\"stack bars comparison", `title="The baseline was accelerated too`, `id="cpu"`, "Softirq time is approximate", `id="warnings"`} {
		at = append(at, strings.Index(page, text))
	}
	if !slices.IsSorted(at) || at[0] < 0 {
		t.Errorf("they stand at %v, which is not their order", at)
	}
}
