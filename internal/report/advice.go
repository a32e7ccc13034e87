package report

import (
	"slices"

	"slipstream.dev/internal/stats"
)

// Advice says what to use for one workload at one number of pairs. Each entry names a variant and its
// effect.
type Advice struct {
	Workload string
	Pairs    int
	Versus   string
	// Use is the variant with the largest proven gain, empty if none is proven. Also lists the
	// others that gain.
	Use          string
	Also         []string
	Harms        []string
	Same         []string
	Inconclusive []string
}

// advice returns the advice for each workload, baseline and number of pairs that has comparisons.
func (m *Model) advice() []Advice {
	var out []Advice
	for _, w := range m.exp.Spec.Workloads {
		tables := m.judgedTables(w.Name)
		for _, versus := range m.baselines() {
			for _, p := range m.pairsOf(w) {
				a := Advice{Workload: w.Name, Pairs: p, Versus: versus}
				if m.advise(&a, tables) {
					out = append(out, a)
				}
			}
		}
	}
	return out
}

// advise fills in the advice, and reports whether there is anything to choose from. It follows the first metric of the
// workload. A variant that is slower in any other metric counts as harmful.
func (m *Model) advise(a *Advice, tables []Table) (found bool) {
	var best *stats.Row
	for _, v := range m.exp.Spec.Variants {
		for i, t := range tables {
			r := m.rows[cell{v.Name, a.Workload, a.Pairs, t.Metric}]
			if !m.hasComparison(r, podChoice) || r.Versus.Baseline != a.Versus {
				continue
			}
			found = true
			text := v.Name + ": " + quantityOf(t.Metric).name + " " + change(r)
			switch {
			case r.Versus.Verdict == stats.Slower:
				a.Harms = append(a.Harms, text)
			case i > 0:
			case r.Versus.Verdict == stats.Faster:
				a.Also = append(a.Also, text)
				if best == nil || r.Gain() > best.Gain() {
					best, a.Use = r, text
				}
			case r.Versus.Verdict == stats.Same:
				a.Same = append(a.Same, v.Name)
			default:
				a.Inconclusive = append(a.Inconclusive, v.Name)
			}
		}
	}
	a.Also = slices.DeleteFunc(a.Also, func(s string) bool { return s == a.Use })
	return found
}
