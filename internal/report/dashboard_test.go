package report

import (
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"slipstream.dev/internal/testenv/promql"
)

// TestDashboard checks the dashboard of results against the series of several results.
func TestDashboard(t *testing.T) {
	metrics := make(map[string][]string)
	results := exported(t)
	results["small"] = small(t)
	for _, m := range results {
		parser := expfmt.NewTextParser(model.LegacyValidation)
		families, err := parser.TextToMetricFamilies(strings.NewReader(render(t, OpenMetrics, m)))
		if err != nil {
			t.Fatal(err)
		}
		for name, f := range families {
			for _, one := range f.Metric {
				for _, l := range one.Label {
					if !slices.Contains(metrics[name], l.GetName()) {
						metrics[name] = append(metrics[name], l.GetName())
					}
				}
			}
		}
	}
	promql.CheckDashboard(t, "../../charts/slipstream/files/dashboards/results.json", metrics)
}
