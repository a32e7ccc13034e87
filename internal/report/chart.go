package report

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"slipstream.dev/internal/stats"
)

// chart is a figure of lines over an axis. The axis is logarithmic.
type chart struct {
	axis   axis
	xs     []float64 // values of the axis, rising
	curves []curve
	each   string // what a line stands for, for the table of the numbers
	// heading is the title of the other axis. If that shows ratios, versus names what they are
	// relative to.
	heading, versus string
	y               ruler
}

// curve is one line of a chart.
type curve struct {
	name   string
	look   look
	points []sample
}

// sample is a value with its interval, and published values for the same place. x is on the axis.
type sample struct {
	x, y   float64
	ci     interval
	filled bool
	theirs []float64
	text   string // the same in words
}

// ratioSample returns a comparison as a sample at a value of the axis.
func ratioSample(x float64, v *stats.Versus, theirs []float64) sample {
	s := sample{x: x, y: v.Ratio, ci: of(v.CI95, v.N), filled: v.Verdict == stats.Faster || v.Verdict == stats.Slower, theirs: theirs}
	s.text = strings.TrimSpace(estimate(s.y, s.ci, 2).String() + " " + string(v.Verdict))
	if len(theirs) > 0 {
		s.text += ", published " + ratios(theirs)
	}
	return s
}

// add adds a line, unless it has no points.
func (c *chart) add(line curve) {
	if len(line.points) == 0 {
		return
	}
	c.curves = append(c.curves, line)
	for _, s := range line.points {
		if !slices.Contains(c.xs, s.x) {
			c.xs = append(c.xs, s.x)
		}
	}
	slices.Sort(c.xs)
}

// ratios returns the figure of a chart of ratios.
func (c chart) ratios(f Figure, versus string) Figure {
	top, bound, published := 1.0, 1.0, 0.0
	for _, line := range c.curves {
		for _, s := range line.points {
			top = max(top, s.y)
			if s.ci.known() {
				bound = max(bound, s.ci.hi)
			}
			for _, x := range s.theirs {
				published = max(published, x)
			}
		}
	}
	// A few blocks give intervals that would flatten everything, so long intervals are cut off.
	c.y = linear(max(min(bound, 1.6*top), published) * 1.01)
	c.heading, c.versus = "ratio to "+versus, versus
	f.Caption += " Bars are 95 % intervals. A filled mark is faster or slower, a hollow one is the same or inconclusive."
	if published > 0 {
		f.Caption += " A ring is a published figure."
	}
	return c.figure(f)
}

// values returns the figure of a chart of values in a unit. If they span several orders of magnitude,
// their axis is logarithmic too.
func (c chart) values(f Figure, unit string) Figure {
	low, high, bound := math.Inf(1), 0.0, 0.0
	for _, line := range c.curves {
		for _, s := range line.points {
			low, high, bound = min(low, s.y), max(high, s.y), max(bound, s.y)
			if s.ci.known() {
				bound = max(bound, s.ci.hi)
			}
		}
	}
	c.y = linear(min(bound, 1.6*high) * 1.01)
	if low > 0 && high/low > 20 {
		c.y = logarithmic(low, high)
	}
	c.heading = unit
	f.Caption += " Bars are 95 % intervals of the means."
	return c.figure(f)
}

// figure fills in what all charts have in common.
func (c chart) figure(f Figure) Figure {
	f.Data = Data{Columns: []string{c.each}}
	for _, x := range c.xs {
		f.Data.Columns = append(f.Data.Columns, c.axis.at(x))
	}
	var ends []string
	for _, line := range c.curves {
		row := []string{line.name}
		for _, x := range c.xs {
			text := "–"
			for _, s := range line.points {
				if s.x == x {
					text = s.text
				}
			}
			row = append(row, text)
		}
		f.Data.Rows = append(f.Data.Rows, row)
		last := line.points[len(line.points)-1]
		ends = append(ends, fmt.Sprintf("%s %s at %s", line.name, last.text, c.axis.at(last.x)))
	}
	f.Alt = fmt.Sprintf("%s at %s: %s.", f.Title, c.axis.list(c.xs), list(ends))
	f.width, f.height = figureWidth, max(260, 70+12*float64(len(c.curves)+1))
	f.draw = func(p *pen) { p.chart(c, f.width, f.height) }
	return f
}

// ruler is the axis of values, from low to high.
type ruler struct {
	low, high float64
	log       bool
	ticks     []float64
	text      func(float64) string
}

func linear(bound float64) ruler {
	step := niceStep(bound / 7)
	r := ruler{high: math.Ceil(bound/step-1e-9) * step, text: func(v float64) string { return fixed(v, stepDecimals(step)) }}
	for v := 0.0; v <= r.high+step/2; v += step {
		r.ticks = append(r.ticks, v)
	}
	return r
}

func logarithmic(low, high float64) ruler {
	r := ruler{low: ladder(low, false), high: ladder(high, true), log: true, text: func(v float64) string { return fixed(v, stepDecimals(v)) }}
	for v := r.low; v <= r.high*(1+1e-9); v = niceStep(v * 1.01) {
		r.ticks = append(r.ticks, v)
	}
	if len(r.ticks) > 8 {
		r.ticks = slices.DeleteFunc(r.ticks, func(v float64) bool {
			power := math.Log10(v)
			return math.Abs(power-math.Round(power)) > 1e-9
		})
	}
	return r
}

// share returns the share of the axis below a value.
func (r ruler) share(v float64) float64 {
	v = min(max(v, r.low), r.high)
	if r.log {
		return math.Log(v/r.low) / math.Log(r.high/r.low)
	}
	return (v - r.low) / (r.high - r.low)
}

// chart draws the lines of a chart, each with its name at its end.
func (p *pen) chart(c chart, width, height float64) {
	labels := p.width(c.versus, normal)
	for _, line := range c.curves {
		labels = max(labels, p.width(line.name, normal))
	}
	labels = min(labels, 0.2*width)
	area := frame{left: 40, top: 26, right: width - labels - 30, bottom: height - 36}
	x, gap := c.places(area)
	y := func(v float64) float64 { return area.bottom - (area.bottom-area.top)*c.y.share(v) }
	p.text(point{0, 12}, c.heading, small, inkMuted, alignLeft)
	for _, v := range c.y.ticks {
		p.line(0.6, inkGrid, nil, point{area.left, y(v)}, point{area.right, y(v)})
		p.text(point{area.left - 6, y(v) + 3}, c.y.text(v), small, inkMuted, alignRight)
	}
	p.xAxis(c, area, x)
	var tags []tag
	if c.versus != "" {
		p.line(1.2, inkText, nil, point{area.left, y(1)}, point{area.right, y(1)})
		tags = append(tags, tag{point{area.right, y(1)}, c.versus, look{ink: inkText}, false})
	}
	dodge := min(9, 0.6*gap/float64(len(c.curves)))
	for i, line := range c.curves {
		off := (float64(i) - float64(len(c.curves)-1)/2) * dodge
		var at []point
		for _, s := range line.points {
			at = append(at, point{x(s.x) + off, y(s.y)})
		}
		p.curve(line, at, y)
		tags = append(tags, tag{at[len(at)-1], line.name, line.look, true})
	}
	p.tags(tags, area, labels)
}

// places returns a function that places values on the axis, and the smallest distance between two of
// them.
func (c chart) places(area frame) (x func(float64) float64, gap float64) {
	slot := (area.right - area.left) / float64(len(c.xs))
	first, last := c.xs[0], c.xs[len(c.xs)-1]
	x = func(v float64) float64 {
		if first == last {
			return area.left + slot/2
		}
		return area.left + slot/2 + (area.right-area.left-slot)*math.Log(v/first)/math.Log(last/first)
	}
	gap = slot
	for i := range c.xs[1:] {
		gap = min(gap, x(c.xs[i+1])-x(c.xs[i]))
	}
	return x, gap
}

// xAxis writes as many values as fit, the largest first, and below them the title of the axis.
func (p *pen) xAxis(c chart, area frame, x func(float64) float64) {
	free := math.Inf(1)
	for _, v := range slices.Backward(c.xs) {
		text := c.axis.mark(v)
		half := p.width(text, small) / 2
		if x(v)+half > free {
			continue
		}
		p.text(point{x(v), area.bottom + 14}, text, small, inkMuted, alignCentre)
		free = x(v) - half - 4
	}
	p.text(point{(area.left + area.right) / 2, area.bottom + 28}, c.axis.title, small, inkMuted, alignCentre)
}

// curve draws one line through the given places, with its intervals and its marks.
func (p *pen) curve(line curve, at []point, y func(float64) float64) {
	ink := line.look.ink
	p.line(1.4, ink, line.look.dash, at...)
	for i, s := range line.points {
		if s.ci.known() {
			p.line(1.2, ink, nil, point{at[i].x, y(s.ci.lo)}, point{at[i].x, y(s.ci.hi)})
		}
	}
	for i, s := range line.points {
		p.marker(line.look.shape, at[i], 3, ink, s.filled)
		for _, v := range s.theirs {
			p.ring(point{at[i].x, y(v)}, 4.2, ink)
		}
	}
}
