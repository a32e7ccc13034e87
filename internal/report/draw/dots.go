package draw

import "slipstream.dev/internal/report/number"

// Dots is a chart of shares with their intervals: a panel for each quantity, in it a group for each item, and in
// the group the series side by side.
type Dots struct {
	Series []DotSeries
	Items  []string
	Panels []string
	XTitle string
}

// DotSeries has the values of one series, by panel and item. A value is nil if there is none.
type DotSeries struct {
	Name   string
	Ink    Ink
	Values [][]*Dot
}

// Dot is a share with its interval.
type Dot struct {
	Mean float64
	CI   number.Interval
}

// Picture lays the chart out.
func (d Dots) Picture() Picture {
	const legendRow, perRow, plot, below = 14.0, 4, 92.0, 30.0
	rows := (len(d.Series) + perRow - 1) / perRow
	legend := legendRow * float64(rows)
	draw := func(p *pen) {
		for i, s := range d.Series {
			x, y := panelsLeft+float64(i%perRow)*83, 7+legendRow*float64(i/perRow)
			p.rect(x, y-4, 8, 8, s.Ink)
			p.text(point{x + 12, y + 3.5}, p.fit(s.Name, normal, 70), normal, Text, alignLeft)
		}
		for i := range d.Panels {
			top := legend + float64(i)*(plot+below) + 12
			p.dotsPanel(d, i, frame{left: panelsLeft, right: pictureWidth - 4, top: top, bottom: top + plot - 12})
		}
	}
	return Picture{pictureWidth, legend + float64(len(d.Panels))*(plot+below), draw}
}

// dotsPanel draws a dash at each mean, with its interval.
func (p *pen) dotsPanel(d Dots, panel int, area frame) {
	p.text(point{area.left, area.top - 4}, d.Panels[panel], normal, Text, alignLeft)
	for _, v := range []float64{0, 0.5, 1} {
		p.line(0.5, Muted, nil, point{area.left, area.y(v)}, point{area.right, area.y(v)})
		p.shareLabel(area, v)
	}
	group := area.width() / float64(len(d.Items))
	slot := group * 0.84 / float64(len(d.Series))
	left := func(item int) float64 { return area.left + (float64(item)+0.08)*group }
	for i, name := range d.Items {
		p.text(point{left(i) + group*0.42, area.bottom + 11}, p.fit(name, small, group), small, Muted, alignCentre)
	}
	for n, s := range d.Series {
		var marks []box // in one path, because a page has thousands
		for i, dot := range s.Values[panel] {
			if dot == nil {
				continue
			}
			x := left(i) + float64(n)*slot
			marks = append(marks, box{x + 0.1*slot, area.y(dot.Mean) - 0.8, 0.8 * slot, 1.6})
			if dot.CI.Known() {
				marks = append(marks, box{x + 0.5*slot - 0.4, area.y(dot.CI.High), 0.8, area.y(dot.CI.Low) - area.y(dot.CI.High)})
			}
		}
		p.rects(marks, s.Ink)
	}
	p.text(point{area.middle(), area.bottom + 21}, d.XTitle, small, Muted, alignCentre)
}
