package stats

import (
	"cmp"
	"slices"
	"strings"

	"slipstream.dev/internal/spec"
)

// Series is one series of the experiment, for one workload and number of pairs.
type Series struct {
	Name string `json:"name"` // name of the series
	// Axis of the series: backends, policies, rate, price, size, connections or pairs.
	Axis string `json:"axis"`
	// Workload is the name of the workload; if workloads differ along the axis, the common part of their
	// names.
	Workload string `json:"workload"`
	Pairs    int    `json:"pairs,omitempty"` // number of pairs, absent if pairs are the axis
	Metric   string `json:"metric"`          // name of the workload's leading metric
	// Versus is the series that it is compared with.
	Versus string  `json:"versus,omitempty"`
	Points []Point `json:"points"` // in the order of their values
	// Crossovers are the values at which the verdict against the other series changes, in ascending order.
	Crossovers []Crossover `json:"crossovers,omitempty"`
}

// Point is one value on the axis of a series. The figures are in the row of its variant,
// workload and pairs.
type Point struct {
	// Value on the axis: a number, bit/s for a rate, the hourly price of all nodes, or bytes.
	Value    float64 `json:"value"`
	Variant  string  `json:"variant"`  // name of the variant
	Workload string  `json:"workload"` // name of the workload
	Pairs    int     `json:"pairs"`    // number of pairs
	// Versus is the ratio to the other series at the same value, absent if that has no such value. p is
	// adjusted by Holm's procedure over the points of the series.
	Versus *Versus `json:"versus,omitempty"`
	// Step is the ratio to the previous point, with p adjusted likewise.
	Step *Versus `json:"step,omitempty"`

	cell   *cell
	versus *cell // the other series' at the same value
}

// series returns the series of the experiment in its order, once for each traffic that has at least two points.
func (t *table) series() []Series {
	var out []Series
	for _, s := range t.exp.Spec.Series {
		for _, one := range t.seriesOver(s) {
			if len(one.Points) > 1 {
				one.Versus = s.Versus
				t.compareSeries(&one)
				out = append(out, one)
			}
		}
	}
	return out
}

// seriesOver groups the cells of a series by their traffic, and sorts them by value.
func (t *table) seriesOver(s spec.Series) []Series {
	var out []Series
	for _, c := range t.cells {
		x := t.exp.ValueOn(s.Axis, c.variant, c.workload, c.pairs)
		if x == 0 || !slices.Contains(s.Of, c.variant.Name) {
			continue
		}
		i := slices.IndexFunc(out, func(o Series) bool { return o.matches(c, x) })
		if i < 0 {
			i = len(out)
			out = append(out, Series{Name: s.Name, Axis: s.Axis, Pairs: c.pairs, Metric: Judged(t.exp, c.workload)[0]})
			if s.Axis == spec.AxisPairs {
				out[i].Pairs = 0
			}
		}
		out[i].Points = append(out[i].Points, Point{Value: x, Variant: c.variant.Name, Workload: c.workload.Name, Pairs: c.pairs, cell: c})
	}
	for i := range out {
		slices.SortStableFunc(out[i].Points, func(a, b Point) int { return cmp.Compare(a.Value, b.Value) })
		name := out[i].traffic()
		if slices.ContainsFunc(out[:i], func(o Series) bool { return o.Workload == name && o.Pairs == out[i].Pairs }) {
			name = out[i].Points[0].Workload // no other traffic has this name
		}
		out[i].Workload = name
	}
	return out
}

// matches reports whether a cell with the value x extends the series: it has the same traffic, and the series has
// no point at x yet.
func (s *Series) matches(c *cell, x float64) bool {
	return (s.Pairs == 0 || s.Pairs == c.pairs) && spec.Alike(s.Axis, s.Points[0].cell.workload, c.workload) &&
		!slices.ContainsFunc(s.Points, func(p Point) bool { return p.Value == x })
}

// traffic returns the common part of the workloads' names: stream for stream-64 and stream-1472, and c-1k for
// c1-1k and c8-1k.
func (s *Series) traffic() string {
	const digits, signs = "0123456789", "+/._-"
	first := s.Points[0].Workload
	head := first
	for _, p := range s.Points {
		for !strings.HasPrefix(p.Workload, head) {
			head = head[:len(head)-1]
		}
	}
	tail := first[len(head):]
	for _, p := range s.Points {
		for !strings.HasSuffix(p.Workload[len(head):], tail) {
			tail = tail[1:]
		}
	}
	if !slices.ContainsFunc(s.Points, func(p Point) bool { return p.Workload != first }) {
		return first
	}
	// Digits at the end of head, and the part of tail before a sign, belong to the values.
	name := strings.TrimRight(strings.TrimRight(head, digits), signs)
	if i := strings.IndexAny(tail, signs); i >= 0 {
		name += tail[i:]
	}
	return cmp.Or(strings.Trim(name, signs), s.Points[0].cell.workload.Kind())
}

// compareSeries compares the points of a series with those of the series that it is relative to, if any, and
// each point with the one before.
func (t *table) compareSeries(s *Series) {
	i := slices.IndexFunc(t.exp.Spec.Series, func(o spec.Series) bool { return o.Name == s.Versus })
	var other []Series
	if i >= 0 {
		other = t.seriesOver(t.exp.Spec.Series[i])
	}
	var versus, steps []*Row
	for i := range s.Points {
		p := &s.Points[i]
		if p.versus = cellAt(other, p); p.versus != nil {
			p.Versus = t.compareInto(p.cell, p.versus, s.Metric, &versus)
		}
		if i > 0 {
			p.Step = t.compareInto(p.cell, s.Points[i-1].cell, s.Metric, &steps)
		}
	}
	judge(versus, t.exp.Spec.Margin)
	judge(steps, t.exp.Spec.Margin)
	s.Crossovers = t.crossovers(s)
}

// cellAt returns the cell of another series with the value and the traffic of a point.
func cellAt(other []Series, p *Point) *cell {
	for _, o := range other {
		for _, q := range o.Points {
			if q.Value == p.Value && q.Workload == p.Workload && q.Pairs == p.Pairs {
				return q.cell
			}
		}
	}
	return nil
}

// compareInto compares two cells, and adds the comparison to a family, which is judged later. It returns nil if they
// have no ratio.
func (t *table) compareInto(c, base *cell, metric string, family *[]*Row) *Versus {
	e, _, _, err := t.ratio(c, base, metric)
	if err != nil {
		return nil
	}
	r := &Row{Metric: metric, Versus: versus(base.variant.Name, e)}
	*family = append(*family, r)
	return r.Versus
}
