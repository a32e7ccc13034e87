package draw

import (
	"math"
	"slices"

	"slipstream.dev/internal/report/number"
)

// Lines is a chart of lines over a logarithmic axis.
type Lines struct {
	Xs     []float64 // values of the axis, rising
	XTitle string
	XTick  func(float64) string // formats a value of the axis
	Curves []Curve
	YTitle string
	// Reference names the line at 1, which ratios are relative to. It is empty if the values are not ratios.
	Reference string
}

// Curve is one line of a chart.
type Curve struct {
	Name  string
	Style Style
	Marks []Mark
}

// Mark is a value with its interval. Rings are other values for the same place.
type Mark struct {
	X, Y   float64
	CI     number.Interval
	Filled bool
	Rings  []float64
}

// Picture lays the chart out.
func (l Lines) Picture() Picture {
	p := Picture{width: pictureWidth, height: max(260, 70+12*float64(len(l.Curves)+1))}
	p.draw = func(pen *pen) { pen.lines(l, p.width, p.height) }
	return p
}

// yAxis returns the axis of the values. With few blocks, intervals may be so long that they would flatten the
// curves, so long intervals are cut off. If values other than ratios span several orders of magnitude, their axis
// is logarithmic too.
func (l Lines) yAxis() axis {
	ratios := l.Reference != ""
	low, high, bound, ring := math.Inf(1), 0.0, 0.0, 0.0
	if ratios {
		high, bound = 1, 1
	}
	for _, c := range l.Curves {
		for _, m := range c.Marks {
			low, high, bound = min(low, m.Y), max(high, m.Y), max(bound, m.Y)
			if m.CI.Known() {
				bound = max(bound, m.CI.High)
			}
			for _, x := range m.Rings {
				ring = max(ring, x)
			}
		}
	}
	if !ratios && low > 0 && high/low > 20 {
		return logAxis(low, high).thin()
	}
	return linearAxis(max(min(bound, 1.6*high), ring) * 1.01)
}

// lines draws the lines of a chart, each with its name at its end.
func (p *pen) lines(l Lines, width, height float64) {
	area, labelWidth := p.plotArea(append(curveNames(l.Curves), l.Reference), frame{right: width, top: 26, bottom: height})
	axis := l.yAxis()
	x, gap := logPlaces(l.Xs, area)
	y := func(v float64) float64 { return area.y(axis.share(v)) }
	p.text(point{0, 12}, l.YTitle, small, Muted, alignLeft)
	p.valueAxis(axis, area)
	p.xAxis(l, area, x)
	var labels []endLabel
	if l.Reference != "" {
		p.line(1.2, Text, nil, point{area.left, y(1)}, point{area.right, y(1)})
		labels = append(labels, endLabel{point{area.right, y(1)}, l.Reference, Style{Ink: Text}, false})
	}
	dodge := min(9, 0.6*gap/float64(len(l.Curves)))
	for i, c := range l.Curves {
		off := (float64(i) - float64(len(l.Curves)-1)/2) * dodge
		var at []point
		for _, m := range c.Marks {
			at = append(at, point{x(m.X) + off, y(m.Y)})
		}
		p.curve(c, at, y, 3)
		labels = append(labels, endLabel{at[len(at)-1], c.Name, c.Style, true})
	}
	p.endLabels(labels, area, labelWidth)
}

func curveNames(curves []Curve) (names []string) {
	for _, c := range curves {
		names = append(names, c.Name)
	}
	return names
}

// plotArea returns the area between the axes of a plot, which leaves room for the names of the curves at its right.
func (p *pen) plotArea(names []string, f frame) (area frame, labelWidth float64) {
	for _, name := range names {
		labelWidth = max(labelWidth, p.width(name, normal))
	}
	labelWidth = min(labelWidth, 0.2*f.right)
	return frame{left: 40, top: f.top, right: f.right - labelWidth - 30, bottom: f.bottom - 36}, labelWidth
}

// logPlaces returns a function that maps values to places on a logarithmic axis, and the smallest gap between two
// places.
func logPlaces(xs []float64, area frame) (x func(float64) float64, gap float64) {
	slot := area.width() / float64(len(xs))
	first, last := xs[0], xs[len(xs)-1]
	x = func(v float64) float64 {
		if first == last {
			return area.left + slot/2
		}
		return area.left + slot/2 + (area.width()-slot)*math.Log(v/first)/math.Log(last/first)
	}
	gap = slot
	for i := range xs[1:] {
		gap = min(gap, x(xs[i+1])-x(xs[i]))
	}
	return x, gap
}

// xAxis writes as many values as fit, the largest first, and below them the title of the axis.
func (p *pen) xAxis(l Lines, area frame, x func(float64) float64) {
	free := math.Inf(1)
	for _, v := range slices.Backward(l.Xs) {
		text := l.XTick(v)
		half := p.width(text, small) / 2
		if x(v)+half > free {
			continue
		}
		p.text(point{x(v), area.bottom + 14}, text, small, Muted, alignCentre)
		free = x(v) - half - 4
	}
	p.text(point{area.middle(), area.bottom + 28}, l.XTitle, small, Muted, alignCentre)
}

// curve draws one line through the given places, with its intervals and its marks. Marks of size 0 are not drawn.
func (p *pen) curve(c Curve, at []point, y func(float64) float64, size float64) {
	ink := c.Style.Ink
	p.line(1.4, ink, c.Style.dash(), at...)
	for i, m := range c.Marks {
		if m.CI.Known() {
			p.line(1.2, ink, nil, point{at[i].x, y(m.CI.Low)}, point{at[i].x, y(m.CI.High)})
		}
	}
	for i, m := range c.Marks {
		if size > 0 {
			p.marker(c.Style.Shape, at[i], size, ink, m.Filled)
		}
		for _, v := range m.Rings {
			p.ring(point{at[i].x, y(v)}, 4.2, ink)
		}
	}
}
