package report

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/history"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/stats"
)

// trendOf has three runs with a new kernel at the last, and a variant that became slower there.
func trendOf() *history.Trend {
	t := &history.Trend{Experiment: "demo", Marks: []history.Mark{{Run: 2, Fact: "kernel", From: "6.1", To: "6.12"}}}
	for day := range 3 {
		at := time.Date(2026, 1, 2+day, 3, 4, 0, 0, time.UTC)
		t.Runs = append(t.Runs, history.Run{Name: "demo-" + at.Format("20060102T150405Z"), Started: at})
	}
	shift := stats.Shift{At: 2, From: 1, To: 2, Ratio: 0.9, CI95: [2]float64{0.88, 0.92}}
	values := []history.Value{{Run: 0, N: 5, Mean: 1e10, CI95: [2]float64{0.9e10, 1.1e10}}, {Run: 2, N: 1, Mean: 9e9}}
	for _, pairs := range []int{1, 4} {
		t.Series = append(t.Series,
			history.Series{Variant: "rps", Workload: "stream", Pairs: pairs, Metric: metrics.Throughput, Points: values, Shifts: []stats.Shift{shift}},
			history.Series{Variant: "rfs", Workload: "stream", Pairs: pairs, Metric: metrics.Throughput, Points: values})
	}
	t.Series = append(t.Series, history.Series{Variant: "rps", Workload: "pingpong", Pairs: 1, Metric: metrics.LatencyP50, Points: values[:1], Shifts: []stats.Shift{shift}})
	return t
}

func TestTrendEvents(t *testing.T) {
	at := Event{Date: "2026-01-04", Run: "demo-20260104T030400Z"}
	kernel, slower, faster := at, at, at
	kernel.Number, kernel.Of, kernel.What = 1, "environment", "kernel 6.1 → 6.12"
	slower.Of, slower.Verdict = "stream throughput", stats.Slower
	slower.What = "rps at 1 pair −10% (−12 to −8), between 2026-01-03 and 2026-01-04; rps at 4 pairs −10% (−12 to −8), between 2026-01-03 and 2026-01-04"
	faster.Of, faster.Verdict, faster.What = "pingpong median latency", stats.Faster, "rps at 1 pair −10% (−12 to −8), between 2026-01-03 and 2026-01-04"
	if diff := cmp.Diff([]Event{kernel, slower, faster}, TrendPage{Trend: trendOf()}.Events()); diff != "" {
		t.Error(diff)
	}
}

func TestTrendFigures(t *testing.T) {
	all := TrendPage{Trend: trendOf()}.Figures()
	if len(all) != 3 {
		t.Fatalf("%d figures, want one for each workload and number of pairs", len(all))
	}
	f := all[0]
	want := Data{[]string{"Run", "rps", "rfs"}, [][]string{
		{"demo-20260102T030400Z", "10.0 (9.0–11.0)", "10.0 (9.0–11.0)"}, {"demo-20260103T030400Z", "–", "–"}, {"demo-20260104T030400Z", "9.00", "9.00"},
	}}
	if diff := cmp.Diff(want, f.Data); diff != "" || f.Alt != "stream throughput, 1 pair of rps and rfs over 3 runs" {
		t.Errorf("%s\n%s", f.Alt, diff)
	}
	svg := f.Picture.SVG()
	for _, text := range []string{">1<", ">2026-01-04<", ">Gb/s<", ">rps<"} {
		if !strings.Contains(svg, text) {
			t.Errorf("the figure has no %s", text)
		}
	}
}

func TestTrendText(t *testing.T) {
	trend := trendOf()
	trend.Series = trend.Series[:1]
	trend.LeftOut = []string{"demo-x: \x1b[31mbroken"}
	var b strings.Builder
	if err := TrendText(&b, trend); err != nil {
		t.Fatal(err)
	}
	want := `demo: throughput of rps, stream, 1 pair, Gb/s
  2026-01-02 03:04  10.0 (9.0–11.0)  n 5
  2026-01-04 03:04  9.00             n 1  ▼ level −10% (−12 to −8), between 2026-01-03 and 2026-01-04; kernel 6.1 → 6.12
left out: demo-x: \u001b[31mbroken
`
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Error(diff)
	}
}

// TestPagesOfHistoryAreWhole: every element that is opened is closed, and text of a folder stays text.
func TestPagesOfHistoryAreWhole(t *testing.T) {
	const bad = `"><script>alert(1)</script>`
	trend := trendOf()
	trend.Experiment, trend.LeftOut, trend.Series[0].Variant, trend.Marks[0].To = bad, []string{bad}, bad, bad
	r := history.Result{Name: bad, Experiment: bad, State: history.Complete, Problem: bad, Facts: []history.Fact{{Name: "kernel", Text: bad}}, Verdicts: map[stats.Verdict]int{stats.Faster: 2}}
	for name, write := range map[string]func(*strings.Builder) error{
		"list": func(b *strings.Builder) error {
			return List{Folder: bad, Query: bad, Experiment: bad, Experiments: []string{bad}, Results: []history.Result{r}, Total: 1}.HTML(b)
		},
		"files": func(b *strings.Builder) error {
			return List{Links: Links{Files: true}, Experiments: []string{bad}, Results: []history.Result{r}, Total: 1}.HTML(b)
		},
		"trend":   func(b *strings.Builder) error { return TrendPage{Trend: trend, Experiments: []string{bad}}.HTML(b) },
		"live":    func(b *strings.Builder) error { return Live{Folder: bad}.HTML(b) },
		"message": func(b *strings.Builder) error { return Message{Index: "/", Title: bad, Text: bad, Login: true}.HTML(b) },
	} {
		var b strings.Builder
		if err := write(&b); err != nil {
			t.Fatal(err)
		}
		page := b.String()
		if strings.Contains(page, "<script>alert") || strings.Contains(page, "ZgotmplZ") {
			t.Errorf("%s: text became something else", name)
		}
		for _, tag := range []string{"table", "form", "div", "tr", "td", "th", "label", "select", "option", "section", "span", "main", "p", "a", "nav", "ul", "li"} {
			open := strings.Count(page, "<"+tag+">") + strings.Count(page, "<"+tag+" ")
			if closed := strings.Count(page, "</"+tag+">"); open != closed {
				t.Errorf("%s: %d <%s> and %d </%[3]s>", name, open, tag, closed)
			}
		}
	}
}
