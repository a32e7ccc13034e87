package cli

import (
	"testing"

	"slipstream.dev/internal/record"
)

// TestShown: the line of a trial has the metric that its workload is run for, as far as the tool tells it.
func TestShown(t *testing.T) {
	for want, metrics := range map[string]map[string]float64{
		record.Throughput:  {record.Throughput: 1, record.Rate: 1},
		record.LatencyP50:  {record.Rate: 1, record.LatencyMean: 1, record.LatencyP50: 1, record.LatencyP99: 1},
		record.LatencyMean: {record.Rate: 1, record.LatencyMean: 1},
		record.Rate:        {record.Rate: 1, record.Errors: 1},
	} {
		if got := shown(metrics); got != want {
			t.Errorf("of %v it shows %s, want %s", metrics, got, want)
		}
	}
}
