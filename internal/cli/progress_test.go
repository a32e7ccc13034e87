package cli

import (
	"bytes"
	"testing"

	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report"
)

// TestShown: the line of a trial shows the main metric of its workload, if the tool reports it.
func TestShown(t *testing.T) {
	for want, metrics := range map[string]map[string]float64{
		metrics.Throughput:  {metrics.Throughput: 1, metrics.Rate: 1},
		metrics.LatencyP50:  {metrics.Rate: 1, metrics.LatencyMean: 1, metrics.LatencyP50: 1, metrics.LatencyP99: 1},
		metrics.LatencyMean: {metrics.Rate: 1, metrics.LatencyMean: 1},
		metrics.Rate:        {metrics.Rate: 1, metrics.Errors: 1},
	} {
		if got := report.ShownMetric(metrics); got != want {
			t.Errorf("of %v it shows %s, want %s", metrics, got, want)
		}
	}
}

// TestProgressFitsTerminal: a line that is wider than the terminal is cut, as the terminal would wrap it and not erase
// its first part.
func TestProgressFitsTerminal(t *testing.T) {
	var out bytes.Buffer
	width := 12
	p := &progress{w: &out, terminal: true, columns: func() int { return width }}
	p.status("1/144  block 1  vxlan")
	width = 80
	p.status("2/144  block 1  vxlan")
	if got, want := out.String(), "\r\x1b[K1/144  bloc…\r\x1b[K2/144  block 1  vxlan"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	out.Reset()
	width = 30
	failed := record.Trial{Variant: "rps", Workload: "stream", Pairs: 4, Block: 4, Status: record.StatusFailed, Error: "nothing arrived for 563ms of the window"}
	p.show(experiment.Event{Kind: experiment.Ends, Done: 8, Total: 9, Trial: failed})
	if got, want := out.String(), "\r\x1b[K8/9 block 4 rps stream at 4\n  pairs failed: nothing\n  arrived for 563ms of the\n  window\n\r\x1b[K2/144  block 1  vxlan"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
