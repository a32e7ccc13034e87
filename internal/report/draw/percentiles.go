package draw

import "math"

// Percentiles is a chart of values by their percentile. Its x axis is logarithmic in the share of larger values,
// as is usual for HDR histograms: 1 is the 90th percentile, 2 the 99th.
type Percentiles struct {
	Curves []Curve
	// Decades is the end of the x axis.
	Decades float64
	// Names is the number of names that the chart leaves room for.
	Names int
	// Unit of the values.
	Unit string
}

// Picture lays the chart out. Only filled marks are drawn as markers.
func (c Percentiles) Picture() Picture {
	p := Picture{width: pictureWidth, height: max(260, 80+12*float64(c.Names))}
	p.draw = func(pen *pen) { pen.percentiles(c, p.width, p.height) }
	return p
}

func (c Percentiles) yAxis() axis {
	low, high := math.Inf(1), 0.0
	for _, curve := range c.Curves {
		for _, m := range curve.Marks {
			low, high = min(low, m.Y), max(high, m.Y)
		}
	}
	return logAxis(low, high)
}

func (p *pen) percentiles(c Percentiles, width, height float64) {
	area, labelWidth := p.plotArea(curveNames(c.Curves), frame{right: width, top: 22, bottom: height})
	axis := c.yAxis()
	x := func(v float64) float64 { return area.left + area.width()*v/c.Decades }
	p.text(point{0, 12}, c.Unit, small, Muted, alignLeft)
	p.valueAxis(axis, area)
	p.percentileAxis(c.Decades, area, x)
	var labels []endLabel
	for _, curve := range c.Curves {
		var line []point
		for _, m := range curve.Marks {
			line = append(line, point{x(m.X), area.y(axis.share(m.Y))})
		}
		p.line(1.4, curve.Style.Ink, curve.Style.dash(), line...)
		for i, m := range curve.Marks {
			if m.Filled {
				p.marker(curve.Style.Shape, line[i], 2.4, curve.Style.Ink, true)
			}
		}
		labels = append(labels, endLabel{line[len(line)-1], curve.Name, curve.Style, true})
	}
	p.endLabels(labels, area, labelWidth)
}

func (p *pen) percentileAxis(decades float64, area frame, x func(float64) float64) {
	for _, t := range []struct {
		at   float64
		text string
	}{{0, "0"}, {math.Log10(2), "50"}, {1, "90"}, {2, "99"}, {3, "99.9"}, {4, "99.99"}, {5, "99.999"}} {
		if t.at > decades {
			break
		}
		p.line(0.6, Grid, nil, point{x(t.at), area.top}, point{x(t.at), area.bottom})
		p.text(point{x(t.at), area.bottom + 13}, t.text, small, Muted, alignCentre)
	}
	p.text(point{area.middle(), area.bottom + 28}, "percentile", small, Muted, alignCentre)
}
