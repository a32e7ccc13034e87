package draw

import (
	"math"
	"strconv"
)

// Trend is a chart of values over a sequence of runs, which stand equally far apart.
type Trend struct {
	Runs   []string // their labels, in order
	YTitle string
	// Ratios draws a line at 1.
	Ratios bool
	// Curves have the numbers of the runs as X, from 0.
	Curves []Curve
	// Events are the indexes of the runs before which something changed. Their lines are labelled from 1.
	Events []int
	Shifts []TrendShift
}

// TrendShift is a change in the level of a curve at a run; From and To bound its place.
type TrendShift struct{ Curve, At, From, To int }

// Picture lays the chart out.
func (t Trend) Picture() Picture {
	p := Picture{width: pictureWidth, height: max(230, 80+12*float64(len(t.Curves)+1))}
	p.draw = func(pen *pen) { pen.trend(t, p.width, p.height) }
	return p
}

// mostMarkers is the number of runs up to which every value has a marker.
const mostMarkers = 60

func (p *pen) trend(t Trend, width, height float64) {
	area, labelWidth := p.plotArea(curveNames(t.Curves), frame{right: width, top: 30, bottom: height + 8})
	axis := t.yAxis()
	gap := area.width() / float64(max(1, len(t.Runs)))
	x := func(run float64) float64 { return area.left + gap*(run+0.5) }
	y := func(v float64) float64 { return area.y(axis.share(v)) }
	p.text(point{0, 12}, t.YTitle, small, Muted, alignLeft)
	p.valueAxis(axis, area)
	p.trendRuns(t, area, x)
	for i, run := range t.Events {
		at := x(float64(run)) - gap/2
		p.line(0.7, Muted, limitDash(), point{at, area.top - 3}, point{at, area.bottom})
		p.text(point{at, area.top - 5}, strconv.Itoa(i+1), small, Muted, alignCentre)
	}
	if t.Ratios {
		p.line(0.9, Text, nil, point{area.left, y(1)}, point{area.right, y(1)})
	}
	size := 2.4
	if len(t.Runs) > mostMarkers {
		size = 0
	}
	var labels []endLabel
	for _, c := range t.Curves {
		var at []point
		for _, m := range c.Marks {
			at = append(at, point{x(m.X), y(m.Y)})
		}
		p.curve(c, at, y, size)
		labels = append(labels, endLabel{at[len(at)-1], c.Name, c.Style, true})
	}
	for _, s := range t.Shifts {
		p.trendShift(t, s, area, x)
	}
	p.endLabels(labels, area, labelWidth)
}

// trendShift draws the interval of a shift below the curves, and a triangle at its place.
func (p *pen) trendShift(t Trend, s TrendShift, area frame, x func(float64) float64) {
	ink := t.Curves[s.Curve].Style.Ink
	at := area.bottom - 4 - 5*float64(s.Curve%6)
	p.line(1.6, ink, nil, point{x(float64(s.From)), at}, point{x(float64(s.To)), at})
	p.marker(Triangle, point{x(float64(s.At)), at}, 3, ink, true)
}

// trendRuns labels as many runs as fit, the last one first.
func (p *pen) trendRuns(t Trend, area frame, x func(float64) float64) {
	free := math.Inf(1)
	for i := len(t.Runs) - 1; i >= 0; i-- {
		half := p.width(t.Runs[i], small) / 2
		at := min(x(float64(i)), area.right-half+8)
		if at+half > free {
			continue
		}
		p.text(point{at, area.bottom + 14}, t.Runs[i], small, Muted, alignCentre)
		free = at - half - 12
	}
}

// yAxis returns an axis that need not begin at 0, because changes of a few percent matter. It shows intervals up to
// half the range of the values beyond the outermost value.
func (t Trend) yAxis() axis {
	low, high := math.Inf(1), math.Inf(-1)
	include := func(v float64) { low, high = min(low, v), max(high, v) }
	if t.Ratios {
		include(1)
	}
	for _, c := range t.Curves {
		for _, m := range c.Marks {
			include(m.Y)
		}
	}
	room := max(high-low, 0.02*math.Abs(high), 1e-12)
	least, most := low-room/2, high+room/2
	for _, c := range t.Curves {
		for _, m := range c.Marks {
			if m.CI.Known() {
				include(max(m.CI.Low, least))
				include(min(m.CI.High, most))
			}
		}
	}
	low, high = low-room/20, high+room/20
	step := niceAbove((high - low) / 6)
	a := axis{low: math.Floor(low/step) * step, high: math.Ceil(high/step) * step, text: func(v float64) string { return tickText(v, step) }}
	for n := math.Round(a.low / step); n*step <= a.high+step/2; n++ {
		a.ticks = append(a.ticks, n*step)
	}
	return a
}
