package report

import (
	"cmp"
	"fmt"
	"io"
	"strings"
)

// bencherMetric is a value with its 95% interval. A single block has no interval.
type bencherMetric struct {
	Value float64  `json:"value"`
	Lower *float64 `json:"lower_value,omitempty"`
	Upper *float64 `json:"upper_value,omitempty"`
}

// Bencher writes the means as Bencher Metric Format (https://bencher.dev/docs/reference/bencher-metric-format): a benchmark for each
// variant, workload and number of pairs, with a measure for each metric. A measure's name has the unit, because the measure
// "throughput" of a project at Bencher counts operations.
func Bencher(w io.Writer, m *Model) error {
	all := make(map[string]map[string]bencherMetric)
	for _, r := range m.summary.Rows {
		if r.N == 0 {
			continue
		}
		metric, daemonSet, _ := strings.Cut(r.Metric, ":")
		benchmark := label{value: fmt.Sprintf("%s: %s, %s, %s", m.summary.Experiment, r.Workload, pairs(r.Pairs), r.Variant)}
		if daemonSet != "" { // a name of a measure has at most 64 characters
			benchmark.value += ", " + daemonSet
		}
		name := benchmark.text()
		if all[name] == nil {
			all[name] = make(map[string]bencherMetric)
		}
		one := bencherMetric{Value: r.Mean}
		if r.N > 1 {
			one.Lower, one.Upper = &r.CI95[0], &r.CI95[1]
		}
		all[name][fmt.Sprintf("%s (%s)", metric, cmp.Or(r.Unit, "1"))] = one
	}
	return writeJSON(w, all, "report")
}
