package report

import (
	"testing"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/stats"
)

func TestTooltip(t *testing.T) {
	r := &stats.Row{
		Variant: "rfs", Workload: "stream", Pairs: 4, Metric: metrics.Throughput, N: 2, Mean: 11e9, CI95: [2]float64{9e9, 13e9},
		Versus: &stats.Versus{Baseline: "vxlan", N: 2, Ratio: 1.1, CI95: [2]float64{0.9, 1.3}, Verdict: stats.Inconclusive},
		Blocks: []stats.Block{{Block: 1, Value: 10e9, Ratio: 1.05}, {Block: 3, Value: 12e9}},
	}
	want := "rfs, stream throughput, 4 pairs\n11.0 Gb/s (9.0–13.0), n 2\nratio to vxlan 1.10 (0.90–1.30): inconclusive\ntrials (ratio in the block): 10.0 (1.05), 12.0"
	if got := tooltip(r); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
