package draw

import (
	"math"
	"strings"
)

// Stacks is a chart of stacked bars, in a panel for each variant. The parts of a bar are shares of 1.
type Stacks struct {
	Parts  []Part
	Panels []StacksPanel
	// Groups are the names of the groups of bars.
	Groups []string
	// MostBars is the number of bars that a panel has room for.
	MostBars int
}

// Part is a part of each bar.
type Part struct {
	Name string
	Ink  Ink
}

// StacksPanel is a panel with its title and a note beside it.
type StacksPanel struct {
	Title, Note string
	Bars        []Stack
}

// Stack is one bar.
type Stack struct {
	Name   string
	Group  int // index in Stacks.Groups
	Shares []float64
}

// Measures of a panel of stacks.
const stacksLegend, stacksTitle, stacksPlot, stacksBelow = 24.0, 14.0, 78.0, 30.0

// Picture lays the chart out.
func (s Stacks) Picture() Picture {
	const gap, margin = 14, 4
	const panelHeight = stacksTitle + stacksPlot + stacksBelow
	n := len(s.Panels)
	grid := gridOf(n, max(88, 4*float64(s.MostBars)), gap, margin).balanced(n, margin)
	draw := func(p *pen) {
		x := panelsLeft
		for _, part := range s.Parts {
			p.rect(x, 2, 10, 10, part.Ink)
			p.text(point{x + 14, 10.5}, part.Name, normal, Text, alignLeft)
			x += 14 + p.width(part.Name, normal) + 18
		}
		for i, panel := range s.Panels {
			area, first := grid.panel(i, stacksLegend+stacksTitle, panelHeight)
			area.bottom = area.top + stacksPlot
			p.stacksPanel(s, panel, area, first)
		}
	}
	return Picture{pictureWidth, stacksLegend + float64(grid.rows)*panelHeight, draw}
}

// placedStack is a bar with its place.
type placedStack struct {
	Stack
	x float64
	// nth is its number in its group. last is true for the last one.
	nth  int
	last bool
	// from is where its group begins.
	from float64
}

// place places the bars of a panel. The groups stand apart.
func (s StacksPanel) place(area frame) (placed []placedStack, slot float64, groups int) {
	const between = 6.0
	groups = 1
	for i, b := range s.Bars {
		if i > 0 && b.Group != s.Bars[i-1].Group {
			groups++
		}
	}
	slot = (area.width() - between*float64(groups-1)) / float64(len(s.Bars))
	x, from, nth := area.left, area.left, 0
	for i, b := range s.Bars {
		if i > 0 && b.Group != s.Bars[i-1].Group {
			x += between
			from, nth = x, 0
		}
		last := i == len(s.Bars)-1 || s.Bars[i+1].Group != b.Group
		placed = append(placed, placedStack{b, x, nth, last, from})
		nth++
		x += slot
	}
	return placed, slot, groups
}

func (p *pen) stacksPanel(s Stacks, panel StacksPanel, area frame, axis bool) {
	p.text(point{area.right, area.top - 5}, panel.Note, small, Muted, alignRight)
	p.text(point{area.left, area.top - 5}, p.fit(panel.Title, normal, area.width()-p.width(panel.Note, small)-4), normal, Text, alignLeft)
	placed, slot, groups := panel.place(area)
	air := min(6, 0.16*slot)
	every := max(1, int(math.Ceil((p.width("000", small)+4)/slot)))
	boxes := make([][]box, len(s.Parts))
	for _, b := range placed {
		y := area.bottom
		for part, share := range b.Shares {
			h := share * area.height()
			if h > 0.05 {
				boxes[part] = append(boxes[part], box{b.x + air/2, y - h, slot - air, h})
			}
			y -= h
		}
		if b.nth%every == 0 {
			first, _, _ := strings.Cut(b.Name, "–")
			p.text(point{b.x + slot/2, area.bottom + 10}, first, small, Muted, alignCentre)
		}
		if end := b.x + slot; groups > 1 && b.last {
			p.text(point{(b.from + end) / 2, area.bottom + 20}, p.fit(s.Groups[b.Group], small, end-b.from), small, Muted, alignCentre)
		}
	}
	for part, all := range boxes {
		p.rects(all, s.Parts[part].Ink)
	}
	p.line(0.8, Muted, nil, point{area.left, area.bottom}, point{area.right, area.bottom})
	if axis {
		for _, share := range []float64{0, 0.5, 1} {
			p.shareLabel(area, share)
		}
	}
}
