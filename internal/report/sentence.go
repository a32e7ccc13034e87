package report

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/stats"
)

// Cost is what one overlay path makes of one metric, as a share of the host
// network's.
type Cost struct {
	Variant, Native string
	// What is the workload and the metric; Better its direction.
	What, Better string
	Shares       []Share
}

// Share is a percentage of the host network at one number of pairs.
type Share struct {
	Pairs int
	Estimate
}

// Advice is what to do for one workload at one number of pairs. Each entry
// names a variant and what it does.
type Advice struct {
	Workload string
	Pairs    int
	Versus   string
	// Use is the variant with the largest proven gain, empty where none is
	// proven; Also are the others that gain.
	Use     string
	Also    []string
	Harms   []string
	Same    []string
	Unclear []string
}

// question tells comparisons apart by what they answer.
type question int

const (
	// cost sets an overlay against the host network.
	cost question = iota
	// choice sets two ways to run the same pods against each other.
	choice
	// other sets tools or NICs against each other: nothing to switch on.
	other
)

// asks is true where a row has a comparison, with a number, of this kind.
func (m *Model) asks(r *stats.Row, q question) bool {
	return r != nil && r.Versus != nil && r.Versus.Ratio > 0 && !math.IsInf(r.Versus.Ratio, 0) && m.question(r) == q
}

func (m *Model) question(r *stats.Row) question {
	v, b := m.variant(r.Variant), m.variant(r.Versus.Baseline)
	switch {
	case m.native(v) != m.native(b):
		return cost
	case !reflect.DeepEqual(v.Tools, b.Tools) || !reflect.DeepEqual(v.NIC, b.NIC):
		return other
	}
	return choice
}

// costs has a row for each overlay that was compared with the host network, in
// either direction.
func (m *Model) costs() []Cost {
	var out []Cost
	for _, t := range m.Tables {
		if !t.Judged && t.Metric != record.CPUPerGB && t.Metric != record.CPUPerMessage {
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

// share turns a comparison so that the overlay stands over the host network.
func (m *Model) share(r *stats.Row) (overlayAndNative [2]string, share Estimate) {
	ci := of(r.Versus.CI95, r.Versus.N)
	if !m.native(m.variant(r.Variant)) {
		return [2]string{r.Variant, r.Versus.Baseline}, percent(r.Versus.Ratio, ci)
	}
	return [2]string{r.Versus.Baseline, r.Variant},
		percent(1/r.Versus.Ratio, ci.mapped(func(x float64) float64 { return 1 / x }))
}

// CostPairs are the columns of the table of costs.
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

// At is the share at a number of pairs; empty where there is none.
func (c Cost) At(pairs int) Estimate {
	for _, s := range c.Shares {
		if s.Pairs == pairs {
			return s.Estimate
		}
	}
	return Estimate{}
}

// advice judges by the first metric of each workload; a variant that any of
// its metrics shows to be slower harms.
func (m *Model) advice() []Advice {
	var out []Advice
	for _, w := range m.exp.Spec.Workloads {
		tables := m.judgedTables(w.Name)
		for _, versus := range m.baselines() {
			for _, p := range m.pairsOf(w) {
				a := Advice{Workload: w.Name, Pairs: p, Versus: versus}
				var best *stats.Row
				found := false
				for _, v := range m.exp.Spec.Variants {
					for i, t := range tables {
						r := m.rows[cell{v.Name, w.Name, p, t.Metric}]
						if !m.asks(r, choice) || r.Versus.Baseline != versus {
							continue
						}
						found = true
						text := v.Name + ": " + change(r)
						if i > 0 {
							text = v.Name + ": " + quantityOf(t.Metric).name + " " + change(r)
						}
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
							a.Unclear = append(a.Unclear, v.Name)
						}
					}
				}
				a.Also = slices.DeleteFunc(a.Also, func(s string) bool { return s == a.Use })
				if found {
					out = append(out, a)
				}
			}
		}
	}
	return out
}

func (m *Model) judgedTables(workload string) []Table {
	return slices.DeleteFunc(slices.Clone(m.Tables), func(t Table) bool {
		return t.Workload != workload || !t.Judged
	})
}

// baselines are all that some variant is compared with, in the file's order.
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

// change is "+12 % (10–14)", of the metric itself: a latency that falls has a
// minus. From twice on it is a factor, "×2.4 (2.3–2.5)".
func change(r *stats.Row) string {
	sign, _, by := moves(r)
	return sign + by
}

// Says is what a comparison found, with the metric: "stream throughput +12 % (10–14) at
// 4 pairs".
func Says(r *stats.Row) string {
	return fmt.Sprintf("%s %s %s at %s", r.Workload, quantityOf(r.Metric).name, change(r), pairs(r.Pairs))
}

// does is change as a sentence.
func does(r *stats.Row, what string) string {
	_, verb, by := moves(r)
	return fmt.Sprintf("%s %s %s by %s at %s", r.Variant, verb, what, by, pairs(r.Pairs))
}

func moves(r *stats.Row) (sign, verb, by string) {
	ratio, ci := r.Versus.Ratio, of(r.Versus.CI95, r.Versus.N)
	switch {
	case ratio >= 2:
		return "×", "multiplies", estimate(ratio, ci, 2).String()
	case ratio < 1:
		return "−", "lowers", percent(1-ratio, ci.mapped(func(x float64) float64 { return 1 - x })).with("%")
	}
	return "+", "raises", percent(ratio-1, ci.mapped(func(x float64) float64 { return x - 1 })).with("%")
}

// headline speaks of the first workload and what it is judged by: what the
// overlay costs at the fewest pairs, then the largest gain, the largest harm
// and what makes no difference.
func (m *Model) headline() string {
	if len(m.Tables) == 0 || len(m.summary.Rows) == 0 {
		if len(m.Failures) > 0 {
			return "No trial gave a result: " + m.Failures[0].Error + "."
		}
		return "No trial gave a result."
	}
	t := m.Tables[0]
	var clauses []string
	if c := m.costClause(t); c != "" {
		clauses = append(clauses, c)
	}
	gains := m.gainClauses(t, choice)
	if len(clauses)+len(gains) == 0 {
		gains = m.gainClauses(t, other)
	}
	if len(clauses) == 0 && len(gains) > 0 {
		if b := m.baselines(); len(b) == 1 {
			gains[0] = "Against " + b[0] + ", " + gains[0]
		}
	}
	if clauses = append(clauses, gains...); len(clauses) > 0 {
		return strings.Join(clauses, "; ") + "."
	}
	for _, row := range t.Rows {
		for i, l := range row.Cells {
			if l.Missing == "" {
				return fmt.Sprintf("%s has a %s of %s at %s; nothing was compared with it.",
					row.Variant, t.Title, l.Estimate.with(t.Unit), pairs(t.Pairs[i]))
			}
		}
	}
	return "The workload " + t.Workload + " gave no result."
}

func (m *Model) costClause(t Table) string {
	type subject struct{ name, path, share string }
	var subjects []subject
	natives := map[string]bool{}
	at := 0
	for _, c := range m.Costs {
		if c.What != t.Title || len(m.variant(c.Variant).Accelerate) > 0 {
			continue
		}
		s := c.Shares[0]
		if at == 0 {
			at = s.Pairs
		}
		if s.Pairs != at {
			continue
		}
		natives[c.Native] = true
		subjects = append(subjects, subject{c.Variant, pathName(m.path(m.variant(c.Variant))), s.with("%")})
	}
	if len(subjects) == 0 {
		return ""
	}
	if len(subjects) == 1 {
		name := "VXLAN"
		if !strings.HasPrefix(subjects[0].path, name) {
			name = subjects[0].name
		}
		if t.Better == "lower" {
			return fmt.Sprintf("%s's %s is %s of the host network's at %s", name, t.Title, subjects[0].share, pairs(at))
		}
		return fmt.Sprintf("%s reaches %s of the host network's %s at %s", name, subjects[0].share, t.Title, pairs(at))
	}
	words := make([]string, 0, len(subjects))
	for _, s := range subjects[:min(len(subjects), 4)] {
		words = append(words, s.name+" "+s.share)
	}
	return fmt.Sprintf("Of the host network's %s at %s, these remain: %s", t.Title, pairs(at), list(words))
}

func (m *Model) gainClauses(t Table, q question) []string {
	var best, worst *stats.Row
	var variants []string
	moved, unclear := map[string]bool{}, map[string]bool{}
	for _, row := range t.Rows {
		for _, p := range t.Pairs {
			r := m.rows[cell{row.Variant, t.Workload, p, t.Metric}]
			if !m.asks(r, q) {
				continue
			}
			if !slices.Contains(variants, r.Variant) {
				variants = append(variants, r.Variant)
			}
			switch r.Versus.Verdict {
			case stats.Faster:
				moved[r.Variant] = true
				if best == nil || r.Gain() > best.Gain() {
					best = r
				}
			case stats.Slower:
				moved[r.Variant] = true
				if worst == nil || r.Gain() < worst.Gain() {
					worst = r
				}
			case stats.Same:
			default:
				unclear[r.Variant] = true
			}
		}
	}
	var out, still, open []string
	if best != nil {
		out = append(out, does(best, t.Title))
	}
	if worst != nil {
		out = append(out, does(worst, t.Title))
	}
	for _, v := range variants {
		switch {
		case moved[v]:
		case unclear[v]:
			open = append(open, v)
		default:
			still = append(still, v)
		}
	}
	const few = 3
	verb := func(names []string, one, several string) string {
		if len(names) > few {
			return fmt.Sprintf("%d variants %s", len(names), several)
		}
		if len(names) == 1 {
			return names[0] + " " + one
		}
		return list(names) + " " + several
	}
	if len(still) > 0 {
		out = append(out, verb(still, "changes nothing", "change nothing"))
	}
	if len(open) > 0 && len(out) < few {
		out = append(out, "what "+verb(open, "does", "do")+" is not clear")
	}
	return out
}

// smallestAndLargest are the ends of a list of pairs, once where they are one.
func smallestAndLargest(pairs []int) []int {
	if len(pairs) == 0 {
		return nil
	}
	return slices.Compact([]int{pairs[0], pairs[len(pairs)-1]})
}
