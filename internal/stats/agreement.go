package stats

import (
	"fmt"
	"math"

	"slipstream.dev/internal/spec"
)

// Agreement of a published figure with the measured one.
type Agreement string

// A published figure is compared with the measured interval, widened by the margin:
//   - It differs if it, or its whole interval, lies outside.
//   - Otherwise, ours is too imprecise to say that it agrees if the measured interval is wider than the experiment's precision,
//     or if it contains a ratio of 1 although the published figure is an effect.
//   - Otherwise it agrees.
//   - The two are not comparable if the experiment did not measure the same thing, or has no interval for it.
const (
	Agrees        Agreement = "agrees"
	Differs       Agreement = "differs"
	TooImprecise  Agreement = "too imprecise"
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
	Unit   string `json:"unit"`   // unit of both; 1 for a ratio
	Theirs Figure `json:"theirs"` // the published figure, converted to that unit
	// OneWay is true if a latency was published for one way; theirs is twice that.
	OneWay bool `json:"one_way,omitempty"`
	// Ours is the measured figure, absent if there is none. A value is the geometric mean of the blocks, with an interval
	// on logs, so neither end is below 0.
	Ours *Figure `json:"ours,omitempty"`
	// Times is the measured figure divided by the published one, or by the nearer end of a range;
	// absent if they are not comparable.
	Times   float64   `json:"times,omitempty"`
	Verdict Agreement `json:"verdict"` // agrees, differs, too imprecise or not comparable
	// Why is the reason if they are not comparable, or ours is too imprecise.
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

// ends returns the ends of the interval, or the value twice if there is none.
func (f Figure) ends() (low, high float64) {
	if len(f.Interval) == 2 {
		return f.Interval[0], f.Interval[1]
	}
	return f.Value, f.Value
}

// published compares every published figure with ours, except shares of cores, which are not compared.
func (t *table) published(s *Summary) []Published {
	var out []Published
	for _, p := range t.exp.Spec.Published {
		if len(p.Cores) > 0 {
			continue
		}
		b := Published{
			Source: p.Source, Figure: p.Figure, Variant: p.Variant, Workload: p.Workload, Pairs: p.Pairs, Metric: p.Metric,
			Versus: p.Versus, Unit: "1", Theirs: Figure{p.Ratio, p.Interval}, OneWay: p.OneWay, Note: p.Note,
		}
		if !p.IsRatio() {
			b.Theirs, b.Unit = theirValue(p)
		}
		var n int
		if b.Ours, n, b.Why = t.ours(s, p); b.Why == "" && n < 2 {
			b.Why = "ours was measured once, and has no interval"
		}
		if b.Why != "" {
			b.Verdict = NotComparable
		} else {
			b.judge(t.exp.Spec)
		}
		out = append(out, b)
	}
	return out
}

// theirValue returns a published value in the unit of results. A latency is that of a round trip.
func theirValue(p spec.Published) (Figure, string) {
	amount, unit, times, _ := p.Value.Amount() // checked by Parse
	if p.OneWay {
		amount, times = 2*amount, 2*times
	}
	f := Figure{Value: amount}
	for _, end := range p.Interval {
		f.Interval = append(f.Interval, end*times)
	}
	return f, unit
}

// ours returns the measured figure for a published one, and the number of its blocks, or the reason why there is none. A
// ratio is relative to the published baseline, even if the experiment compares with another one.
func (t *table) ours(s *Summary, p spec.Published) (*Figure, int, string) {
	at := At(p.Workload, p.Pairs)
	own := s.row(p.Variant, p.Workload, p.Pairs, p.Metric)
	if own == nil || own.N == 0 {
		return nil, 0, fmt.Sprintf("%s was not measured with %s", p.Variant, at)
	}
	if !p.IsRatio() {
		e, ok := t.logs(t.byKey[key{p.Variant, p.Workload, p.Pairs}], p.Metric)
		if !ok {
			return nil, 0, fmt.Sprintf("some block of %s with %s has the value 0", p.Variant, at)
		}
		v := versus("", e)
		return &Figure{v.Ratio, v.CI95[:]}, v.N, ""
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

// judge compares their figure with ours. Both are in the same unit.
func (b *Published) judge(s spec.Spec) {
	low, high := b.Ours.ends()
	from, to := b.Theirs.ends()
	at := b.Theirs.Value
	if at == 0 { // the point of the range that is nearest to ours
		at = min(max(b.Ours.Value, from), to)
	}
	b.Times = b.Ours.Value / at
	none := 1 + s.Margin
	effect := b.Versus != "" && math.Max(at, 1/at) > none
	switch {
	// If theirs is outside of our interval, they differ, however wide the interval is.
	case from > high*none || to < low/none:
		b.Verdict = Differs
	case high > s.Precision*low:
		b.Verdict, b.Why = TooImprecise, fmt.Sprintf("the ends of our interval differ by a factor of more than %g", s.Precision)
	case effect && low <= 1 && high >= 1:
		b.Verdict, b.Why = TooImprecise, "our interval includes both theirs and no effect"
	default:
		b.Verdict = Agrees
	}
}
