package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/words"
)

// program names the program that makes a workload's traffic: a tool, or the way in which the
// traffic engine reads and writes. It is empty if that is unknown, or if the engine has only one
// way.
func program(t *spec.Traffic) string {
	switch {
	case t.Tool != "" && t.Tool != spec.ToolNative:
		return t.Tool
	case t.IO == spec.IOBlocking:
		return "blocking programs"
	case t.IO == spec.IOEpoll:
		return "event loops"
	}
	return ""
}

// byTraffic groups the workloads whose program has a name. Workloads that differ only in the
// program are in one group.
func (m *Model) byTraffic() [][]spec.Workload {
	type traffic struct {
		kind, beside string
		spec.Traffic
	}
	var all []traffic
	var out [][]spec.Workload
	for _, w := range m.exp.Spec.Workloads {
		if program(w.Traffic()) == "" {
			continue
		}
		of := traffic{w.Kind(), w.Beside, *w.Traffic()}
		of.IO, of.Tool = "", ""
		i := slices.Index(all, of)
		if i < 0 {
			i = len(all)
			all, out = append(all, of), append(out, nil)
		}
		out[i] = append(out[i], w)
	}
	return out
}

// programSentences say whether a comparison depends on the program that made the traffic. If no other
// program was measured, they say how the traffic engine reads and writes.
func (m *Model) programSentences() []string {
	var out []string
	ways := map[string][]string{}
	for _, alike := range m.byTraffic() {
		if t := alike[0].Traffic(); len(alike) > 1 {
			out = append(out, m.dependences(alike)...)
		} else if t.IO != "" {
			ways[t.IO] = append(ways[t.IO], alike[0].Name)
		}
	}
	if m.Imported() {
		return out
	}
	var parts []string
	for _, io := range []string{spec.IOBlocking, spec.IOEpoll} {
		if names := ways[io]; names != nil {
			parts = append(parts, fmt.Sprintf("%s (%s)", program(&spec.Traffic{IO: io}), words.And(names)))
		}
	}
	if len(parts) > 0 {
		out = append(out, fmt.Sprintf("The traffic came from %s; ratios may differ for programs that read and write in another way.", words.And(parts)))
	}
	return out
}

// programRatio is the ratio of two paths, measured with one program.
type programRatio struct {
	program string
	ratio   float64
	ci      number.Interval
}

func (r programRatio) String() string {
	return fmt.Sprintf("%s for %s", number.Format(r.ratio, r.ci, 2), r.program)
}

// dependence is a comparison that programs disagree about, and the gap between them.
type dependence struct {
	text string
	gap  float64
}

// dependences describes the comparisons that programs disagree about. Those with the largest gap come first.
func (m *Model) dependences(alike []spec.Workload) []string {
	var all []dependence
	for _, t := range m.judgedTables(alike[0].Name) {
		for _, v := range m.exp.Spec.Variants {
			for _, p := range t.Pairs {
				what, ratios := m.programRatios(alike, v.Name, p, t.Metric)
				if d, ok := disagreement(ratios); ok {
					d.text = fmt.Sprintf("%s %s at %s: %s", what, quantityOf(t.Metric).name, pairs(p), d.text)
					all = append(all, d)
				}
			}
		}
	}
	slices.SortStableFunc(all, func(a, b dependence) int { return cmp.Compare(b.gap, a.gap) })
	var out []string
	for _, d := range all[:min(len(all), few)] {
		out = append(out, "The ratio depends on the program: "+d.text+".")
	}
	if more := len(all) - few; more > 0 {
		out = append(out, fmt.Sprintf("So do %s.", words.Count(more, "more comparison")))
	}
	return out
}

// disagreement returns the ratios, the largest first. It returns false unless one interval lies wholly below
// another.
func disagreement(ratios []programRatio) (dependence, bool) {
	if len(ratios) < 2 {
		return dependence{}, false
	}
	low := slices.MinFunc(ratios, func(a, b programRatio) int { return cmp.Compare(a.ci.High, b.ci.High) })
	high := slices.MaxFunc(ratios, func(a, b programRatio) int { return cmp.Compare(a.ci.Low, b.ci.Low) })
	if low.ci.High >= high.ci.Low {
		return dependence{}, false
	}
	slices.SortStableFunc(ratios, func(a, b programRatio) int { return cmp.Compare(b.ratio, a.ratio) })
	var texts []string
	for _, r := range ratios {
		texts = append(texts, r.String())
	}
	return dependence{strings.Join(texts, ", "), math.Log(high.ratio / low.ratio)}, true
}

// programRatios returns one comparison as each program measured it, and what is compared: "fastpath /
// native". The host network is always the denominator.
func (m *Model) programRatios(alike []spec.Workload, variant string, pairs int, metric string) (what string, out []programRatio) {
	for _, w := range alike {
		r := m.rows[cell{variant, w.Name, pairs, metric}]
		if !m.hasComparison(r, overlayCost) && !m.hasComparison(r, podChoice) || r.Versus.N < 2 {
			continue
		}
		of := programRatio{program(w.Traffic()), r.Versus.Ratio, number.Of(r.Versus.CI95, r.Versus.N)}
		what = variant + " / " + r.Versus.Baseline
		if m.native(m.variant(variant)) {
			what = r.Versus.Baseline + " / " + variant
			of.ratio, of.ci = 1/of.ratio, of.ci.Inverse()
		}
		out = append(out, of)
	}
	return what, out
}
