package cli

import (
	"testing"

	"slipstream.dev/internal/metrics"
)

// TestShown: the line of a trial shows the main metric of its workload, if the tool reports it.
func TestShown(t *testing.T) {
	for want, metrics := range map[string]map[string]float64{
		metrics.Throughput:  {metrics.Throughput: 1, metrics.Rate: 1},
		metrics.LatencyP50:  {metrics.Rate: 1, metrics.LatencyMean: 1, metrics.LatencyP50: 1, metrics.LatencyP99: 1},
		metrics.LatencyMean: {metrics.Rate: 1, metrics.LatencyMean: 1},
		metrics.Rate:        {metrics.Rate: 1, metrics.Errors: 1},
	} {
		if got := shownMetric(metrics); got != want {
			t.Errorf("of %v it shows %s, want %s", metrics, got, want)
		}
	}
}
