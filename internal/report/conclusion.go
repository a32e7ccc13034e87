package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"slipstream.dev/internal/stats"
)

// conclude writes the conclusions, a sentence each: the cost of the overlay, and then for each
// baseline the largest gain, what is slower, and what is inconclusive. It considers all
// workloads.
func (m *Model) conclude() (costs, rest []string) {
	if m.Blocks == 0 {
		if len(m.Failures) > 0 {
			return nil, []string{"No trial gave a result: " + m.Failures[0].Error + "."}
		}
		return nil, []string{"No trial gave a result."}
	}
	costs = m.costSentences()
	for _, q := range []question{choice, other} {
		if q == other && len(rest) > 0 {
			break
		}
		compared := m.compared(q)
		for _, versus := range m.baselines() {
			if all := compared[versus]; len(all) > 0 {
				rest = append(rest, m.gainSentences(versus, all, q == choice && len(costs) > 0 && len(compared) == 1)...)
			}
		}
	}
	switch {
	case len(rest) > 0:
		return costs, append(rest, m.programSentences()...)
	case len(costs) > 0:
		return append(costs, m.programSentences()...), nil
	}
	t := m.Tables[0]
	for _, row := range t.Rows {
		for i, l := range row.Cells {
			if l.Missing == "" {
				return nil, []string{fmt.Sprintf("%s has a %s of %s at %s; nothing was compared with it.",
					row.Variant, t.Title, l.Estimate.with(t.Unit), pairs(t.Pairs[i]))}
			}
		}
	}
	return nil, []string{"The workload " + t.Workload + " gave no result."}
}

// few is the maximum number of things that a sentence lists.
const few = 3

// costSentences say what share of the host network's performance each overlay reaches, at the
// fewest pairs. There is one sentence for a single overlay, otherwise one for each workload.
func (m *Model) costSentences() []string {
	type part struct{ variant, title, share string }
	var parts []part
	at := 0
	for _, w := range m.exp.Spec.Workloads {
		judged := m.judgedTables(w.Name)
		for _, c := range m.Costs {
			if len(judged) == 0 || c.What != judged[0].Title || len(m.variant(c.Variant).Accelerate) > 0 {
				continue
			}
			if at == 0 {
				at = c.Shares[0].Pairs
			}
			if c.Shares[0].Pairs == at {
				parts = append(parts, part{c.Variant, c.What, c.Shares[0].with("%")})
			}
		}
	}
	if len(parts) == 0 {
		return nil
	}
	several := slices.ContainsFunc(parts, func(p part) bool { return p.variant != parts[0].variant })
	if !several {
		var all []string
		for i, p := range parts[:min(len(parts), few)] {
			of := "of its"
			if i == 0 {
				of = "of the host network's"
			}
			all = append(all, fmt.Sprintf("%s %s %s", p.share, of, p.title))
		}
		return []string{fmt.Sprintf("Here %s has %s, at %s.", m.overlayName(parts[0].variant), list(all), pairs(at))}
	}
	var out []string
	for len(parts) > 0 && len(out) < few {
		title := parts[0].title
		var all []string
		for _, p := range parts {
			if p.title == title {
				all = append(all, p.variant+" "+p.share)
			}
		}
		parts = slices.DeleteFunc(parts, func(p part) bool { return p.title == title })
		out = append(out, fmt.Sprintf("Here the overlays have, of the host network's %s at %s: %s.", title, pairs(at), list(all[:min(len(all), few+1)])))
	}
	return out
}

func (m *Model) overlayName(variant string) string {
	switch p := m.path(m.variant(variant)); {
	case p.VXLAN != nil:
		return "VXLAN"
	case p.Pod != nil:
		return "the pods' network"
	}
	return variant
}

// compared returns the proofs of all variants with a kind of comparison, by baseline.
func (m *Model) compared(q question) map[string][]stats.Proof {
	out := map[string][]stats.Proof{}
	for _, v := range m.exp.Spec.Variants {
		p := m.summary.Proof(m.exp, v)
		if p.All = slices.DeleteFunc(p.All, func(r *stats.Row) bool { return !m.asks(r, q) }); len(p.All) > 0 {
			out[p.Baseline] = append(out[p.Baseline], p)
		}
	}
	return out
}

// gainSentences describe all variants that are compared with one baseline. back means that the
// baseline is an overlay, and that the previous sentence has its cost.
func (m *Model) gainSentences(versus string, all []stats.Proof, back bool) []string {
	var out []string
	best, found := largest(all)
	if found {
		costs := best.Losses()
		without := ""
		if len(costs) == 0 && slices.ContainsFunc(all, func(p stats.Proof) bool { return !p.Good() && surpasses(p, best) != nil }) {
			without = " without making anything worse"
		}
		text := fmt.Sprintf("Compared with %s, %s gains the most%s: ", versus, best.Variant, without)
		if back {
			text = fmt.Sprintf("%s gives the most back%s, compared with %s: ", best.Variant, without, versus)
		}
		text += saysAll(bestOfEach(best.Faster))
		if len(costs) > 0 {
			text += ", at the cost of " + saysAll(worstOfEach(costs))
		}
		out = append(out, text+".")
	} else {
		out = append(out, fmt.Sprintf("Nothing is proven faster than %s.", versus))
	}
	if harm := harms(all, best); harm != "" {
		out = append(out, harm)
	}
	var still, open []string
	for _, p := range all {
		switch {
		case len(p.Faster)+len(p.Slower) > 0:
		case slices.ContainsFunc(p.All, func(r *stats.Row) bool { return r.Versus.Verdict != stats.Same }):
			open = append(open, p.Variant)
		default:
			still = append(still, p.Variant)
		}
	}
	if len(still) > 0 {
		out = append(out, fmt.Sprintf("No difference from %s: %s.", versus, some(still)))
	}
	if len(open) > 0 {
		out = append(out, fmt.Sprintf("Inconclusive, more blocks may tell: %s.", some(open)))
	}
	return out
}

// largest returns the proof with the largest gain over all workloads, preferably of a variant
// that is not slower anywhere.
func largest(all []stats.Proof) (best stats.Proof, found bool) {
	for _, good := range []bool{true, false} {
		for _, p := range all {
			if len(p.Faster) > 0 && p.Good() == good && (!found || meanGain(p) > meanGain(best)) {
				best, found = p, true
			}
		}
		if found {
			break
		}
	}
	return best, found
}

func meanGain(p stats.Proof) float64 {
	sum := 0.0
	for _, r := range p.All {
		sum += math.Log(r.Gain())
	}
	return sum / float64(len(p.All))
}

// surpasses returns the largest gain of p among those that exceed best's gain in the same cell,
// or nil.
func surpasses(p, best stats.Proof) *stats.Row {
	var most *stats.Row
	for _, r := range p.Faster {
		for _, b := range best.All {
			if b.Workload == r.Workload && b.Pairs == r.Pairs && byGain(r, b) > 0 && (most == nil || byGain(r, most) > 0) {
				most = r
			}
		}
	}
	return most
}

// harms names the slower variants, each with its largest loss, and with the gains in which it
// surpasses the best variant. It leaves out the best variant, because that one's own sentence
// has its losses.
func harms(all []stats.Proof, best stats.Proof) string {
	var worst []*stats.Row
	despite := make(map[string]string)
	for _, p := range all {
		if rows := p.Losses(); p.Variant != best.Variant && len(rows) > 0 {
			worst = append(worst, slices.MinFunc(rows, byGain))
			if gain := surpasses(p, best); gain != nil {
				despite[p.Variant] = " despite " + Says(gain)
			}
		}
	}
	slices.SortStableFunc(worst, byGain)
	if len(worst) == 0 {
		return ""
	}
	var out []string
	for _, r := range worst[:min(len(worst), few)] {
		out = append(out, fmt.Sprintf("with %s: %s%s", r.Variant, Says(r), despite[r.Variant]))
	}
	if more := len(worst) - few; more > 0 {
		out = append(out, "with "+plural(more, "more variant"))
	}
	return "Worse " + strings.Join(out, "; ") + "."
}

func byGain(a, b *stats.Row) int { return cmp.Compare(a.Gain(), b.Gain()) }

// bestOfEach returns the best row of each workload, in order; worstOfEach returns the worst.
func bestOfEach(rows []*stats.Row) []*stats.Row {
	return ofEach(rows, func(a, b *stats.Row) int { return byGain(b, a) })
}

func worstOfEach(rows []*stats.Row) []*stats.Row {
	return ofEach(rows, byGain)
}

func ofEach(rows []*stats.Row, order func(a, b *stats.Row) int) []*stats.Row {
	var out []*stats.Row
	for _, r := range rows {
		i := slices.IndexFunc(out, func(o *stats.Row) bool { return o.Workload == r.Workload })
		switch {
		case i < 0:
			out = append(out, r)
		case order(r, out[i]) < 0:
			out[i] = r
		}
	}
	return out
}

func saysAll(rows []*stats.Row) string {
	var all []string
	for _, r := range rows[:min(len(rows), few)] {
		all = append(all, Says(r))
	}
	return strings.Join(all, ", ")
}

// some lists the first names, and counts the rest.
func some(names []string) string {
	if more := len(names) - few; more > 1 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:few], ", "), more)
	}
	return list(names)
}

// Keep returns the variant that a policy should apply: the one with the largest gain that is not
// slower anywhere and differs from its baseline only in its accelerators. It is empty if there
// is none.
func (m *Model) Keep() string {
	var all []stats.Proof
	for _, proofs := range m.compared(choice) {
		for _, p := range proofs {
			if _, err := m.exp.PolicyOf(p.Variant); err == nil && p.Good() {
				all = append(all, p)
			}
		}
	}
	slices.SortFunc(all, func(a, b stats.Proof) int { return strings.Compare(a.Variant, b.Variant) })
	best, _ := largest(all)
	return best.Variant
}

// Inconclusive reports whether more blocks could settle a comparison, because some variant has
// an inconclusive one.
func (m *Model) Inconclusive() bool {
	for _, proofs := range m.compared(choice) {
		if slices.ContainsFunc(proofs, func(p stats.Proof) bool {
			return slices.ContainsFunc(p.All, func(r *stats.Row) bool { return r.Versus.Verdict == stats.Inconclusive })
		}) {
			return true
		}
	}
	return false
}

// InCluster reports whether the result is from a cluster.
func (m *Model) InCluster() bool { return m.exp.Spec.Target.Kubernetes != nil }

// Imported reports whether other programs measured the result, so that there is no run to
// resume.
func (m *Model) Imported() bool { return m.exp.Spec.Target.Imported != nil }

// Expected is one expectation with its outcome and the comparisons that decided it.
type Expected struct {
	Claim   string
	Outcome stats.Outcome
	Why     string
}

func expectations(all []stats.Expected) []Expected {
	var out []Expected
	for _, x := range all {
		out = append(out, Expected{x.Claim, x.Outcome, whyExpected(x)})
	}
	return out
}

// whyExpected explains the outcome of an expectation.
func whyExpected(x stats.Expected) string {
	switch more := len(x.Decided) - few; {
	case len(x.Rows) == 0:
		return "its comparison was not measured"
	case len(x.Decided) == 0:
		return "no comparison for " + list(x.Missing)
	case more > 0:
		return fmt.Sprintf("%s, and %d more", saysAll(x.Decided), more)
	}
	return saysAll(x.Decided)
}

// Text returns the outcome as a sentence: "Expected that …: met; …."
func (e Expected) Text() string {
	return fmt.Sprintf("Expected that %s: %s; %s.", e.Claim, e.Outcome, e.Why)
}
