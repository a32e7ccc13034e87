package draw

import "slipstream.dev/internal/report/number"

// Strips is a chart of values over time: a panel for each variant, and in it a strip for each source. All strips have
// the same scale, and those of a panel the same time.
type Strips struct {
	Panels []StripsPanel
	// Limit is the name of the strips' limits.
	Limit string
}

// StripsPanel is a panel with its title.
type StripsPanel struct {
	Title   string
	Seconds float64
	Strips  []Strip
}

// Strip is one value over time. A limit of 0 means that there is none.
type Strip struct {
	Name  string
	Ink   Ink
	Steps Steps
	Limit float64
}

// Measures of strips.
const stripLegend, stripTitle, stripHeight, stripGap, stripsBelow, stripsLeft = 16.0, 16.0, 15.0, 4.0, 20.0, 110.0

// Picture lays the chart out.
func (s Strips) Picture() Picture {
	height := stripLegend
	for _, panel := range s.Panels {
		height += panel.height()
	}
	highest, limited := s.top()
	draw := func(p *pen) {
		if limited {
			p.line(0.8, Text, limitDash(), point{stripsLeft, 7}, point{stripsLeft + 12, 7})
			p.text(point{stripsLeft + 16, 10}, s.Limit, small, Text, alignLeft)
		}
		top := stripLegend
		for _, panel := range s.Panels {
			p.stripsPanel(panel, top, highest)
			top += panel.height()
		}
	}
	return Picture{pictureWidth, height, draw}
}

func (s StripsPanel) height() float64 {
	return stripTitle + float64(len(s.Strips))*(stripHeight+stripGap) + stripsBelow
}

// top returns the highest value of all strips, and whether they show a limit.
func (s Strips) top() (highest float64, limited bool) {
	var limits []float64
	for _, panel := range s.Panels {
		for _, strip := range panel.Strips {
			_, _, most := strip.Steps.Range()
			highest, limits = max(highest, most), append(limits, strip.Limit)
		}
	}
	return withLimits(highest, limits)
}

// stripsPanel draws a panel whose strips reach up to highest.
func (p *pen) stripsPanel(panel StripsPanel, top, highest float64) {
	p.text(point{0, top + 10}, p.fit(panel.Title, normal, pictureWidth), normal, Text, alignLeft)
	at := frame{left: stripsLeft, right: pictureWidth - 8, top: top + stripTitle}
	for _, strip := range panel.Strips {
		at.bottom = at.top + stripHeight
		place := func(t, v float64) point {
			return point{at.left + at.width()*t/max(panel.Seconds, 1e-9), at.y(min(v/highest, 1))}
		}
		p.text(point{stripsLeft - 6, at.bottom - 3}, p.fit(strip.Name, small, stripsLeft-8), small, Text, alignRight)
		p.line(0.6, Grid, nil, place(0, 0), place(panel.Seconds, 0))
		if strip.Limit > 0 && strip.Limit <= highest {
			p.line(0.8, Text, limitDash(), place(0, strip.Limit), place(panel.Seconds, strip.Limit))
		}
		p.stepLine(strip.Steps, strip.Ink, place)
		at.top = at.bottom + stripGap
	}
	p.text(point{at.left, at.top + 8}, "0", small, Muted, alignLeft)
	p.text(point{at.right, at.top + 8}, number.Significant(panel.Seconds)+" s", small, Muted, alignRight)
}
