package stats

import (
	"slices"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/spec"
)

// Proof has the evidence for one variant: the comparisons of the primary metric of each workload and number of pairs.
type Proof struct {
	Variant, Baseline string
	// All has all rows that were compared, in the experiment's order, Faster and Slower
	// those with that verdict.
	All, Faster, Slower []*Row
	// Costs has the rows in which the variant is slower in other metrics that a workload
	// is judged by, such as its p99.
	Costs []*Row
	// Missing are cells without a comparison, in words.
	Missing []string
}

// Proof returns the evidence for a variant, whether or not it is faster in anything.
func (s *Summary) Proof(exp *spec.Experiment, v spec.Variant) Proof {
	p := Proof{Variant: v.Name, Baseline: exp.BaselineOf(v)}
	for _, w := range exp.Spec.Workloads {
		primary := s.Primary(w.Name)
		for _, pairs := range exp.PairsOf(w) {
			r := s.row(v.Name, w.Name, pairs, primary)
			if r == nil || r.Versus == nil {
				p.Missing = append(p.Missing, At(w.Name, pairs))
				continue
			}
			p.All = append(p.All, r)
			switch r.Versus.Verdict {
			case Faster:
				p.Faster = append(p.Faster, r)
			case Slower:
				p.Slower = append(p.Slower, r)
			}
			for _, metric := range Judged(exp, w) {
				if r := s.row(v.Name, w.Name, pairs, metric); metric != primary && r != nil && r.Versus != nil && r.Versus.Verdict == Slower {
					p.Costs = append(p.Costs, r)
				}
			}
		}
	}
	return p
}

// Losses returns the rows in which the variant is slower, in the primary metric or in
// another one.
func (p Proof) Losses() []*Row { return slices.Concat(p.Slower, p.Costs) }

// Good reports whether the variant is faster somewhere, and slower nowhere.
func (p Proof) Good() bool { return len(p.Faster) > 0 && len(p.Slower) == 0 }

// Best returns the largest proven gain, or the largest gain if none is proven. It is nil if
// nothing was compared.
func (p Proof) Best() *Row {
	rows := p.Faster
	if len(rows) == 0 {
		rows = p.All
	}
	var best *Row
	for _, r := range rows {
		if best == nil || r.Gain() > best.Gain() {
			best = r
		}
	}
	return best
}

// Primary returns the main metric of a workload, by which the rows of it are judged first. It is empty if the workload has no row.
func (s *Summary) Primary(workload string) string {
	for i := range s.Rows {
		if r := &s.Rows[i]; r.Workload == workload && r.Primary {
			return r.Metric
		}
	}
	return ""
}

func (s *Summary) row(variant, workload string, pairs int, metric string) *Row {
	for i := range s.Rows {
		if r := &s.Rows[i]; r.Variant == variant && r.Workload == workload && r.Pairs == pairs && r.Metric == metric {
			return r
		}
	}
	return nil
}

// Gain returns the ratio to the baseline, inverted if lower values are better: a gain above 1 is always an improvement.
func (r *Row) Gain() float64 {
	if metrics.Get(r.Metric).HigherIsBetter() {
		return r.Versus.Ratio
	}
	return 1 / r.Versus.Ratio
}
