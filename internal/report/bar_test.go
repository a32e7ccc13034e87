package report

import (
	"math"
	"strings"
	"testing"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/stats"
)

func TestScaleShowsRatiosAndBlocks(t *testing.T) {
	none := interval{math.Inf(-1), math.Inf(1)}
	for name, c := range map[string]struct {
		all  []spread
		want scale
	}{
		"nothing":               {nil, scale{1, 1}},
		"an interval":           {[]spread{{1.2, interval{1.1, 1.3}, nil, nil}}, scale{1, 1.3}},
		"a block beyond it":     {[]spread{{1.2, interval{1.1, 1.3}, []float64{1.6, 0.9}, nil}}, scale{0.9, 1.6}},
		"one block":             {[]spread{{0.5, none, []float64{0.5}, nil}}, scale{0.5, 1}},
		"an interval of guests": {[]spread{{1.25, interval{0.01, 100}, nil, nil}}, scale{0.8, 1.5625}}, // as much room again, either way
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
	b := s.bar(spread{1, interval{0.5, 2}, []float64{0.5, 2}, nil}, stats.Same, "")
	if b.Off != "" || b.Mean != "M500 7h0" || b.Interval != "M40 7H960" || b.Blocks != "M40 16h0M960 16h0" {
		t.Errorf("within the scale: %+v", b)
	}
	if b := s.bar(spread{1, interval{0.1, 9}, nil, nil}, stats.Same, ""); b.Interval != "M0 7H1000" {
		t.Errorf("an interval beyond the scale: %+v", b)
	}
	if b := s.bar(spread{1, interval{math.Inf(-1), math.Inf(1)}, []float64{1}, nil}, stats.Inconclusive, ""); b.Interval != "" || b.Mean == "" {
		t.Errorf("without an interval: %+v", b)
	}
	above, below := s.bar(spread{at: 3}, stats.Faster, ""), s.bar(spread{at: 0.1}, stats.Slower, "")
	if above.Mean+below.Mean != "" || above.Off == "" || below.Off == "" || above.Off == below.Off {
		t.Errorf("off the scale: %+v and %+v", above, below)
	}
}

func TestTip(t *testing.T) {
	r := &stats.Row{
		Variant: "rfs", Workload: "stream", Pairs: 4, Metric: metrics.Throughput, N: 2, Mean: 11e9, CI95: [2]float64{9e9, 13e9},
		Versus: &stats.Versus{Baseline: "vxlan", N: 2, Ratio: 1.1, CI95: [2]float64{0.9, 1.3}, Verdict: stats.Inconclusive},
		Blocks: []stats.Block{{Block: 1, Value: 10e9, Ratio: 1.05}, {Block: 3, Value: 12e9}},
	}
	want := "rfs, stream throughput, 4 pairs\n11.0 Gb/s (9.0–13.0), n 2\nratio to vxlan 1.10 (0.90–1.30): inconclusive\ntrials (ratio in the block): 10.0 (1.05), 12.0"
	if got := tip(r); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
