package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"slipstream.dev/internal/spec"
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
		kind string
		spec.Traffic
	}
	var all []traffic
	var out [][]spec.Workload
	for _, w := range m.exp.Spec.Workloads {
		if program(w.Traffic()) == "" {
			continue
		}
		of := traffic{w.Kind(), *w.Traffic()}
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

// programSentences say if a comparison depends on the program that made the traffic, and name the
// engine's way if no other program was measured.
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
			parts = append(parts, fmt.Sprintf("%s (%s)", program(&spec.Traffic{IO: io}), list(names)))
		}
	}
	if len(parts) > 0 {
		out = append(out, fmt.Sprintf("The traffic came from %s; ratios may differ for programs that read and write in another way.", list(parts)))
	}
	return out
}

// ratioOf is the ratio of two paths, measured with one program.
type ratioOf struct {
	program string
	ratio   float64
	ci      interval
}

func (r ratioOf) String() string {
	return fmt.Sprintf("%s for %s", estimate(r.ratio, r.ci, 2), r.program)
}

// dependences describes the comparisons in which programs disagree: the interval of one ends
// below that of the other. Those with the largest gap come first.
func (m *Model) dependences(alike []spec.Workload) []string {
	type dependence struct {
		text string
		gap  float64
	}
	var all []dependence
	for _, t := range m.judgedTables(alike[0].Name) {
		for _, v := range m.exp.Spec.Variants {
			for _, p := range t.Pairs {
				what, ratios := m.ratiosOf(alike, v.Name, p, t.Metric)
				if len(ratios) < 2 {
					continue
				}
				low := slices.MinFunc(ratios, func(a, b ratioOf) int { return cmp.Compare(a.ci.hi, b.ci.hi) })
				high := slices.MaxFunc(ratios, func(a, b ratioOf) int { return cmp.Compare(a.ci.lo, b.ci.lo) })
				if low.ci.hi >= high.ci.lo {
					continue
				}
				slices.SortStableFunc(ratios, func(a, b ratioOf) int { return cmp.Compare(b.ratio, a.ratio) })
				var said []string
				for _, r := range ratios {
					said = append(said, r.String())
				}
				all = append(all, dependence{
					fmt.Sprintf("%s %s at %s: %s", what, quantityOf(t.Metric).name, pairs(p), strings.Join(said, ", ")),
					math.Log(high.ratio / low.ratio),
				})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b dependence) int { return cmp.Compare(b.gap, a.gap) })
	var out []string
	for _, d := range all[:min(len(all), few)] {
		out = append(out, "The ratio depends on the program: "+d.text+".")
	}
	if more := len(all) - few; more > 0 {
		out = append(out, fmt.Sprintf("So do %s.", plural(more, "more comparison")))
	}
	return out
}

// ratiosOf returns one comparison as each program measured it, and what is compared: "fastpath /
// native". An overlay is always above the host network.
func (m *Model) ratiosOf(alike []spec.Workload, variant string, pairs int, metric string) (what string, out []ratioOf) {
	for _, w := range alike {
		r := m.rows[cell{variant, w.Name, pairs, metric}]
		if !m.asks(r, cost) && !m.asks(r, choice) || r.Versus.N < 2 {
			continue
		}
		of := ratioOf{program(w.Traffic()), r.Versus.Ratio, interval{r.Versus.CI95[0], r.Versus.CI95[1]}}
		what = variant + " / " + r.Versus.Baseline
		if m.native(m.variant(variant)) {
			what = r.Versus.Baseline + " / " + variant
			of.ratio, of.ci = 1/of.ratio, of.ci.mapped(func(x float64) float64 { return 1 / x })
		}
		out = append(out, of)
	}
	return what, out
}
