package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"gonum.org/v1/plot/vg"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/stats"
)

// Measures of every figure, in points.
const (
	figureWidth = 366.0 // two side by side on a desk, one on a phone
	small       = 9.0   // ticks
	normal      = 10.0  // labels
)

// look is how a variant is drawn, the same in every figure.
type look struct {
	ink, shape int
	dash       []vg.Length
}

// look gives the baseline the colour of text and the host network a dashed grey,
// since both are what the others are read against.
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
	var out []Figure
	for _, w := range m.exp.Spec.Workloads {
		tables := m.judgedTables(w.Name)
		if len(tables) == 0 {
			continue
		}
		for _, versus := range tables[0].Baselines {
			out = append(out, m.scalingFigure(tables[0], versus))
		}
	}
	for _, draw := range []func(v1alpha1.Workload, int) (Figure, bool){m.latencyFigure, m.cpuFigure} {
		for _, w := range m.exp.Spec.Workloads {
			for _, pairs := range smallestAndLargest(m.pairsOf(w)) {
				if f, ok := draw(w, pairs); ok {
					out = append(out, f)
				}
			}
		}
	}
	return out
}

// curve is one variant's line in a plot.
type curve struct {
	variant string
	look    look
	points  []sample
}

// sample is one value with its interval, and what others have published in its place; x is
// the place on the x axis.
type sample struct {
	x, y   float64
	ci     interval
	filled bool
	theirs []float64
}

// scalingFigure sets every variant's ratio against the number of pairs.
func (m *Model) scalingFigure(t Table, versus string) Figure {
	var curves []curve
	top, bound, published := 1.0, 1.0, 0.0
	data := Data{Columns: []string{"Variant"}}
	for _, p := range t.Pairs {
		data.Columns = append(data.Columns, pairs(p))
	}
	for _, row := range t.Rows {
		c := curve{variant: row.Variant, look: m.look(row.Variant)}
		numbers := []string{row.Variant}
		for i, l := range row.Cells {
			if !l.drawable() || l.Versus != versus {
				numbers = append(numbers, "–")
				continue
			}
			ratio := l.spread()
			c.points = append(c.points, sample{float64(i), ratio.at, ratio.ci,
				l.Verdict == stats.Faster || l.Verdict == stats.Slower, ratio.theirs})
			top = max(top, ratio.at)
			if ratio.ci.known() {
				bound = max(bound, ratio.ci.hi)
			}
			text := strings.TrimSpace(l.Ratio.String() + " " + string(l.Verdict))
			if len(l.theirs) > 0 {
				published = max(published, slices.Max(l.theirs))
				text += ", published " + ratios(l.theirs)
			}
			numbers = append(numbers, text)
		}
		if len(c.points) > 0 {
			curves = append(curves, c)
			data.Rows = append(data.Rows, numbers)
		}
	}
	// Few blocks give intervals that would flatten everything; they are cut.
	bound = max(min(bound, 1.6*top), published) * 1.01
	step := niceStep(bound / 7)
	most := math.Ceil(bound/step-1e-9) * step
	f := Figure{
		Section: SectionScaling,
		Name:    slug(t.Workload, t.Metric, "versus", versus),
		Title:   fmt.Sprintf("%s relative to %s", upper(t.Title), versus),
		Caption: fmt.Sprintf("Ratio to %s in the same block; %s is better. Bars are 95 %% intervals. A filled mark is faster or slower, a hollow one is the same or inconclusive.",
			versus, t.Better),
		Alt: fmt.Sprintf("%s relative to %s at %s: %s.", upper(t.Title), versus,
			listPairs(t.Pairs), list(ends(curves, t.Pairs))),
		Data:   data,
		width:  figureWidth,
		height: max(260, 70+12*float64(len(curves)+1)),
	}
	if published > 0 {
		f.Caption += " A ring is a published figure."
	}
	f.draw = func(p *pen) { p.scaling(curves, f, versus, t.Pairs, step, most) }
	return f
}

// scaling draws the ratios of variants to one that they are compared with, from 0 to most.
func (p *pen) scaling(curves []curve, f Figure, versus string, pairCounts []int, step, most float64) {
	labels := 0.0
	for _, c := range curves {
		labels = max(labels, p.width(c.variant, normal))
	}
	labels = min(max(labels, p.width(versus, normal)), 0.2*f.width)
	area := frame{left: 40, top: 26, right: f.width - labels - 30, bottom: f.height - 36}
	slot := (area.right - area.left) / float64(len(pairCounts))
	x := func(i float64) float64 { return area.left + (i+0.5)*slot }
	y := func(v float64) float64 { return area.bottom - (area.bottom-area.top)*v/most }
	p.text(point{0, 12}, "ratio to "+versus, small, inkMuted, alignLeft)
	for v := 0.0; v <= most+step/2; v += step {
		p.line(0.6, inkGrid, nil, point{area.left, y(v)}, point{area.right, y(v)})
		p.text(point{area.left - 6, y(v) + 3}, fixed(v, stepDecimals(step)), small, inkMuted, alignRight)
	}
	p.line(1.2, inkText, nil, point{area.left, y(1)}, point{area.right, y(1)})
	for i, n := range pairCounts {
		p.text(point{x(float64(i)), area.bottom + 14}, pairs(n), small, inkMuted, alignCentre)
	}
	tags := []tag{{point{area.right, y(1)}, versus, look{ink: inkText}, false}}
	dodge := min(9, 0.6*slot/float64(len(curves)))
	for i, c := range curves {
		off := (float64(i) - float64(len(curves)-1)/2) * dodge
		var line []point
		for _, s := range c.points {
			line = append(line, point{x(s.x) + off, y(s.y)})
		}
		p.line(1.4, c.look.ink, c.look.dash, line...)
		for j, s := range c.points {
			if q := line[j]; s.ci.known() {
				p.line(1.2, c.look.ink, nil, point{q.x, y(max(s.ci.lo, 0))}, point{q.x, y(min(s.ci.hi, most))})
			}
		}
		for j, s := range c.points {
			p.marker(c.look.shape, line[j], 3, c.look.ink, s.filled)
			for _, v := range s.theirs {
				p.ring(point{line[j].x, y(v)}, 4.2, c.look.ink)
			}
		}
		tags = append(tags, tag{line[len(line)-1], c.variant, c.look, true})
	}
	p.tags(tags, area, labels)
}

// ends words the last point of each curve.
func ends(curves []curve, pairCounts []int) []string {
	var out []string
	for _, c := range curves {
		s := c.points[len(c.points)-1]
		out = append(out, fmt.Sprintf("%s %s at %s", c.variant, estimate(s.y, s.ci, 2), pairs(pairCounts[int(s.x)])))
	}
	return out
}

// frame is the area between a plot's axes.
type frame struct{ left, top, right, bottom float64 }

// tag names a curve at its end, which spares the reader a legend.
type tag struct {
	from   point
	text   string
	look   look
	leader bool
}

// tags stand right of the frame, moved apart where they would overlap.
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

// niceStep is the next 1, 2 or 5 × a power of ten.
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

func listPairs(n []int) string {
	var words []string
	for _, p := range n {
		words = append(words, fmt.Sprint(p))
	}
	if len(n) == 1 {
		return pairs(n[0])
	}
	return list(words) + " pairs"
}

// ladder is the nearest 1, 2 or 5 × a power of ten at or above, or at or below.
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
