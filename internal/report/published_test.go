package report

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

// publications are figures of two sources about the demo.
func publications() []spec.Published {
	stream := spec.Published{Source: "A paper <of 2020>", Workload: "stream", Metric: metrics.Throughput, Versus: "vxlan"}
	rps, rfs, native, never, vxlan, other := stream, stream, stream, stream, stream, stream
	rps.Figure, rps.Variant, rps.Pairs, rps.Ratio, rps.Interval, rps.Note = "Table 1", "rps", 4, 1.08, []float64{1.02, 1.15}, "the interval is by run"
	rfs.Figure, rfs.Variant, rfs.Pairs, rfs.Ratio = "Table 1", "rfs", 4, 1.4
	native.Figure, native.Variant, native.Pairs, native.Interval = "8 to 19% lost", "vxlan", 1, []float64{0.81, 0.92}
	native.Versus = "native"
	never.Figure, never.Variant, never.Pairs, never.Ratio = "Figure | 3", "rfs+", 16, 1.24
	vxlan.Figure, vxlan.Variant, vxlan.Pairs, vxlan.Value, vxlan.Versus = "Table 2", "vxlan", 4, "4118 Mb/s", ""
	vxlan.Interval = []float64{3968, 4268}
	other.Figure, other.Variant, other.Pairs, other.Ratio, other.Versus = "Table 3", "rps+", 4, 0.5, "native"
	trip := spec.Published{Source: "Another one", Figure: "Figure 4", Variant: "vxlan", Workload: "pingpong", Pairs: 1, Metric: metrics.LatencyP50, Value: "36.4 µs", OneWay: true, Note: "by qperf"}
	latency := spec.Published{Source: "Another one", Figure: "Figure 5", Variant: "native", Workload: "pingpong", Pairs: 1, Metric: metrics.LatencyP50, Ratio: 0.42, Versus: "vxlan"}
	tail := spec.Published{Source: "Another one", Figure: "Figure 6", Variant: "rps", Workload: "pingpong", Pairs: 4, Metric: metrics.LatencyP99, Ratio: 0.9, Versus: "vxlan"}
	return []spec.Published{rps, rfs, native, never, vxlan, other, trip, latency, tail}
}

func TestPublished(t *testing.T) {
	f, s := eventful(t)
	m := New(f.exp, s, f.trials, f.env)
	want := []PublishedSource{
		{"A paper <of 2020>", []PublishedRow{
			{"Table 1", "rps, stream throughput, 4 pairs", "vxlan", "1.08 (1.02–1.15)", "1.11 (1.09–1.12)", stats.Agrees, "", "the interval is by run"},
			{"Table 1", "rfs, stream throughput, 4 pairs", "vxlan", "1.40", "0.95 (0.94–0.96)", stats.Differs, "ours is 0.677 times theirs", ""},
			{"8 to 19% lost", "vxlan, stream throughput, 1 pair", "native", "0.81–0.92", "0.43 (0.41–0.44)", stats.Differs, "ours is 0.528 times theirs", ""},
			{"Figure | 3", "rfs+, stream throughput, 16 pairs", "vxlan", "1.24", "", stats.NotComparable, "rfs+ was not measured with stream at 16 pairs", ""},
			{"Table 2", "vxlan, stream throughput, 4 pairs", "", "4.12 Gb/s (3.97–4.27)", "13.8 Gb/s (13.7–13.8)", stats.Differs, "ours is 3.34 times theirs", ""},
			{"Table 3", "rps+, stream throughput, 4 pairs", "native", "0.50", "0.50 (0.50–0.51)", stats.Agrees, "", ""},
		}},
		{"Another one", []PublishedRow{
			{"Figure 4", "vxlan, pingpong median latency, 1 pair", "", "72.8 µs", "24.0 µs (23.8–24.2)", stats.Differs, "ours is 0.329 times theirs", "published for one way as 36.4 µs: theirs is twice that, a round trip; by qperf"},
			{"Figure 5", "native, pingpong median latency, 1 pair", "vxlan", "0.42", "0.42 (0.41–0.43)", stats.Agrees, "", ""},
			{"Figure 6", "rps, pingpong p99 latency, 4 pairs", "vxlan", "0.90", "0.97 (0.88–1.06)", stats.TooImprecise, "our interval includes both theirs and no effect", ""},
		}},
	}
	if diff := cmp.Diff(want, m.Published); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if want := "9 published figures beside ours: 3 agree, 4 differ, 1 of ours is too imprecise and 1 is not comparable."; m.PublishedCount != want {
		t.Errorf("%q, want %q", m.PublishedCount, want)
	}
}

// TestPublishedCount: the sentence counts the verdicts, and leaves out those that no figure has.
func TestPublishedCount(t *testing.T) {
	agrees, differs, imprecise, not := stats.Published{Verdict: stats.Agrees}, stats.Published{Verdict: stats.Differs}, stats.Published{Verdict: stats.TooImprecise}, stats.Published{Verdict: stats.NotComparable}
	for want, all := range map[string][]stats.Published{
		"": nil,
		"1 published figure beside ours: 1 agrees.":                                     {agrees},
		"3 published figures beside ours: 1 agrees, 1 differs and 1 is not comparable.": {not, differs, agrees},
		"3 published figures beside ours: 1 agrees and 2 of ours are too imprecise.":    {imprecise, agrees, imprecise},
		"4 published figures beside ours: 2 differ and 2 are not comparable.":           {not, differs, not, differs},
	} {
		if _, got := publishedFigures(all); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestPublishedAreDrawn: a ring marks each published ratio of a cell that is drawn, on the scale of
// its figure, and nothing else.
func TestPublishedAreDrawn(t *testing.T) {
	f, s := eventful(t)
	m := New(f.exp, s, f.trials, f.env)
	drawn := map[string]bool{}
	for _, table := range m.Tables {
		for _, row := range table.Rows {
			for i, l := range row.Cells {
				if l.Bar != nil && l.Bar.Rings != "" {
					drawn[row.Variant+" "+table.Title+" "+pairs(table.Pairs[i])] = true
				}
			}
		}
	}
	// The experiment compares rps+ with vxlan, but its published figure is relative to native.
	// The host network is off the scale of its table, and has an arrow.
	want := map[string]bool{"rps stream throughput 4 pairs": true, "rfs stream throughput 4 pairs": true, "rps pingpong p99 latency 4 pairs": true}
	if diff := cmp.Diff(want, drawn); diff != "" {
		t.Errorf("bars with a ring (-want +got):\n%s", diff)
	}
	var captions []string
	for _, figure := range m.Section(SectionScaling) {
		for _, row := range figure.Data.Rows {
			for i, text := range row {
				if strings.Contains(text, "published") {
					captions = append(captions, row[0]+" "+figure.Data.Columns[i]+": "+text[strings.Index(text, "published"):])
				}
			}
		}
		if !strings.Contains(figure.Caption, "A ring is a published figure.") {
			t.Errorf("%s does not say what a ring is", figure.Name)
		}
	}
	if diff := cmp.Diff([]string{"rps 4 pairs: published 1.08", "rfs 4 pairs: published 1.40", "native 1 pair: published 0.42"}, captions); diff != "" {
		t.Errorf("figures (-want +got):\n%s", diff)
	}
	if page := render(t, HTML, m); !strings.Contains(page, "published figures as rings") {
		t.Error("the figure on top does not say what a ring is")
	}
	far := publications()[1]
	far.Ratio = 30
	f.exp.Spec.Published = []spec.Published{far}
	if svg := f.model().Section(SectionScaling)[0].Picture.SVG(); !strings.Contains(svg, ">30<") {
		t.Error("the axis ends below a published ratio of 30")
	}
	f.exp.Spec.Published = nil
	if page := render(t, HTML, f.model()); strings.Contains(page, "A ring is") || strings.Contains(page, "as rings") || strings.Contains(page, `class="theirs"`) || strings.Contains(page, `id="published"`) {
		t.Error("a report without published figures speaks of them")
	}
}

// TestPublishedGains: a published ratio becomes a gain as ours does.
func TestPublishedGains(t *testing.T) {
	r := &stats.Row{Metric: metrics.LatencyP50, Versus: &stats.Versus{N: 2, Ratio: 0.5, CI95: [2]float64{0.4, 0.6}}}
	if gain := gainOf(r, []float64{0.25}); len(gain.Rings) != 1 || gain.Rings[0] != 4 {
		t.Errorf("a quarter of the latency is %v times better, want 4", gain.Rings)
	}
}
