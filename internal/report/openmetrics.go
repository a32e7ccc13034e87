package report

import (
	"fmt"
	"io"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
)

// OpenMetrics writes the result for Prometheus. It has only gauges without timestamps, because node_exporter's textfile
// collector accepts neither OpenMetrics' own types nor timestamps.
func OpenMetrics(w io.Writer, m *Model) error {
	for _, f := range m.families() {
		out := &dto.MetricFamily{Name: &f.name, Help: &f.help, Type: dto.MetricType_GAUGE.Enum()}
		for _, g := range f.gauges {
			one := &dto.Metric{Gauge: &dto.Gauge{Value: &g.value}}
			for _, l := range g.labels {
				text := l.text()
				one.Label = append(one.Label, &dto.LabelPair{Name: &l.name, Value: &text})
			}
			out.Metric = append(out.Metric, one)
		}
		if _, err := expfmt.MetricFamilyToOpenMetrics(w, out); err != nil {
			return fmt.Errorf("report as openmetrics: %w", err)
		}
	}
	if _, err := expfmt.FinalizeOpenMetrics(w); err != nil {
		return fmt.Errorf("report as openmetrics: %w", err)
	}
	return nil
}
