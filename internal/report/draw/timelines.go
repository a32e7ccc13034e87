package draw

import (
	"gonum.org/v1/plot/vg"

	"slipstream.dev/internal/report/number"
)

// Timelines is a chart of values over time, in a panel for each variant: lines with a common axis above, and
// areas of shares below.
type Timelines struct {
	Lines, Areas []Key
	// Limit is the name of the panels' limits.
	Limit  string
	Panels []Timeline
}

// Key is an entry of the legend.
type Key struct {
	Name string
	Ink  Ink
}

// Timeline is one panel.
type Timeline struct {
	Title, Note string
	Seconds     float64
	Lines       []Steps // one for each key, nil if there is none
	Limit       float64 // of the lines, 0 if there is none
	Areas       []Steps // shares, one for each key
	// AreasName stands below the areas. If it is empty, AreasMissing says why there are none.
	AreasName, AreasMissing string
}

// Measures of a panel of timelines.
const (
	timelineTitle, timelineLines, timelineGap, timelineAreas, timelineBelow = 27.0, 56.0, 13.0, 34.0, 22.0

	timelineHeight = timelineTitle + timelineLines + timelineGap + timelineAreas + timelineBelow
)

// Picture lays the chart out.
func (t Timelines) Picture() Picture {
	const legend = 20.0
	grid := gridOf(len(t.Panels), 140, 16, 8)
	top, limit := t.top()
	draw := func(p *pen) {
		p.timelinesLegend(t, limit)
		for i, panel := range t.Panels {
			at, first := grid.panel(i, legend, timelineHeight)
			p.timeline(t, panel, at, top, first)
		}
	}
	return Picture{pictureWidth, legend + float64(grid.rows)*timelineHeight, draw}
}

// top returns the highest value that the panels show, and whether they show a limit.
func (t Timelines) top() (highest float64, limited bool) {
	var limits []float64
	for _, panel := range t.Panels {
		_, _, most := panel.Lines[0].Range()
		highest, limits = max(highest, most), append(limits, panel.Limit)
	}
	return withLimits(highest, limits)
}

// withLimits raises the highest value to the limits that a chart shows. A limit far above all values is not drawn,
// because it would press them to the bottom.
func withLimits(highest float64, limits []float64) (top float64, limited bool) {
	room := max(1.25*highest, 1e-3)
	for _, limit := range limits {
		if limit > 0 && limit <= room {
			highest, limited = max(highest, limit), true
		}
	}
	return max(highest, 1e-3), limited
}

func limitDash() []vg.Length { return []vg.Length{3, 2} }

func (p *pen) timelinesLegend(t Timelines, limit bool) {
	x := panelsLeft
	name := func(text string) {
		p.text(point{x + 16, 10.5}, text, small, Text, alignLeft)
		x += 16 + p.width(text, small) + 10
	}
	line := func(text string, ink Ink, dash []vg.Length) {
		p.line(1.4, ink, dash, point{x, 7}, point{x + 12, 7})
		name(text)
	}
	for _, k := range t.Lines {
		line(k.Name, k.Ink, nil)
	}
	if limit {
		line(t.Limit, Text, limitDash())
	}
	for _, k := range t.Areas {
		p.rect(x+2, 2, 10, 10, k.Ink)
		name(k.Name)
	}
}

// timeline draws one panel, whose lines reach up to highest.
func (p *pen) timeline(t Timelines, panel Timeline, at frame, highest float64, axis bool) {
	width := 0.88 * at.width() // a page may have a wider font
	p.text(point{at.left, at.top + 9}, p.fit(panel.Title, normal, width), normal, Text, alignLeft)
	p.text(point{at.left, at.top + 20}, p.fit(panel.Note, small, width), small, Muted, alignLeft)
	lines := frame{left: at.left, right: at.right, top: at.top + timelineTitle, bottom: at.top + timelineTitle + timelineLines}
	p.timelineLines(t, panel, lines, highest, axis)
	areas := frame{left: at.left, right: at.right, top: lines.bottom + timelineGap, bottom: at.bottom - timelineBelow}
	for i, steps := range panel.Areas {
		p.stepArea(steps, t.Areas[i].Ink, func(t, v float64) point { return panel.place(areas, t, v) })
	}
	p.timelineGrid(panel, areas, 1, "100%", axis)
	p.timelineGrid(panel, areas, 0, "0", axis)
	if panel.AreasName == "" {
		p.text(point{at.left + 4, areas.bottom - 6}, panel.AreasMissing, small, Muted, alignLeft)
	}
	p.text(point{at.left, at.bottom - 11}, "0", small, Muted, alignLeft)
	p.text(point{at.right, at.bottom - 11}, number.Significant(panel.Seconds)+" s", small, Muted, alignRight)
	p.text(point{at.middle(), at.bottom - 11}, p.fit(panel.AreasName, small, 0.6*at.width()), small, Muted, alignCentre)
}

func (p *pen) timelineLines(t Timelines, panel Timeline, at frame, highest float64, axis bool) {
	top := highest * 1.04
	tick := niceAbove(highest / 3)
	p.timelineGrid(panel, at, 0, "0", axis)
	for v := tick; v <= highest*(1+1e-9); v += tick {
		p.timelineGrid(panel, at, v/top, tickText(v, tick), axis)
	}
	if panel.Limit > 0 && panel.Limit <= top {
		p.line(0.8, Text, limitDash(), panel.place(at, 0, panel.Limit/top), panel.place(at, panel.Seconds, panel.Limit/top))
	}
	for i, steps := range panel.Lines {
		p.stepLine(steps, t.Lines[i].Ink, func(t, v float64) point { return panel.place(at, t, v/top) })
	}
}

// place converts a time and a share of a frame's height into a point.
func (t Timeline) place(f frame, seconds, share float64) point {
	return point{f.left + f.width()*seconds/max(t.Seconds, 1e-9), f.y(min(max(share, 0), 1))}
}

func (p *pen) timelineGrid(t Timeline, f frame, share float64, label string, axis bool) {
	from := t.place(f, 0, share)
	p.line(0.6, Grid, nil, from, t.place(f, t.Seconds, share))
	if axis {
		p.text(point{f.left - 4, from.y + 3}, label, small, Muted, alignRight)
	}
}
