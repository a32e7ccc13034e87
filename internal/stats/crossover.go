package stats

import (
	"math"
	"slices"

	"slipstream.dev/internal/stats/estimate"
)

// Crossover is the value on the axis at which the verdict on one series against another changes. It is
// interpolated between two measured values.
type Crossover struct {
	From Verdict `json:"from"` // verdict below it: faster, slower or same
	To   Verdict `json:"to"`   // verdict above it
	// Value on the axis at which the ratio crosses 1, or, to or from same, the margin.
	Value float64    `json:"value"`
	CI95  [2]float64 `json:"ci95"` // 95% interval of the value
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
				if value, ci, ok := t.relation(s.Points[from:i+1], s.Metric).Crossing(level); ok {
					out = append(out, Crossover{From: below.Verdict, To: p.Versus.Verdict, Value: value, CI95: ci})
				}
			}
		}
		from = i
	}
	return out
}

// level returns the log ratio that is crossed between two points: log 1 between faster and slower, and the
// log of the margin between same and either. It returns false if the interval of a point includes the margin,
// because it is then unknown on which side of the level the point lies.
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

// relation returns the log ratio along the points, of the blocks that have all of them.
func (t *table) relation(points []Point, metric string) estimate.Relation {
	var blocks []int
	for b := 1; b <= t.blocks; b++ {
		if !slices.ContainsFunc(points, func(p Point) bool { return p.Versus != nil && !p.hasRatio(b, metric) }) {
			blocks = append(blocks, b)
		}
	}
	r := estimate.Relation{Pilot: t.pilotOf(blocks)}
	for _, p := range points {
		if p.Versus == nil {
			continue
		}
		ratios := make([]float64, len(blocks))
		for i, b := range blocks {
			x, _ := p.cell.value(b, metric)
			y, _ := p.versus.value(b, metric)
			ratios[i] = math.Log(x) - math.Log(y)
		}
		r.At, r.Ratios = append(r.At, p.Value), append(r.Ratios, ratios)
		r.Apart = append(r.Apart, periodsApart(p.cell, p.versus, blocks))
	}
	return r
}

// hasRatio reports whether a block has the point's ratio.
func (p Point) hasRatio(block int, metric string) bool {
	_, own := p.cell.value(block, metric)
	_, other := p.versus.value(block, metric)
	return own && other
}
