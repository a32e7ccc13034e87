package draw

import (
	"math"

	"slipstream.dev/internal/report/number"
)

// Shares is a chart of shares with their intervals: a panel for each quantity, in it the groups, and in each group
// the items side by side.
type Shares struct {
	Groups []ShareGroup
	Items  []string // short names, shown if they fit
	Panels []string
	XTitle string
}

// ShareGroup has the shares of one group, by panel and item.
type ShareGroup struct {
	Name   string
	Ink    Ink
	Values [][]Share
}

// Share is a share with its interval. Rings are other shares for the same place.
type Share struct {
	Mean  float64 // NaN if there is none
	CI    number.Interval
	Rings []float64
}

// Measures of a panel of dots.
const dotsTitle, dotsPlot, dotsBelow = 14.0, 84.0, 46.0

// Picture lays the chart out.
func (d Shares) Picture() Picture {
	const height = dotsTitle + dotsPlot + dotsBelow
	draw := func(p *pen) {
		for i := range d.Panels {
			top := float64(i)*height + dotsTitle
			p.dotsPanel(d, i, frame{left: panelsLeft, right: pictureWidth - 4, top: top, bottom: top + dotsPlot})
		}
	}
	return Picture{pictureWidth, float64(len(d.Panels)) * height, draw}
}

// dotsPanel draws a dash at each mean, with its interval.
func (p *pen) dotsPanel(d Shares, panel int, area frame) {
	p.text(point{area.left, area.top - 5}, d.Panels[panel], normal, Text, alignLeft)
	for _, v := range []float64{0, 0.5, 1} {
		p.line(0.5, Muted, nil, point{area.left, area.y(v)}, point{area.right, area.y(v)})
		p.shareLabel(area, v)
	}
	group := area.width() / float64(len(d.Groups))
	slot := group * 0.84 / float64(len(d.Items))
	left := func(n int) float64 { return area.left + (float64(n)+0.08)*group }
	for n, g := range d.Groups {
		p.dots(g, panel, area, left(n), slot)
		p.dotNames(d, n, frame{left: left(n), right: left(n) + 0.84*group, bottom: area.bottom}, slot)
	}
	p.text(point{area.middle(), area.bottom + 42}, d.XTitle, small, Muted, alignCentre)
}

// dots draws a group's shares of one panel.
func (p *pen) dots(g ShareGroup, panel int, area frame, left, slot float64) {
	var marks []box // in one path, because a page has thousands
	for i, dot := range g.Values[panel] {
		x := left + float64(i)*slot
		if !math.IsNaN(dot.Mean) {
			marks = append(marks, box{x + 0.1*slot, area.y(dot.Mean) - 0.8, 0.8 * slot, 1.6})
			if dot.CI.Known() {
				marks = append(marks, box{x + 0.5*slot - 0.4, area.y(dot.CI.High), 0.8, area.y(dot.CI.Low) - area.y(dot.CI.High)})
			}
		}
		for _, v := range dot.Rings {
			p.ring(point{x + 0.5*slot, area.y(v)}, min(2.4, 0.5*slot), g.Ink)
		}
	}
	p.rects(marks, g.Ink)
}

// dotNames writes the names of a group's items, if they fit, and of the group. The names of neighbouring groups are on
// two lines if they do not fit on one.
func (p *pen) dotNames(d Shares, n int, at frame, slot float64) {
	widest, fits := 0.0, true
	for _, name := range d.Items {
		widest = max(widest, p.width(name, small))
	}
	for i, name := range d.Items {
		if widest+1 <= slot {
			p.text(point{at.left + (float64(i)+0.5)*slot, at.bottom + 10}, name, small, Muted, alignCentre)
		}
	}
	for _, g := range d.Groups {
		fits = fits && p.width(g.Name, small) <= 1.1*at.width()
	}
	room, down := 1.1*at.width(), 20.0
	if !fits {
		room *= 2
		down += 10 * float64(n%2)
	}
	p.text(point{at.middle(), at.bottom + down}, p.fit(d.Groups[n].Name, small, room), small, d.Groups[n].Ink, alignCentre)
}
