package stats

import (
	"cmp"
	"math"
	"slices"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/spec"
)

// Outcome of an expectation, or of one of its comparisons.
type Outcome string

// An expectation is met if all its comparisons are, failed if any is, and inconclusive
// otherwise.
const (
	OutcomeMet          Outcome = "met"
	OutcomeFailed       Outcome = "failed"
	OutcomeInconclusive Outcome = "inconclusive"
)

// Expected is the outcome of one expectation.
type Expected struct {
	// Claim is the expectation in words.
	Claim   string  `json:"claim"`
	Outcome Outcome `json:"outcome"` // met, failed or inconclusive
	// Rows are the comparisons of the two variants that the claim is about.
	Rows []Row `json:"rows"`
	// Decided has the rows that decided the outcome, the farthest from the claim first.
	// Missing has the comparisons without data, in words.
	Decided []*Row   `json:"-"`
	Missing []string `json:"-"`
}

// expected judges every expectation. It takes a comparison from the summary if that has it, so
// that both agree, and judges any other comparison separately.
func (t *table) expected(s *Summary) []Expected {
	var out []Expected
	for _, x := range t.exp.Spec.Expect {
		e := Expected{Claim: x.String(), Outcome: OutcomeMet, Rows: []Row{}}
		for _, w := range t.exp.Spec.Workloads {
			if x.Workload != "" && x.Workload != w.Name {
				continue
			}
			metric := x.Metric
			if metric == "" {
				metric = t.primary(w)
			} else if !w.Gives(metric) {
				continue
			}
			for _, pairs := range t.exp.PairsOf(w) {
				r, ok := t.between(s, x.Variant, x.Than(), w.Name, pairs, metric)
				if !ok {
					e.Outcome = worse(e.Outcome, OutcomeInconclusive)
					e.Missing = append(e.Missing, At(w.Name, pairs))
					continue
				}
				e.Outcome = worse(e.Outcome, r.meets(x, t.exp.Spec.Margin))
				e.Rows = append(e.Rows, r)
			}
		}
		if len(e.Rows) == 0 {
			e.Outcome = OutcomeInconclusive
		}
		e.decide(x, t.exp.Spec.Margin)
		out = append(out, e)
	}
	return out
}

// decide picks the rows that decided the outcome, for example the ones that failed.
func (e *Expected) decide(x spec.Expectation, margin float64) {
	for i := range e.Rows {
		if r := &e.Rows[i]; r.meets(x, margin) == e.Outcome {
			e.Decided = append(e.Decided, r)
		}
	}
	off := func(r *Row) float64 {
		loss := -math.Log(r.Gain())
		if x.Same != "" {
			return math.Abs(loss)
		}
		return loss
	}
	slices.SortStableFunc(e.Decided, func(a, b *Row) int { return cmp.Compare(off(b), off(a)) })
}

// between compares any two variants in one cell, whether the experiment compares them or not.
func (t *table) between(s *Summary, variant, than, workload string, pairs int, metric string) (Row, bool) {
	if r := s.row(variant, workload, pairs, metric); r != nil && r.Versus != nil && r.Versus.Baseline == than {
		return *r, true
	}
	c, base := t.byKey[key{variant, workload, pairs}], t.byKey[key{than, workload, pairs}]
	if c == nil || base == nil {
		return Row{}, false
	}
	e, _, _, err := t.ratio(c, base, metric)
	if err != nil {
		return Row{}, false
	}
	r := t.row(c, metric)
	r.Versus = versus(base.variant.Name, e)
	judge([]*Row{&r}, t.exp.Spec.Margin)
	return r, true
}

// meets returns the outcome of one comparison.
func (r *Row) meets(x spec.Expectation, margin float64) Outcome {
	v := r.Versus
	switch {
	case v.Verdict == Slower:
		return OutcomeFailed
	case x.NotSlower != "":
		// The worse end of the interval is within the margin. The expectation requires
		// no more.
		worst := 1 / v.CI95[1]
		if metrics.Get(r.Metric).HigherIsBetter() {
			worst = v.CI95[0]
		}
		if v.N > 1 && worst >= 1/(1+margin) {
			return OutcomeMet
		}
		return OutcomeInconclusive
	case v.Verdict == Inconclusive:
		return OutcomeInconclusive
	case (v.Verdict == Faster) == (x.Faster != ""):
		return OutcomeMet
	}
	return OutcomeFailed
}

func worse(a, b Outcome) Outcome {
	for _, o := range []Outcome{OutcomeFailed, OutcomeInconclusive} {
		if a == o || b == o {
			return o
		}
	}
	return OutcomeMet
}
