package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"gonum.org/v1/plot/vg"

	"slipstream.dev/internal/spec"
)

// Measures of every figure, in points.
const (
	figureWidth = 366.0 // two side by side on a desk, one on a phone
	small       = 9.0   // ticks
	normal      = 10.0  // labels
)

// look describes how a variant is drawn, in the same way in every figure.
type look struct {
	ink, shape int
	dash       []vg.Length
}

// look gives the baseline the colour of text and the host network a dashed grey, because readers
// compare the others with both.
func (m *Model) look(name string) look {
	v := m.variant(name)
	switch {
	case name == m.exp.Spec.Baseline:
		return look{ink: inkText}
	case m.native(v):
		return look{ink: inkMuted, shape: 3, dash: []vg.Length{4, 3}}
	}
	n := 0
	for _, o := range m.exp.Spec.Variants {
		if o.Name == name {
			break
		}
		if o.Name != m.exp.Spec.Baseline && !m.native(o) {
			n++
		}
	}
	return look{ink: inkSeries + n%seriesInks, shape: n % markers}
}

func (m *Model) drawFigures() []Figure {
	out := m.seriesFigures()
	for _, w := range m.exp.Spec.Workloads {
		tables := m.judgedTables(w.Name)
		if len(tables) == 0 {
			continue
		}
		for _, versus := range tables[0].Baselines {
			if f, ok := m.scalingFigure(tables[0], versus); ok {
				out = append(out, f)
			}
		}
	}
	for _, draw := range []func(spec.Workload, int) (Figure, bool){m.latencyFigure, m.cpuFigure} {
		for _, w := range m.exp.Spec.Workloads {
			for _, pairs := range smallestAndLargest(m.pairsOf(w)) {
				if f, ok := draw(w, pairs); ok {
					out = append(out, f)
				}
			}
		}
	}
	for _, w := range m.exp.Spec.Workloads {
		// With the most pairs, a NIC or a core is at its limit if it ever is.
		if all := m.pairsOf(w); len(all) > 0 {
			if f, ok := m.coresFigure(w, all[len(all)-1]); ok {
				out = append(out, f)
			}
			if f, ok := m.courseFigure(w, all[len(all)-1]); ok {
				out = append(out, f)
			}
		}
	}
	return out
}

// scalingFigure draws the ratios of variants to one of them against the number of pairs, unless
// they are in the figures of a series.
func (m *Model) scalingFigure(t Table, versus string) (Figure, bool) {
	c := chart{axis: m.axis(spec.AxisPairs), each: "Variant"}
	for _, p := range t.Pairs {
		c.xs = append(c.xs, float64(p))
	}
	for _, row := range t.Rows {
		if m.inSeries(t, row.Variant, versus) {
			continue
		}
		line := curve{name: row.Variant, look: m.look(row.Variant)}
		for i, l := range row.Cells {
			if l.drawable() && l.Versus == versus {
				line.points = append(line.points, ratioSample(float64(t.Pairs[i]), l.row.Versus, l.theirs))
			}
		}
		c.add(line)
	}
	return c.ratios(Figure{
		Section: SectionScaling,
		Name:    slug(t.Workload, t.Metric, "versus", versus),
		Title:   fmt.Sprintf("%s relative to %s", upper(t.Title), versus),
		Caption: fmt.Sprintf("Ratio to %s in the same block; %s is better.", versus, t.Better),
	}, versus), len(c.curves) > 0
}

// frame is the area between the axes of a plot.
type frame struct{ left, top, right, bottom float64 }

// tag names a curve at its end, so that the reader needs no legend.
type tag struct {
	from   point
	text   string
	look   look
	leader bool
}

// tags writes tags at the right of the frame, and moves them apart where they would overlap.
func (p *pen) tags(tags []tag, f frame, width float64) {
	const apart = normal + 2
	slices.SortStableFunc(tags, func(a, b tag) int { return cmp.Compare(a.from.y, b.from.y) })
	ys := make([]float64, len(tags))
	for i, t := range tags {
		ys[i] = max(t.from.y, f.top)
		if i > 0 {
			ys[i] = max(ys[i], ys[i-1]+apart)
		}
	}
	limit := f.bottom + apart
	for i := len(ys) - 1; i >= 0; i-- {
		ys[i] = min(ys[i], limit)
		limit = ys[i] - apart
	}
	for i, t := range tags {
		x := f.right + 18
		if t.leader {
			p.line(0.5, t.look.ink, []vg.Length{1, 2}, point{t.from.x + 5, t.from.y}, point{f.right + 3, ys[i]}, point{x - 12, ys[i]})
			p.marker(t.look.shape, point{x - 8, ys[i]}, 2.4, t.look.ink, true)
		}
		p.text(point{x, ys[i] + 3.2}, p.fit(t.text, normal, width), normal, t.look.ink, alignLeft)
	}
}

// niceStep returns the next 1, 2 or 5 × a power of ten.
func niceStep(least float64) float64 {
	unit := math.Pow(10, math.Floor(math.Log10(least)))
	for _, n := range []float64{1, 2, 5} {
		if n*unit >= least*(1-1e-9) {
			return n * unit
		}
	}
	return 10 * unit
}

func stepDecimals(step float64) int { return max(0, int(math.Ceil(-math.Log10(step)-1e-9))) }

func upper(s string) string {
	if s == "" {
		return s
	}
	return strings.ToUpper(s[:1]) + s[1:]
}

// ladder returns the nearest 1, 2 or 5 × a power of ten that is not below v, or not above it.
func ladder(v float64, above bool) float64 {
	up := niceStep(v)
	if above || up <= v*(1+1e-9) {
		return up
	}
	unit := math.Pow(10, math.Floor(math.Log10(v)))
	for _, n := range []float64{5, 2} {
		if n*unit <= v*(1+1e-9) {
			return n * unit
		}
	}
	return unit
}
