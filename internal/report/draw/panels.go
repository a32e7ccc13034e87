package draw

// grid arranges panels of equal size in rows.
type grid struct {
	columns, rows int
	panelWidth    float64
	gap           float64
}

// panelsLeft is the room for the axis at the left of panels.
const panelsLeft = 34.0

// gridOf arranges panels that are not narrower than narrowest, between panelsLeft and the right margin.
func gridOf(panels int, narrowest, gap, margin float64) grid {
	g := grid{gap: gap}
	g.columns = max(1, int((pictureWidth-panelsLeft+gap)/(narrowest+gap)))
	g.columns = min(g.columns, panels)
	g.rows = (panels + g.columns - 1) / g.columns
	return g.resized(margin)
}

// balanced returns the grid with the panels spread evenly over its rows, so that no row has a single panel.
func (g grid) balanced(panels int, margin float64) grid {
	g.columns = (panels + g.rows - 1) / g.rows
	return g.resized(margin)
}

func (g grid) resized(margin float64) grid {
	g.panelWidth = (pictureWidth - panelsLeft - margin - g.gap*float64(g.columns-1)) / float64(g.columns)
	return g
}

// panel returns the frame of the ith panel; the grid begins at top, and its rows have this height. first is true in the
// first column, which has the axis.
func (g grid) panel(i int, top, height float64) (f frame, first bool) {
	f = frame{left: panelsLeft + float64(i%g.columns)*(g.panelWidth+g.gap), top: top + float64(i/g.columns)*height}
	f.right, f.bottom = f.left+g.panelWidth, f.top+height
	return f, i%g.columns == 0
}
