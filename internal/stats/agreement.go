package stats

import (
	"fmt"

	"slipstream.dev/api/metrics"
	"slipstream.dev/api/v1alpha1"
)

// Agreement of a published figure with the measured one.
type Agreement string

// A published figure agrees with the measured one if it, or its interval, overlaps the measured interval,
// widened by the margin. Otherwise it differs. The two are not comparable if the experiment did
// not measure the same thing, or has no interval for it.
const (
	Agrees        Agreement = "agrees"
	Differs       Agreement = "differs"
	NotComparable Agreement = "not comparable"
)

// Published is a published figure, compared with the measured one.
type Published struct {
	Source   string `json:"source"`   // who published it, and where
	Figure   string `json:"figure"`   // where in the source to find it
	Variant  string `json:"variant"`  // name of the variant
	Workload string `json:"workload"` // name of the workload
	Pairs    int    `json:"pairs"`    // number of pairs
	Metric   string `json:"metric"`   // name of the metric
	// Versus is the variant that both ratios are relative to, absent if they are values.
	Versus string `json:"versus,omitempty"`
	// Unit of both; 1 for a ratio. If the published figure has another unit than the metric, it is that unit.
	Unit   string `json:"unit"`
	Theirs Figure `json:"theirs"` // the published figure
	// Ours is the measured figure, absent if there is none.
	Ours *Figure `json:"ours,omitempty"`
	// Times is the measured figure divided by the published one, or by the nearer end of a range;
	// absent if they are not comparable.
	Times   float64   `json:"times,omitempty"`
	Verdict Agreement `json:"verdict"` // agrees, differs or not comparable
	// Why is the reason if they are not comparable.
	Why  string `json:"why,omitempty"`
	Note string `json:"note,omitempty"` // remark on the published figure
}

// Figure is a published or measured figure.
type Figure struct {
	// Value is the value or ratio, absent for a range, which is an interval alone.
	Value float64 `json:"value,omitempty"`
	// Interval has a lower and an upper end; it is absent if none is known.
	Interval []float64 `json:"interval,omitempty"`
}

// ends are those of the interval, or the value twice.
func (f Figure) ends() (low, high float64) {
	if len(f.Interval) == 2 {
		return f.Interval[0], f.Interval[1]
	}
	return f.Value, f.Value
}

// published sets every published figure beside ours.
func (t *table) published(s *Summary) []Published {
	var out []Published
	for _, p := range t.exp.Spec.Published {
		b := Published{
			Source: p.Source, Figure: p.Figure, Variant: p.Variant, Workload: p.Workload, Pairs: p.Pairs, Metric: p.Metric,
			Versus: p.Versus, Unit: "1", Theirs: Figure{p.Ratio, p.Interval}, Note: p.Note,
		}
		if !p.IsRatio() {
			b.Theirs, b.Unit = theirValue(p)
		}
		var n int
		b.Ours, n, b.Why = t.ours(s, p)
		switch want := metrics.Get(p.Metric).Unit; {
		case b.Why != "":
		case !p.IsRatio() && b.Unit != want:
			b.Why = fmt.Sprintf("theirs is in %s, ours in %s", b.Unit, want)
		case n < 2:
			b.Why = "ours was measured once, and has no interval"
		}
		if b.Why != "" {
			b.Verdict = NotComparable
		} else {
			b.Verdict, b.Times = agreement(b.Theirs, *b.Ours, t.exp.Spec.Margin)
		}
		out = append(out, b)
	}
	return out
}

// theirValue is a published value in the unit of results, if there is such.
func theirValue(p v1alpha1.Published) (Figure, string) {
	amount, unit, times, _ := p.Value.Amount() // checked by Parse
	f := Figure{Value: amount}
	for _, end := range p.Interval {
		f.Interval = append(f.Interval, end*times)
	}
	return f, unit
}

// ours is what the experiment measured for a published figure, and in how many blocks, or why there is
// nothing. A ratio has the published baseline, even if the experiment compares with another one.
func (t *table) ours(s *Summary, p v1alpha1.Published) (*Figure, int, string) {
	at := At(p.Workload, p.Pairs)
	own := s.row(p.Variant, p.Workload, p.Pairs, p.Metric)
	switch {
	case own == nil || own.N == 0:
		return nil, 0, fmt.Sprintf("%s was not measured with %s", p.Variant, at)
	case !p.IsRatio():
		return &Figure{own.Mean, own.CI95[:]}, own.N, ""
	}
	if base := s.row(p.Versus, p.Workload, p.Pairs, p.Metric); base == nil || base.N == 0 {
		return nil, 0, fmt.Sprintf("theirs is relative to %s, which was not measured with %s", p.Versus, at)
	}
	r, ok := t.between(s, p.Variant, p.Versus, p.Workload, p.Pairs, p.Metric)
	if !ok {
		return nil, 0, fmt.Sprintf("there is no ratio to %s", p.Versus)
	}
	return &Figure{r.Versus.Ratio, r.Versus.CI95[:]}, r.Versus.N, ""
}

// agreement is the verdict on two figures in one unit, and the ratio of ours to theirs.
func agreement(theirs, ours Figure, margin float64) (Agreement, float64) {
	low, high := ours.ends()
	from, to := theirs.ends()
	at := theirs.Value
	if at == 0 { // the point of the range that is nearest to ours
		at = min(max(ours.Value, from), to)
	}
	verdict := Differs
	if from <= high*(1+margin) && to >= low/(1+margin) {
		verdict = Agrees
	}
	return verdict, ours.Value / at
}
