package spec

import (
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const publishedExperiment = `
apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: test}
spec:
  baseline: vxlan
  variants: [{name: vxlan}, {name: rps, accelerate: [{rps: {devices: [nic], cpus: all}}]}]
  workloads:
  - {name: stream, stream: {duration: 1s}}
  - {name: pingpong, pingpong: {duration: 1s}}
  published:
  - `

// TestPublished: every error names the field and what stands there.
func TestPublished(t *testing.T) {
	const cell = "source: a paper, figure: Table 1, variant: rps, workload: stream, pairs: 16, metric: throughput"
	cores := strings.Replace(cell, "throughput", "softirq", 1)
	latency := strings.NewReplacer("stream", "pingpong", "throughput", "latency_mean").Replace(cell)
	for text, want := range map[string]string{
		"{" + cell + ", value: 4118 Mb/s, interval: [4000, 4200], note: by run}": "",
		"{" + cell + ", value: 12.5 MB/s}":                                       "",
		"{" + latency + ", value: 72.9 µs, interval: [70, 80], oneWay: true}":    "",
		"{" + cell + ", ratio: 1.08, versus: vxlan}":                             "",
		"{" + cell + ", ratio: 1.08, versus: vxlan, interval: [1.08, 1.08]}":     "",
		"{" + cell + ", versus: vxlan, interval: [0.81, 0.92]}":                  "",

		"{" + cores + ", cores: [0, 10.4, 100]}":                             "",
		"{" + strings.Replace(cores, "softirq", "idle", 1) + ", cores: [5]}": "",

		"{" + cell + ", cores: [10]}":                                        `spec.published[0].metric: must be softirq or idle with cores, is "throughput"`,
		"{" + cores + ", cores: [10, 101]}":                                  "spec.published[0].cores[1]: must be 0 to 100%, is 101",
		"{" + cores + ", cores: [nan]}":                                      "spec.published[0].cores[0]: must be 0 to 100%, is NaN",
		"{" + cores + ", cores: []}":                                         "spec.published[0].cores: must be 1 to 8192 shares, are 0",
		"{" + cores + ", cores: [10], interval: [1, 2]}":                     "spec.published[0].interval: cannot be combined with cores",
		"{" + cores + ", value: 10 Mb/s}":                                    `spec.published[0].metric: there is no metric "softirq"`,
		"{" + strings.Replace(cores, "stream", "steam", 1) + ", cores: [5]}": `spec.published[0].workload: no workload has the name "steam"; did you mean stream?`,

		"{" + cell + "}": "spec.published[0]: must have a value, a ratio, cores or, for a range of ratios, an interval, has none",
		"{" + cell + ", versus: vxlan, interval: [0, 0.5]}": "",

		"{" + cell + ", versus: vxlan, ratio: 0.4, interval: [0, 0.5]}":                        "spec.published[0].interval: must be two numbers above 0",
		"{" + cell + ", value: 4 Mb/s, interval: [0, 5]}":                                      "spec.published[0].interval: must be two numbers above 0",
		"{" + cell + ", versus: vxlan, interval: [0, 0]}":                                      "spec.published[0].interval: must be two numbers above 0",
		"{" + cell + ", value: 4118 Mb/s, ratio: 1.08}":                                        "spec.published[0].ratio: must not be set with a value: a figure is one or the other",
		"{" + strings.Replace(cell, "Table 1", "' '", 1) + ", ratio: 1, versus: vxlan}":        "spec.published[0].figure: must not be empty",
		"{" + cell + ", value: 12 widgets per hour}":                                           "spec.published[0].value: no metric is in widgets per hour; units are 1/s, B/s, GB/s,",
		"{" + cell + ", value: 0.0604 €/h}":                                                    "spec.published[0].value: no metric is in €/h; units are",
		"{" + cell + ", value: 450 ms}":                                                        `spec.published[0].value: must be in bit/s, as throughput is, or a multiple of it, is "450 ms"`,
		"{" + cell + ", value: 12.5 MB/s, oneWay: true}":                                       "spec.published[0].oneWay: is for the value of a latency",
		"{" + latency + ", ratio: 2, versus: vxlan, oneWay: true}":                             "spec.published[0].oneWay: is for the value of a latency",
		"{" + cell + ", value: 4118}":                                                          `spec.published[0].value: must be a number and its unit such as 4118 Mb/s or 72.9 µs, is "4118"`,
		"{" + cell + ", ratio: 1.08}":                                                          "spec.published[0].versus: is missing",
		"{" + cell + ", value: 0 Mb/s}":                                                        "spec.published[0].value: must be above 0",
		"{" + cell + ", value: [1]}":                                                           "spec.published[0].value: must be text, is",
		"{" + cell + ", ratio: 0, versus: vxlan}":                                              "spec.published[0].ratio: must be a number above 0, is 0",
		"{" + cell + ", ratio: .inf, versus: vxlan}":                                           "spec.published[0].ratio: must be a number, is \".inf\"",
		"{" + cell + ", ratio: inf, versus: vxlan}":                                            "spec.published[0].ratio: must be a number above 0, is +Inf",
		"{" + cell + ", ratio: nan, versus: vxlan}":                                            "spec.published[0].ratio: must be a number above 0, is NaN",
		"{" + cell + ", ratio: 1.08, versus: rps}":                                             "spec.published[0].versus: must be another variant than rps",
		"{" + cell + ", ratio: 1.08, versus: vxlam}":                                           `spec.published[0].versus: no variant has the name "vxlam"; did you mean vxlan?`,
		"{" + cell + ", value: 4118 Mb/s, versus: vxlan}":                                      "spec.published[0].versus: is for a ratio",
		"{" + cell + ", ratio: 1.08, versus: vxlan, interval: [1.1, 1.2]}":                     "spec.published[0].interval: must be around 1.08, is 1.1 to 1.2",
		"{" + cell + ", value: 4118 Mb/s, interval: [4200, 4300]}":                             "spec.published[0].interval: must be around 4118, is 4200 to 4300",
		"{" + cell + ", ratio: 1.08, versus: vxlan, interval: [1.1]}":                          "spec.published[0].interval: must be two numbers above 0, the lower one first, is [1.1]",
		"{" + cell + ", ratio: 1.08, versus: vxlan, interval: [1.2, 1]}":                       "spec.published[0].interval: must be two numbers above 0, the lower one first, is [1.2 1]",
		"{" + cell + ", ratio: 1.08, versus: vxlan, interval: [-1, 2]}":                        "spec.published[0].interval: must be two numbers above 0",
		"{" + strings.Replace(cell, "rps", "rp", 1) + ", ratio: 1, versus: vxlan}":             `spec.published[0].variant: no variant has the name "rp"; did you mean rps?`,
		"{" + strings.Replace(cell, "stream", "steam", 1) + ", ratio: 1, versus: vxlan}":       `spec.published[0].workload: no workload has the name "steam"; did you mean stream?`,
		"{" + strings.Replace(cell, "stream", "pingpong", 1) + ", ratio: 1, versus: vxlan}":    "spec.published[0].metric: pingpong gives no throughput",
		"{" + strings.Replace(cell, "throughput", "thruput", 1) + ", ratio: 1, versus: vxlan}": `spec.published[0].metric: there is no metric "thruput"; did you mean throughput?`,
		"{" + strings.Replace(cell, "16", "65", 1) + ", ratio: 1, versus: vxlan}":              "spec.published[0].pairs: must be at most 64, is 65",
		"{" + strings.Replace(cell, "source: a paper, ", "", 1) + ", ratio: 1, versus: vxlan}": "spec.published[0].source: is missing",
		"{" + cell + ", ratio: 1, versus: vxlan, page: 7}":                                     "spec.published[0].page: unknown field",
	} {
		e, err := Parse("test.yaml", []byte(publishedExperiment+text+"\n"), nil)
		if want != "" {
			if err == nil || !strings.Contains(err.Error(), want) || len(strings.Split(err.Error(), "\n")) > 1 {
				t.Errorf("%s:\n%v\nwant only %q", text, err, want)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		writtenAndRead(t, text, e)
	}
}

// TestPublishedOfWhatWasReplaced: an override that replaces variants or workloads also
// drops the figures of those that are gone. In a file, such a figure is an error.
func TestPublishedOfWhatWasReplaced(t *testing.T) {
	const figures = `{source: a, figure: one, variant: rps, workload: stream, pairs: 1, metric: throughput, ratio: 2, versus: vxlan}
  - {source: a, figure: two, variant: vxlan, workload: pingpong, pairs: 1, metric: latency_p50, value: 30 µs}
  - {source: a, figure: three, variant: vxlan, workload: stream, pairs: 1, metric: idle, cores: [90, 10]}
`
	for set, want := range map[string][]string{
		"spec.pairs=[3]":                {"one", "two", "three"},
		"spec.variants=[{name: vxlan}]": {"two", "three"},
		"spec.workloads=[{name: stream, stream: {duration: 2s}}]":                                           {"one", "three"},
		"spec.workloads=[{name: stream, stream: {duration: 2s}}, {name: pingpong, stream: {duration: 2s}}]": {"one", "three"},
	} {
		e, err := Parse("test.yaml", []byte(publishedExperiment+figures), []string{set})
		if err != nil {
			t.Errorf("%s: %v", set, err)
			continue
		}
		var got []string
		for _, p := range e.Spec.Published {
			got = append(got, p.Figure)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", set, diff)
		}
	}
}

func TestMeasure(t *testing.T) {
	for text, want := range map[Measure]struct {
		amount float64
		unit   string
	}{
		"4118 Mb/s": {4118e6, "bit/s"}, "2.01 Gbit/s": {2.01e9, "bit/s"}, "156.5 µs": {156.5e-6, "s"}, "72.9 us": {72.9e-6, "s"}, "450 ms": {0.45, "s"},
		"12.5 k/s": {12500, "1/s"}, "590 KB/s": {4.72e6, "bit/s"}, "590 kB/s": {4.72e6, "bit/s"}, "24.8 MB/s": {198.4e6, "bit/s"},
	} {
		amount, unit, _, err := text.Amount()
		if err != nil || math.Abs(amount/want.amount-1) > 1e-12 || unit != want.unit {
			t.Errorf("%s: %g %s, %v, want %g %s", text, amount, unit, err, want.amount, want.unit)
		}
	}
	for _, text := range []Measure{"", "Mb/s", "4118", "4118Mb/s", "4,118 Mb/s", "-1 s", "1e3 s", "1 ", "0 s", "1 s ", "87.1 %", "1 KiB/s", "0.007 $/h"} {
		if amount, unit, _, err := text.Amount(); err == nil {
			t.Errorf("%q is %g %s, want an error", text, amount, unit)
		}
	}
}

// TestPrecision: an experiment with published figures has a precision, by default or as
// set.
func TestPrecision(t *testing.T) {
	const figure = "{source: a, figure: b, variant: rps, workload: stream, pairs: 1, metric: throughput, ratio: 2, versus: vxlan}\n"
	without, _, _ := strings.Cut(publishedExperiment, "  published:")
	for text, want := range map[string]float64{without: 0, publishedExperiment + figure: 1.5, publishedExperiment + figure + "  precision: 3\n": 3} {
		e, err := Parse("test.yaml", []byte(text), nil)
		if err != nil || e.Spec.Precision != want {
			t.Errorf("precision %v, %v, want %g", e, err, want)
		}
	}
	const want = "spec.precision: must be a number above 1, is 1"
	if _, err := Parse("test.yaml", []byte(publishedExperiment+figure+"  precision: 1\n"), nil); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %q", err, want)
	}
}
