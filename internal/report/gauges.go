package report

import (
	"math"
	"slices"
	"strconv"
	"strings"

	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/words"
)

// family is a metric of a monitoring system: gauges of one name.
type family struct {
	name, help string
	gauges     []gauge
}

type gauge struct {
	labels []label
	value  float64
}

type label struct{ name, value string }

// families returns the result as gauges. The metric and its unit are labels, like the resource and its unit in
// kube-state-metrics, because the names of the metrics of DaemonSets are not valid in monitoring systems. A single
// block has no interval.
func (m *Model) families() []family {
	var f familySet
	s := m.summary
	result := label{"experiment", s.Experiment}
	var kernels []string
	for _, n := range m.Environment.Nodes {
		if !slices.Contains(kernels, n.Kernel) {
			kernels = append(kernels, n.Kernel)
		}
	}
	f.add("info", "1, with the version and the kernels that were measured.", 1, result, label{"version", m.Environment.Version}, label{"kernel", words.And(kernels)})
	f.add("complete", "1 if the run has all of its trials, 0 if some are missing.", flag(s.Unfinished == ""), result)
	if at := m.Environment.Started; !at.IsZero() {
		f.add("started_timestamp_seconds", "When the run began.", float64(at.Unix()), result)
	}
	for i := range s.Rows {
		f.row(&s.Rows[i], result)
	}
	for _, mesh := range s.Meshes {
		for _, l := range mesh.Links {
			labels := []label{result, {"variant", mesh.Variant}, {"workload", mesh.Workload}, {"metric", mesh.Metric}, {"unit", mesh.Unit}, {"client", l.Client}, {"server", l.Server}}
			if l.N > 0 {
				f.estimate("link_mean", "mean of a link of a mesh", l.Mean, l.CI95, l.N, labels)
			}
			f.add("link_blocks", "Blocks in which a link of a mesh was measured.", float64(l.N), labels...)
		}
	}
	for _, e := range s.Expected {
		for _, outcome := range []stats.Outcome{stats.OutcomeMet, stats.OutcomeFailed, stats.OutcomeInconclusive} {
			f.add("expectation", "1 for the outcome of an expectation, 0 for the others.", flag(e.Outcome == outcome), result, label{"claim", e.Claim}, label{"outcome", string(outcome)})
		}
	}
	return f
}

type familySet []family

// add adds a gauge, unless its value is NaN or infinite. It drops labels without a value.
func (f *familySet) add(name, help string, value float64, labels ...label) {
	if math.IsNaN(value) || math.IsInf(value, 0) {
		return
	}
	name = "slipstream_result_" + name
	to := findOrAdd((*[]family)(f), func(one family) bool { return one.name == name }, family{name: name, help: help})
	to.gauges = append(to.gauges, gauge{slices.DeleteFunc(slices.Clone(labels), func(l label) bool { return l.value == "" }), value})
}

// estimate adds a value and the ends of its interval.
func (f *familySet) estimate(name, of string, value float64, ci [2]float64, n int, labels []label) {
	f.add(name, strings.ToUpper(of[:1])+of[1:]+".", value, labels...)
	if n > 1 {
		f.add(name+"_lower", "Lower end of the 95% interval of the "+of+".", ci[0], labels...)
		f.add(name+"_upper", "Upper end of the 95% interval of the "+of+".", ci[1], labels...)
	}
}

func (f *familySet) row(r *stats.Row, result label) {
	labels := []label{result, {"variant", r.Variant}, {"workload", r.Workload}, {"pairs", strconv.Itoa(r.Pairs)}, {"metric", r.Metric}, {"unit", r.Unit}}
	if r.N > 0 {
		f.estimate("mean", "mean of the blocks", r.Mean, r.CI95, r.N, labels)
	}
	f.add("blocks", "Blocks with a trial that succeeded.", float64(r.N), labels...)
	for _, code := range warningCodes(r) {
		f.add("warning", "1 for each warning about a figure.", 1, append(labels, label{"code", code})...)
	}
	v := r.Versus
	if v == nil {
		return
	}
	labels = append(labels[:len(labels)-1], label{"baseline", v.Baseline}) // a ratio has no unit
	f.estimate("ratio", "ratio to the baseline", v.Ratio, v.CI95, v.N, labels)
	for _, verdict := range []stats.Verdict{stats.Faster, stats.Slower, stats.Same, stats.Inconclusive} {
		f.add("verdict", "1 for the verdict of a comparison, 0 for the others.", flag(v.Verdict == verdict), append(labels, label{"verdict", string(verdict)})...)
	}
}

func flag(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

// text returns a label's value as text that is safe to show.
func (l label) text() string { return plain.Line(l.value) }
