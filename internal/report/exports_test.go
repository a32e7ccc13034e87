package report

import (
	"encoding/json"
	"io"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/textparse"
	otlp "go.opentelemetry.io/proto/otlp/metrics/v1"
	"google.golang.org/protobuf/encoding/protojson"

	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/testenv/golden"
)

// small has two variants and a workload, with an expectation and a warning.
func small(t *testing.T) *Model {
	f := demoExperiment()
	f.exp.Spec.Variants, f.exp.Spec.Workloads, f.exp.Spec.Pairs = f.exp.Spec.Variants[1:3], f.exp.Spec.Workloads[:1], []int{1}
	f.exp.Spec.Expect = []spec.Expectation{{Variant: "rps", Faster: "vxlan"}}
	return f.run(t).model()
}

func TestExportsGolden(t *testing.T) {
	m := small(t)
	for name, write := range map[string]writer{"openmetrics": OpenMetrics, "bencher.json": Bencher} {
		t.Run(name, func(t *testing.T) { golden.Compare(t, "testdata/small."+name, render(t, write, m)) })
	}
}

// exported returns results, by name, that every format must be able to write.
func exported(t *testing.T) map[string]*Model {
	one := demo(t)
	one.trials, one.blocks = slices.DeleteFunc(one.trials, func(t record.Trial) bool { return t.Block > 1 }), 1
	mesh := meshResult(t)
	mesh.Environment.Started = one.env.Started
	return map[string]*Model{"demo": demo(t).model(), "one block": one.model(), "mesh": mesh, "hostile": hostileModel(t)}
}

// TestOpenMetrics reads the format with Prometheus' parser, and with the one of the textfile collector.
func TestOpenMetrics(t *testing.T) {
	for name, m := range exported(t) {
		t.Run(name, func(t *testing.T) {
			text := render(t, OpenMetrics, m)
			got := parseSeries(t, text)
			parser := expfmt.NewTextParser(model.LegacyValidation)
			families, err := parser.TextToMetricFamilies(strings.NewReader(text))
			if err != nil {
				t.Fatal(err)
			}
			count := 0
			for _, f := range families {
				count += len(f.Metric)
			}
			if count != len(got) {
				t.Errorf("the textfile collector reads %d series, Prometheus %d", count, len(got))
			}
			for want, value := range wanted(m) {
				if x, ok := got[want]; !ok || x != value {
					t.Errorf("%s is %v, %v, want %v", want, x, ok, value)
				}
			}
		})
	}
}

// parseSeries reads OpenMetrics with Prometheus' parser.
func parseSeries(t *testing.T, text string) map[string]float64 {
	t.Helper()
	all := make(map[string]float64)
	p := textparse.NewOpenMetricsParser([]byte(text), labels.NewSymbolTable())
	for {
		entry, err := p.Next()
		if err == io.EOF {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		if entry != textparse.EntrySeries {
			continue
		}
		var l labels.Labels
		p.Labels(&l)
		_, at, value := p.Series()
		if _, twice := all[l.String()]; twice || at != nil {
			t.Errorf("%s is there twice, or has a timestamp, which the textfile collector refuses", l)
		}
		all[l.String()] = value
	}
}

// wanted returns series that an export of the summary must contain.
func wanted(m *Model) map[string]float64 {
	all := make(map[string]float64)
	for _, r := range m.summary.Rows {
		name := func(metric string, more ...string) string {
			return labels.FromStrings(append(more, "__name__", "slipstream_result_"+metric, "experiment", m.summary.Experiment, "variant", r.Variant,
				"workload", r.Workload, "pairs", strconv.Itoa(r.Pairs), "metric", r.Metric)...).String()
		}
		all[name("mean", "unit", r.Unit)], all[name("blocks", "unit", r.Unit)] = r.Mean, float64(r.N)
		if r.N > 1 {
			all[name("mean_lower", "unit", r.Unit)], all[name("mean_upper", "unit", r.Unit)] = r.CI95[0], r.CI95[1]
		}
		if v := r.Versus; v != nil {
			all[name("ratio", "baseline", v.Baseline)] = v.Ratio
			all[name("verdict", "baseline", v.Baseline, "verdict", string(v.Verdict))] = 1
			if v.N > 1 {
				all[name("ratio_lower", "baseline", v.Baseline)], all[name("ratio_upper", "baseline", v.Baseline)] = v.CI95[0], v.CI95[1]
			}
		}
	}
	for _, mesh := range m.summary.Meshes {
		for _, l := range mesh.Links {
			if l.N > 0 {
				all[labels.FromStrings("__name__", "slipstream_result_link_mean", "experiment", m.summary.Experiment, "variant", mesh.Variant, "workload", mesh.Workload,
					"metric", mesh.Metric, "unit", mesh.Unit, "client", l.Client, "server", l.Server).String()] = l.Mean
			}
		}
	}
	return all
}

// TestNoIntervalOfOneBlock: where both ends would be the mean, there is no interval.
func TestNoIntervalOfOneBlock(t *testing.T) {
	m := exported(t)["one block"]
	for name, write := range map[string]writer{"openmetrics": OpenMetrics, "otlp": OTLP, "bencher": Bencher} {
		if text := render(t, write, m); strings.Contains(text, "_lower") {
			t.Errorf("%s has an interval of one block", name)
		}
	}
}

// TestOTLP decodes the output into the message of opentelemetry-proto, which fails if there are other fields, and checks that it has
// the same series as OpenMetrics.
func TestOTLP(t *testing.T) {
	for name, m := range exported(t) {
		t.Run(name, func(t *testing.T) {
			var request otlp.MetricsData // the same fields as those of the request
			if err := protojson.Unmarshal([]byte(render(t, OTLP, m)), &request); err != nil {
				t.Fatal(err)
			}
			got := make(map[string]float64)
			for _, metric := range request.ResourceMetrics[0].ScopeMetrics[0].Metrics {
				for _, p := range metric.GetGauge().DataPoints {
					b := labels.NewBuilder(labels.FromStrings("__name__", metric.Name))
					for _, a := range p.Attributes {
						b.Set(a.Key, a.Value.GetStringValue())
					}
					got[b.Labels().String()] = p.GetAsDouble()
					if at := uint64(m.Environment.Started.UnixNano()); p.TimeUnixNano != at {
						t.Errorf("a point has the time %d, want %d", p.TimeUnixNano, at)
					}
				}
			}
			if diff := cmp.Diff(parseSeries(t, render(t, OpenMetrics, m)), got); diff != "" {
				t.Errorf("it has other series than openmetrics (-openmetrics +otlp):\n%s", diff)
			}
		})
	}
}

// TestOTLPWithoutTime: points without a time would be dated 1970.
func TestOTLPWithoutTime(t *testing.T) {
	m := small(t)
	m.Environment.Started = time.Time{}
	if err := OTLP(io.Discard, m); err == nil || !strings.Contains(err.Error(), "when it was measured") {
		t.Errorf("error %v does not say what is missing", err)
	}
}

// TestBencher compares the format with the summary.
func TestBencher(t *testing.T) {
	for name, m := range exported(t) {
		t.Run(name, func(t *testing.T) {
			var got map[string]map[string]map[string]float64
			if err := json.Unmarshal([]byte(render(t, Bencher, m)), &got); err != nil {
				t.Fatal(err)
			}
			count := 0
			for _, measures := range got {
				count += len(measures)
			}
			rows := m.summary.Rows
			if i := slices.IndexFunc(rows, func(r stats.Row) bool { return r.N == 0 }); i < 0 && count != len(rows) {
				t.Errorf("it has %d measures for %d rows", count, len(rows))
			}
			r := rows[len(rows)-1]
			want := map[string]float64{"value": r.Mean, "lower_value": r.CI95[0], "upper_value": r.CI95[1]}
			if r.N == 1 {
				want = map[string]float64{"value": r.Mean}
			}
			benchmark := plain.Line(m.summary.Experiment + ": " + r.Workload + ", " + pairs(r.Pairs) + ", " + r.Variant)
			if diff := cmp.Diff(want, got[benchmark][r.Metric+" ("+r.Unit+")"]); diff != "" {
				t.Errorf("%s (-want +got):\n%s", benchmark, diff)
			}
		})
	}
}

// TestExportsArePlain: no text of a folder has control characters that reach a terminal.
func TestExportsArePlain(t *testing.T) {
	m := hostileModel(t)
	m.summary.Experiment = hostile
	for name, write := range map[string]writer{"openmetrics": OpenMetrics, "otlp": OTLP, "bencher": Bencher} {
		if text := render(t, write, m); plain.Text(text) != text || !strings.Contains(text, "title") {
			t.Errorf("%s has characters that are not text, or lacks the name", name)
		}
	}
}
