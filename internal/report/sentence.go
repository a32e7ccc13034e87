package report

import (
	"fmt"
	"math"
	"slices"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/stats"
)

// Cost shows one metric of one overlay path, as a share of the host network's.
type Cost struct {
	Variant, Native string
	// What names the workload and the metric. Better is the better direction.
	What, Better string
	Shares       []Share
}

// Share is a percentage of the host network at one number of pairs.
type Share struct {
	Pairs int
	Estimate
}

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

// question is the kind of question that a comparison answers.
type question int

const (
	// cost compares an overlay with the host network.
	cost question = iota
	// choice compares two ways to run the same pods.
	choice
	// other compares tools, NICs or hosts: nothing that one could switch on.
	other
)

// asks reports whether a row has a comparison of this kind, with a finite ratio.
func (m *Model) asks(r *stats.Row, q question) bool {
	return r != nil && r.Versus != nil && r.Versus.Ratio > 0 && !math.IsInf(r.Versus.Ratio, 0) && m.question(r) == q
}

func (m *Model) question(r *stats.Row) question {
	v, b := m.variant(r.Variant), m.variant(r.Versus.Baseline)
	switch {
	case m.native(v) != m.native(b):
		return cost
	case !m.exp.MeasuredAlike(v, b):
		return other
	}
	return choice
}

// costs returns a row for each overlay that was compared with the host network, in either direction.
func (m *Model) costs() []Cost {
	var out []Cost
	for _, t := range m.Tables {
		if !t.Judged && t.Metric != metrics.CPUPerGB && t.Metric != metrics.CPUPerMessage {
			continue
		}
		for _, row := range t.Rows {
			shares := map[[2]string][]Share{}
			var order [][2]string
			for _, p := range t.Pairs {
				r := m.rows[cell{row.Variant, t.Workload, p, t.Metric}]
				if !m.asks(r, cost) {
					continue
				}
				key, share := m.share(r)
				if shares[key] == nil {
					order = append(order, key)
				}
				shares[key] = append(shares[key], Share{p, share})
			}
			for _, key := range order {
				out = append(out, Cost{Variant: key[0], Native: key[1], What: t.Title, Better: t.Better, Shares: shares[key]})
			}
		}
	}
	return out
}

// share converts a comparison to the ratio of the overlay to the host network.
func (m *Model) share(r *stats.Row) (overlayAndNative [2]string, share Estimate) {
	ci := of(r.Versus.CI95, r.Versus.N)
	if !m.native(m.variant(r.Variant)) {
		return [2]string{r.Variant, r.Versus.Baseline}, percent(r.Versus.Ratio, ci)
	}
	return [2]string{r.Versus.Baseline, r.Variant},
		percent(1/r.Versus.Ratio, ci.mapped(func(x float64) float64 { return 1 / x }))
}

// CostPairs returns the columns of the table of costs.
func (m *Model) CostPairs() []int {
	var all []int
	for _, c := range m.Costs {
		for _, s := range c.Shares {
			all = append(all, s.Pairs)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// At returns the share at a number of pairs, or an empty one if there is none.
func (c Cost) At(pairs int) Estimate {
	for _, s := range c.Shares {
		if s.Pairs == pairs {
			return s.Estimate
		}
	}
	return Estimate{}
}

// advice is based on the first metric of each workload. A variant that is slower in any other
// metric counts as harmful.
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

// advise says what to use, and whether there was anything to choose from. It is based on the first
// metric of the workload. A variant that is slower in any other metric counts as harmful.
func (m *Model) advise(a *Advice, tables []Table) (found bool) {
	var best *stats.Row
	for _, v := range m.exp.Spec.Variants {
		for i, t := range tables {
			r := m.rows[cell{v.Name, a.Workload, a.Pairs, t.Metric}]
			if !m.asks(r, choice) || r.Versus.Baseline != a.Versus {
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

func (m *Model) judgedTables(workload string) []Table {
	return slices.DeleteFunc(slices.Clone(m.Tables), func(t Table) bool {
		return t.Workload != workload || !t.Judged
	})
}

// baselines returns all variants that others are compared with, in the file's order.
func (m *Model) baselines() []string {
	var out []string
	for _, v := range m.exp.Spec.Variants {
		if slices.ContainsFunc(m.summary.Rows, func(r stats.Row) bool {
			return r.Versus != nil && r.Versus.Baseline == v.Name
		}) {
			out = append(out, v.Name)
		}
	}
	return out
}

// change formats the change of the metric itself: "+12 % (10–14)". A latency that falls has a minus. A
// ratio of 2 or more is a factor: "×2.4 (2.3–2.5)".
func change(r *stats.Row) string {
	ratio, ci := r.Versus.Ratio, of(r.Versus.CI95, r.Versus.N)
	switch {
	case ratio >= 2:
		return "×" + estimate(ratio, ci, 2).String()
	case ratio < 1 && ci.hi > 1: // it may be a rise as well, so the interval has signs
		return percent(ratio-1, ci.mapped(func(x float64) float64 { return x - 1 })).with("%")
	case ratio < 1:
		return "−" + percent(1-ratio, ci.mapped(func(x float64) float64 { return 1 - x })).with("%")
	}
	return "+" + percent(ratio-1, ci.mapped(func(x float64) float64 { return x - 1 })).with("%")
}

// Says describes a comparison with its metric: "stream throughput +12 % (10–14) at 4 pairs".
func Says(r *stats.Row) string {
	return fmt.Sprintf("%s %s %s at %s", r.Workload, quantityOf(r.Metric).name, change(r), pairs(r.Pairs))
}

// smallestAndLargest returns both ends of a list of pairs, or one number if they are equal.
func smallestAndLargest(pairs []int) []int {
	if len(pairs) == 0 {
		return nil
	}
	return slices.Compact([]int{pairs[0], pairs[len(pairs)-1]})
}
