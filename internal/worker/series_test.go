package worker

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/traffic"
)

// BenchmarkSeriesCost measures what the series within a window costs the traffic: it runs windows of a
// second over loopback, with and without the series, in random order. Give it blocks: -bench SeriesCost
// -benchtime 30x. The counters at the edges are read either way.
func BenchmarkSeriesCost(b *testing.B) {
	second := spec.Duration(time.Second)
	stream := spec.Workload{Name: "stream", Stream: &spec.Traffic{
		Protocol: "tcp", IP: 4, Size: 128 << 10, Connections: 1, Tool: spec.ToolNative, Warmup: second / 10, Duration: second,
	}}
	for _, w := range []spec.Workload{pingPong(time.Second), stream} {
		b.Run(w.Name, func(b *testing.B) { seriesCost(b, w) })
	}
}

func seriesCost(b *testing.B, w spec.Workload) {
	const with, without = "with", "without"
	exp := &spec.Experiment{Spec: spec.Spec{
		Baseline: without, Variants: []spec.Variant{{Name: without}, {Name: with}},
		Workloads: []spec.Workload{w}, Pairs: []int{1}, Margin: 0.02,
	}}
	exp.Spec.Runs.N = b.N
	s := new(server)
	serving, _ := connect(b)
	driving, _ := connect(b)
	if err := s.openSampler(true); err != nil {
		b.Fatal(err)
	}
	defer s.sampler.Close()
	var trials []record.Trial
	for block := range b.N {
		for _, i := range rand.Perm(2) {
			v := exp.Spec.Variants[i].Name
			sampled := make(chan error, 1)
			ends, errs := run(b, serving, driving, w, func() {
				from := traffic.Now() + int64(w.Traffic().Warmup)
				window := traffic.Window{From: from, To: from + int64(time.Second)}
				go func() {
					if v == with {
						_, _, err := s.watch(b.Context(), window, nil)
						sampled <- err
						return
					}
					_, first := s.edgeAt(b.Context(), window.From, nil)
					_, last := s.edgeAt(b.Context(), window.To, nil)
					sampled <- errors.Join(first, last)
				}()
			})
			if err := cmp.Or(errors.Join(errs[:]...), <-sampled); err != nil {
				b.Fatal(err)
			}
			measured := map[string]float64{metrics.Throughput: ends[0].BitsPerSecond}
			if w.PingPong != nil {
				h, err := record.DecodeHistogram(ends[1].Latency)
				if err != nil {
					b.Fatal(err)
				}
				measured = map[string]float64{metrics.LatencyP50: float64(h.ValueAtQuantile(50)) / 1e9}
			}
			trials = append(trials, record.Trial{
				Block: block + 1, Order: len(trials) + 1, Variant: v, Workload: w.Name, Pairs: 1, Attempt: 1,
				Window: 1, Status: record.StatusOK, Metrics: measured,
			})
		}
	}
	summary, err := stats.Analyze(exp, trials)
	if err != nil {
		b.Fatal(err)
	}
	for _, r := range summary.Rows {
		if v := r.Versus; v != nil && r.N > 1 {
			b.Logf("%s with the series: %.4f of that without (%.4f to %.4f), %s, %d blocks", r.Metric, v.Ratio, v.CI95[0], v.CI95[1], v.Verdict, r.N)
			b.ReportMetric(v.Ratio, "ratio")
		}
	}
}
