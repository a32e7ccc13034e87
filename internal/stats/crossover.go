package stats

import (
	"math"
	"slices"
)

// Crossover is the value on the axis at which the verdict on one series against another changes. It is
// interpolated between two measured values.
type Crossover struct {
	From Verdict `json:"from"` // verdict below it: faster, slower or same
	To   Verdict `json:"to"`   // verdict above it
	// Value on the axis at which the ratio crosses 1, or, to or from same, the margin.
	Value float64    `json:"value"`
	CI95  [2]float64 `json:"ci95"` // 95 % interval of the value
}

// crossovers returns the crossovers of a series: one between two points with different verdicts, if all
// points between them are inconclusive. There are none if the runs of two variants are not paired.
func (t *table) crossovers(s *Series) []Crossover {
	if !t.paired() {
		return nil
	}
	var out []Crossover
	from := -1
	for i, p := range s.Points {
		if p.Versus == nil || p.Versus.Verdict == Inconclusive {
			continue
		}
		if from >= 0 {
			below := s.Points[from].Versus
			level, ok := t.level(below, p.Versus)
			if !ok {
				continue // a later point may be clear
			}
			if below.Verdict != p.Versus.Verdict {
				if c, ok := t.relation(s.Points[from:i+1], s.Metric).crossing(level); ok {
					c.From, c.To = below.Verdict, p.Versus.Verdict
					out = append(out, c)
				}
			}
		}
		from = i
	}
	return out
}

// level returns the log ratio that is crossed between two points: log 1 between faster and slower, and the
// log of the margin between same and either. It is false if the interval of a point includes the margin, so
// that the side of the level is unknown.
func (t *table) level(a, b *Versus) (level float64, ok bool) {
	margin := 1 + t.exp.Spec.Margin
	decided := func(v *Versus) bool { return v.Verdict == Same || v.CI95[0] > margin || v.CI95[1] < 1/margin }
	if a.Verdict != Same && b.Verdict != Same {
		return 0, a.Verdict != b.Verdict || decided(b) || !decided(a)
	}
	level = math.Log(margin)
	if min(a.Ratio, b.Ratio) < 1/margin {
		level = -level
	}
	return level, decided(a) && decided(b)
}

// relation is the log ratio of two series along the axis. In every block, straight lines connect the points
// over the logarithm of the axis.
type relation struct {
	logs          []float64 // of the values of the points
	blocks        []int     // that have all points
	ratios, apart [][]float64
	within        func(blocks []int, ratios, apart []float64) estimate
}

func (t *table) relation(points []Point, metric string) relation {
	r := relation{within: t.withinBlocks}
	for b := 1; b <= t.blocks; b++ {
		if !slices.ContainsFunc(points, func(p Point) bool { return p.Versus != nil && !p.hasRatio(b, metric) }) {
			r.blocks = append(r.blocks, b)
		}
	}
	for _, p := range points {
		if p.Versus == nil {
			continue
		}
		ratios := make([]float64, len(r.blocks))
		for i, b := range r.blocks {
			x, _ := p.cell.value(b, metric)
			y, _ := p.versus.value(b, metric)
			ratios[i] = math.Log(x) - math.Log(y)
		}
		r.logs, r.ratios = append(r.logs, math.Log(p.Value)), append(r.ratios, ratios)
		r.apart = append(r.apart, periodsApart(p.cell, p.versus, r.blocks))
	}
	return r
}

// hasRatio reports whether a block has the point's ratio.
func (p Point) hasRatio(block int, metric string) bool {
	_, own := p.cell.value(block, metric)
	_, other := p.versus.value(block, metric)
	return own && other
}

// at estimates the log ratio at a place between points: 1.5 is in the middle between the second and the third
// point.
func (r relation) at(place float64) estimate {
	i := min(int(place), len(r.ratios)-2)
	between := func(of [][]float64) []float64 {
		out := make([]float64, len(r.blocks))
		for b := range out {
			out[b] = of[i][b] + (place-float64(i))*(of[i+1][b]-of[i][b])
		}
		return out
	}
	return r.within(r.blocks, between(r.ratios), between(r.apart))
}

// value returns the value on the axis for a place between points.
func (r relation) value(place float64) float64 {
	i := min(int(place), len(r.logs)-2)
	return math.Exp(r.logs[i] + (place-float64(i))*(r.logs[i+1]-r.logs[i]))
}

// crossing returns the place at which the log ratio crosses a level. The first point and the last lie on
// different sides of it. At each place, a t-test of the blocks' log ratios tests whether the log ratio equals
// the level there. The interval consists of the places where the test does not reject that (Fieller, "Some
// problems in interval estimation", Journal of the Royal Statistical Society B 16, 1954), so it has the same
// coverage as the interval of a ratio. If there are several crossings, crossing returns the last one, and the
// interval contains all of them.
func (r relation) crossing(level float64) (c Crossover, ok bool) {
	if len(r.blocks) < 2 {
		return c, false
	}
	last := float64(len(r.ratios) - 1)
	above := func(place float64) bool { return r.at(place).mean > level }
	crossing, ok := change(last, 0, above)
	if !ok {
		return c, false
	}
	rejected := func(place float64) bool {
		e := r.at(place)
		e.mean -= level
		return e.p() < alpha
	}
	c.Value, c.CI95 = r.value(crossing), [2]float64{r.value(0), r.value(last)}
	for i, end := range []float64{0, last} {
		if rejected(end) {
			edge, _ := change(end, crossing, rejected)
			c.CI95[i] = r.value(edge)
		}
	}
	return c, true
}

// change returns the first place between from and to at which a condition changes.
func change(from, to float64, condition func(float64) bool) (float64, bool) {
	const steps, halvings = 64, 24
	first, before := condition(from), from
	for i := 1; i <= steps; i++ {
		place := from + (to-from)*float64(i)/steps
		if condition(place) == first {
			before = place
			continue
		}
		for range halvings {
			if middle := (before + place) / 2; condition(middle) == first {
				before = middle
			} else {
				place = middle
			}
		}
		return place, true
	}
	return to, false
}
