package draw

import (
	"cmp"
	"fmt"
	"image/color"
	"math"
	"slices"

	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/vg"
)

// pen draws on any canvas, in points from the top left corner.
type pen struct {
	c      vg.Canvas
	height float64
	fonts  *font.Cache
	// anchors leaves the alignment of text to the viewer, see anchored.
	anchors bool
}

type point struct{ x, y float64 }

// frame is the area between the axes of a plot.
type frame struct{ left, top, right, bottom float64 }

func (f frame) width() float64  { return f.right - f.left }
func (f frame) height() float64 { return f.bottom - f.top }
func (f frame) middle() float64 { return (f.left + f.right) / 2 }

// y returns the height of a share of the frame, measured from its bottom.
func (f frame) y(share float64) float64 { return f.bottom - share*f.height() }

func (p *pen) at(q point) vg.Point {
	return vg.Point{X: vg.Length(q.x), Y: vg.Length(p.height - q.y)}
}

func (p *pen) colour(i Ink) {
	var c color.RGBA
	c.A = 0xff
	// The inks are well-formed constants.
	_, _ = fmt.Sscanf(inks()[i].light, "#%02X%02X%02X", &c.R, &c.G, &c.B)
	p.c.SetColor(c)
}

func (p *pen) outline(points []point, closed bool) vg.Path {
	var path vg.Path
	for i, q := range points {
		if i == 0 {
			path.Move(p.at(q))
			continue
		}
		path.Line(p.at(q))
	}
	if closed {
		path.Close()
	}
	return path
}

// box is a rectangle, given by its top left corner and its size.
type box struct{ x, y, width, height float64 }

func (p *pen) rect(x, y, w, h float64, ink Ink) { p.rects([]box{{x, y, w, h}}, ink) }

// rects fills many rectangles of one colour as one path, which keeps the file of hundreds of bars small.
func (p *pen) rects(all []box, ink Ink) {
	var path vg.Path
	for _, r := range all {
		right, bottom := r.x+r.width, r.y+r.height
		path = append(path, p.outline([]point{{r.x, r.y}, {right, r.y}, {right, bottom}, {r.x, bottom}}, true)...)
	}
	if len(path) > 0 {
		p.colour(ink)
		p.c.Fill(path)
	}
}

func (p *pen) fill(outline []point, ink Ink) {
	p.colour(ink)
	p.c.Fill(p.outline(outline, true))
}

func (p *pen) line(width float64, ink Ink, dash []vg.Length, points ...point) {
	p.stroke(p.outline(points, false), width, ink, dash)
}

func (p *pen) stroke(path vg.Path, width float64, ink Ink, dash []vg.Length) {
	p.colour(ink)
	p.c.SetLineWidth(vg.Length(width))
	p.c.SetLineDash(dash, 0)
	p.c.Stroke(path)
}

// Alignments of text at its point.
const (
	alignLeft   = 0.0
	alignCentre = 0.5
	alignRight  = 1.0
)

func (p *pen) face(size float64) font.Face {
	return p.fonts.Lookup(font.Font{Typeface: "Liberation", Variant: "Sans"}, vg.Length(size))
}

func (p *pen) width(s string, size float64) float64 {
	f := p.face(size)
	return f.Width(s).Points()
}

// text writes text with its baseline through q.
func (p *pen) text(q point, s string, size float64, ink Ink, align float64) {
	if s == "" {
		return
	}
	switch {
	case !p.anchors:
		q.x -= align * p.width(s, size)
	case align == alignCentre:
		s = markMiddle + s
	case align == alignRight:
		s = markEnd + s
	}
	p.colour(ink)
	p.c.FillString(p.face(size), p.at(q), s)
}

// fit shortens a text to a width.
func (p *pen) fit(s string, size, width float64) string {
	runes := []rune(s)
	for len(runes) > 1 && p.width(s, size) > width {
		runes = runes[:len(runes)-1]
		s = string(runes) + "…"
	}
	return s
}

func (p *pen) circle(q point, radius float64) vg.Path {
	var path vg.Path
	path.Move(p.at(point{q.x + radius, q.y}))
	path.Arc(p.at(q), vg.Length(radius), 0, 2*math.Pi)
	path.Close()
	return path
}

// marker draws a shape, filled or hollow.
func (p *pen) marker(shape Shape, q point, size float64, ink Ink, filled bool) {
	path := p.circle(q, size)
	if angles := shape.corners(); angles != nil {
		var points []point
		for _, a := range angles {
			sin, cos := math.Sincos(a * math.Pi / 180)
			points = append(points, point{q.x + 1.25*size*cos, q.y - 1.25*size*sin})
		}
		path = p.outline(points, true)
	}
	p.colour(ink)
	if !filled {
		p.colour(Paper)
	}
	p.c.Fill(path)
	p.stroke(path, 1.2, ink, nil)
}

// corners returns the directions of a shape's corners in degrees. A circle has none.
func (s Shape) corners() []float64 {
	switch s {
	case Square:
		return []float64{45, 135, 225, 315}
	case Triangle:
		return []float64{90, 210, 330}
	case Diamond:
		return []float64{0, 90, 180, 270}
	case TriangleDown:
		return []float64{270, 30, 150}
	}
	return nil
}

// ring draws a ring around an existing mark.
func (p *pen) ring(q point, size float64, ink Ink) { p.stroke(p.circle(q, size), 1, ink, nil) }

// endLabel names a curve at its end, so that the reader needs no legend.
type endLabel struct {
	end    point
	text   string
	style  Style
	leader bool // a line leads from the curve to the label
}

// endLabels writes labels at the right of the frame, and moves them apart where they would overlap.
func (p *pen) endLabels(labels []endLabel, f frame, width float64) {
	const apart = normal + 2
	slices.SortStableFunc(labels, func(a, b endLabel) int { return cmp.Compare(a.end.y, b.end.y) })
	ys := make([]float64, len(labels))
	for i, l := range labels {
		ys[i] = max(l.end.y, f.top)
		if i > 0 {
			ys[i] = max(ys[i], ys[i-1]+apart)
		}
	}
	limit := f.bottom + apart
	for i := len(ys) - 1; i >= 0; i-- {
		ys[i] = min(ys[i], limit)
		limit = ys[i] - apart
	}
	for i, l := range labels {
		x := f.right + 18
		if l.leader {
			p.line(0.5, l.style.Ink, []vg.Length{1, 2}, point{l.end.x + 5, l.end.y}, point{f.right + 3, ys[i]}, point{x - 12, ys[i]})
			p.marker(l.style.Shape, point{x - 8, ys[i]}, 2.4, l.style.Ink, true)
		}
		p.text(point{x, ys[i] + 3.2}, p.fit(l.text, normal, width), normal, l.style.Ink, alignLeft)
	}
}

// dash returns the dash pattern of a style's lines, or nil for solid ones.
func (s Style) dash() []vg.Length {
	if s.Dashed {
		return []vg.Length{4, 3}
	}
	return nil
}
