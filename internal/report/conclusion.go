package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/words"
)

// conclude fills in the sentences of the answer: what the overlay costs, what helps, and what is worse in a mesh. A
// recommendation is the headline if there is one. If a single variant was measured in a mesh, the mesh is the answer.
func (m *Model) conclude() {
	costs, rest := m.conclusions()
	var mesh []string
	for _, one := range m.Meshes {
		mesh = append(mesh, one.Sentences...)
	}
	if len(mesh) > 0 && len(m.exp.Spec.Variants) == 1 {
		costs, rest = mesh, nil
	} else {
		rest = append(rest, mesh...)
	}
	m.conclusion = slices.Concat(costs, rest)
	m.Headline, m.More = m.conclusion[0], m.conclusion[1:]
	if len(rest) > 0 {
		m.Headline, m.More = rest[0], slices.Concat(costs, rest[1:])
	}
	if named := m.networkSentence(); named != "" {
		m.More = slices.Concat([]string{named}, m.More)
		m.conclusion = append(slices.Clone(m.conclusion), named)
	}
}

// networkSentence says which networks the compared clusters have. It is empty if none is known.
func (m *Model) networkSentence() string {
	var known []string
	for _, c := range m.Environment.Clusters {
		if network := c.Network(); c.Name != "" && network != "" {
			known = append(known, fmt.Sprintf("%s is %s", c.Name, network))
		}
	}
	if len(known) == 0 {
		return ""
	}
	return "The clusters: " + strings.Join(known, "; ") + "."
}

// conclusions returns the conclusions, one sentence each: the cost of the overlay, and then for each baseline the
// largest gain, what is slower, and what is inconclusive. It considers all workloads.
func (m *Model) conclusions() (costs, rest []string) {
	if m.Blocks == 0 {
		if len(m.Failures) > 0 {
			return nil, []string{"No trial gave a result: " + m.Failures[0].Error + "."}
		}
		return nil, []string{"No trial gave a result."}
	}
	costs = m.costSentences()
	for _, kind := range []comparison{podChoice, otherComparison} {
		if kind == otherComparison && len(rest) > 0 {
			break
		}
		compared := m.compared(kind)
		for _, versus := range m.baselines() {
			if all := compared[versus]; len(all) > 0 {
				rest = append(rest, gainSentences(versus, all)...)
			}
		}
	}
	switch {
	case len(rest) > 0:
		return costs, append(rest, m.programSentences()...)
	case len(costs) > 0:
		return append(costs, m.programSentences()...), nil
	}
	return nil, []string{m.firstResult()}
}

// firstResult returns the sentence about a result without comparisons.
func (m *Model) firstResult() string {
	t := m.Tables[0]
	for _, row := range t.Rows {
		for i, l := range row.Cells {
			if l.Missing == "" {
				return fmt.Sprintf("%s has a %s of %s at %s; nothing was compared with it.",
					row.Variant, t.Title, l.Estimate.With(t.Unit), pairs(t.Pairs[i]))
			}
		}
	}
	return "The workload " + t.Workload + " gave no result."
}

// costPart says which share of the host network's performance an overlay reaches in one metric.
type costPart struct{ variant, title, share string }

// costParts returns the shares of all overlays, in the primary metric of each workload, at the fewest pairs.
func (m *Model) costParts() (parts []costPart, at int) {
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
				parts = append(parts, costPart{c.Variant, c.What, c.Shares[0].With("%")})
			}
		}
	}
	return parts, at
}

// costSentences say what share of the host network's performance each overlay reaches, at the fewest pairs. There is
// one sentence for a single overlay, otherwise one for each workload.
func (m *Model) costSentences() []string {
	parts, at := m.costParts()
	if len(parts) == 0 {
		return nil
	}
	if !slices.ContainsFunc(parts, func(p costPart) bool { return p.variant != parts[0].variant }) {
		var all []string
		for i, p := range parts[:min(len(parts), few)] {
			of := "of its"
			if i == 0 {
				of = "of the host network's"
			}
			all = append(all, fmt.Sprintf("%s %s %s", p.share, of, p.title))
		}
		return []string{fmt.Sprintf("Here %s has %s, at %s.", m.overlayName(parts[0].variant), words.And(all), pairs(at))}
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
		parts = slices.DeleteFunc(parts, func(p costPart) bool { return p.title == title })
		out = append(out, fmt.Sprintf("Here the overlays have, of the host network's %s at %s: %s.", title, pairs(at), words.And(all[:min(len(all), few+1)])))
	}
	return out
}

func (m *Model) overlayName(variant string) string {
	switch p := m.exp.PathOf(m.variant(variant)); {
	case p.VXLAN != nil && !p.Local:
		return "VXLAN"
	case p.Pod != nil:
		return "the pods' network"
	}
	return variant
}

// compared returns the proofs of all variants that have comparisons of a kind, by baseline.
func (m *Model) compared(kind comparison) map[string][]stats.Proof {
	out := map[string][]stats.Proof{}
	for _, v := range m.exp.Spec.Variants {
		p := m.summary.Proof(m.exp, v)
		if p.All = slices.DeleteFunc(p.All, func(r *stats.Row) bool { return !m.hasComparison(r, kind) }); len(p.All) > 0 {
			out[p.Baseline] = append(out[p.Baseline], p)
		}
	}
	return out
}

// gainSentences describe all variants that are compared with one baseline.
func gainSentences(versus string, all []stats.Proof) []string {
	var out []string
	best, found := largest(all)
	if found {
		out = append(out, bestSentence(versus, best, all))
	} else {
		out = append(out, fmt.Sprintf("Nothing is proven faster than %s.", versus))
	}
	if losses := lossSentence(all, best); losses != "" {
		out = append(out, losses)
	}
	var same, inconclusive []string
	for _, p := range all {
		switch {
		case len(p.Faster)+len(p.Slower) > 0:
		case slices.ContainsFunc(p.All, func(r *stats.Row) bool { return r.Versus.Verdict != stats.Same }):
			inconclusive = append(inconclusive, p.Variant)
		default:
			same = append(same, p.Variant)
		}
	}
	if len(same) > 0 {
		out = append(out, fmt.Sprintf("No difference from %s: %s.", versus, listFew(same)))
	}
	if len(inconclusive) > 0 {
		out = append(out, fmt.Sprintf("Inconclusive: %s. More blocks may settle it.", listFew(inconclusive)))
	}
	return out
}

// bestSentence describes the best variant, with its losses.
func bestSentence(versus string, best stats.Proof, all []stats.Proof) string {
	losses := best.Losses()
	without := ""
	if len(losses) == 0 && slices.ContainsFunc(all, func(p stats.Proof) bool { return !p.Good() && surpasses(p, best) != nil }) {
		without = " without making anything worse"
	}
	text := fmt.Sprintf("Compared with %s, %s gains the most%s: ", versus, best.Variant, without)
	text += describeFew(firstOfEach(best.Faster, largestGainFirst))
	if len(losses) > 0 {
		text += ", at the cost of " + describeFew(firstOfEach(losses, compareGain))
	}
	return text + "."
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

// surpasses returns p's largest gain in the cells where p beats best, or nil.
func surpasses(p, best stats.Proof) *stats.Row {
	var most *stats.Row
	for _, r := range p.Faster {
		for _, b := range best.All {
			if b.Workload == r.Workload && b.Pairs == r.Pairs && compareGain(r, b) > 0 && (most == nil || compareGain(r, most) > 0) {
				most = r
			}
		}
	}
	return most
}

// lossSentence names the slower variants, each with its largest loss and, if it beats the best variant somewhere, its
// largest gain there. It leaves out the best variant: bestSentence names its losses.
func lossSentence(all []stats.Proof, best stats.Proof) string {
	var worst []*stats.Row
	despite := make(map[string]string)
	for _, p := range all {
		if rows := p.Losses(); p.Variant != best.Variant && len(rows) > 0 {
			worst = append(worst, slices.MinFunc(rows, compareGain))
			if gain := surpasses(p, best); gain != nil {
				despite[p.Variant] = " despite " + Describe(gain)
			}
		}
	}
	slices.SortStableFunc(worst, compareGain)
	if len(worst) == 0 {
		return ""
	}
	var out []string
	for _, r := range worst[:min(len(worst), few)] {
		out = append(out, fmt.Sprintf("with %s: %s%s", r.Variant, Describe(r), despite[r.Variant]))
	}
	if more := len(worst) - few; more > 0 {
		out = append(out, "with "+words.Count(more, "more variant"))
	}
	return "Worse " + strings.Join(out, "; ") + "."
}

func compareGain(a, b *stats.Row) int { return cmp.Compare(a.Gain(), b.Gain()) }

func largestGainFirst(a, b *stats.Row) int { return compareGain(b, a) }

// firstOfEach returns, for each workload, the row that comes first in an order.
func firstOfEach(rows []*stats.Row, order func(a, b *stats.Row) int) []*stats.Row {
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

// Recommended returns the variant that a policy should apply, or "" if there is none. It is the variant with the
// largest gain among those that are slower nowhere and differ from their baseline only in accelerators.
func (m *Model) Recommended() string {
	var all []stats.Proof
	for _, proofs := range m.compared(podChoice) {
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

// Inconclusive reports whether a comparison is inconclusive, so that more blocks could settle it.
func (m *Model) Inconclusive() bool {
	for _, proofs := range m.compared(podChoice) {
		if slices.ContainsFunc(proofs, func(p stats.Proof) bool {
			return slices.ContainsFunc(p.All, func(r *stats.Row) bool { return r.Versus.Verdict == stats.Inconclusive })
		}) {
			return true
		}
	}
	return false
}
