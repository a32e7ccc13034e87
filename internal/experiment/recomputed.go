package experiment

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"

	"slipstream.dev/internal/record"
)

// rounding is the maximum relative difference of a metric: processors that fuse operations round differently.
const rounding = 1e-9

// CheckMetrics computes the metrics and the histogram of a recorded trial again, from what its pairs and hosts measured, and
// returns an error that names the first one that differs from the record. c has the workload as it was run.
func CheckMetrics(c Cell, t record.Trial) error {
	was, latency := t.Metrics, t.Latency
	t.PerPair, t.Warnings, t.Latency = slices.Clone(t.PerPair), nil, ""
	if len(t.PerPair) == 1 && t.PerPair[0].Client.Latency == "" {
		t.PerPair[0].Client.Latency = latency // which is on record once
	}
	if err := fillMetrics(c, &t); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(was)) {
		x, ok := t.Metrics[name]
		if !ok {
			return fmt.Errorf("%s is recorded as %v, but cannot be computed from what was measured", name, was[name])
		}
		if math.Abs(x-was[name]) > rounding*math.Abs(x) {
			return fmt.Errorf("%s is recorded as %v, but what was measured gives %v", name, was[name], x)
		}
	}
	if latency == t.Latency {
		return nil
	}
	if latency == "" || t.Latency == "" {
		return errors.New("its histogram is not that of its pairs")
	}
	a, err := record.DecodeHistogram(latency)
	if err != nil {
		return err
	}
	b, err := record.DecodeHistogram(t.Latency)
	if err != nil {
		return err
	}
	if !a.Equals(b) {
		return errors.New("its histogram is not that of its pairs")
	}
	return nil
}
