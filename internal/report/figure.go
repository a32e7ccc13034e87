package report

import (
	"bytes"
	"fmt"
	"html"
	"image/color"
	"io"
	"math"
	"regexp"
	"strings"
	"sync"

	"codeberg.org/go-fonts/liberation/liberationsansregular"
	"golang.org/x/image/font/opentype"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgpdf"
	"gonum.org/v1/plot/vg/vgsvg"
)

// Figure is one picture and the same in numbers, for those who cannot see it.
type Figure struct {
	// Section of the report that it belongs to.
	Section Section
	// Name is the name of its file, without the extension.
	Name  string
	Title string
	// Caption says how to read the figure.
	Caption string
	// Alt is the text alternative: a sentence that says what the figure shows.
	Alt string
	// Data has the numbers that the figure is drawn from.
	Data Data

	width, height float64 // in points
	draw          func(*pen)
}

// Section is the topic of a figure.
type Section string

// Sections of figures.
const (
	SectionSeries  Section = "series"
	SectionScaling Section = "scaling"
	SectionLatency Section = "latency"
	SectionCPU     Section = "cpu"
	SectionCourse  Section = "course"
)

// Data is a small table; the first column names the row.
type Data struct {
	Columns []string
	Rows    [][]string
}

// Figures returns the figures of a report, in its order.
func Figures(m *Model) []Figure { return m.figures }

// Section returns the figures of one section.
func (m *Model) Section(s Section) []Figure {
	var out []Figure
	for _, f := range m.figures {
		if f.Section == s {
			out = append(out, f)
		}
	}
	return out
}

// FigureFormats returns the formats that Render can write.
func FigureFormats() []string { return []string{"svg", "png", "pdf"} }

// Render draws a figure in a format of FigureFormats. The same figure gives the
// same bytes.
func Render(w io.Writer, f Figure, format string) error {
	var buf bytes.Buffer
	var err error
	switch format {
	case "svg":
		buf.WriteString(f.svg())
	case "png":
		// Three times the nominal resolution: enough for a slide.
		c := vgimg.PngCanvas{Canvas: vgimg.NewWith(vgimg.UseWH(vg.Length(f.width), vg.Length(f.height)), vgimg.UseDPI(216))}
		f.on(c, false)
		_, err = c.WriteTo(&buf)
	case "pdf":
		c := pdfCanvas{vgpdf.New(vg.Length(f.width), vg.Length(f.height))}
		f.on(c, false)
		if _, err = c.WriteTo(&buf); err == nil {
			buf = *bytes.NewBuffer(undated(buf.Bytes()))
		}
	default:
		return fmt.Errorf("figure %s: format %q is none of %s", f.Name, format, strings.Join(FigureFormats(), ", "))
	}
	if err == nil {
		_, err = w.Write(buf.Bytes())
	}
	if err != nil {
		return fmt.Errorf("figure %s as %s: %w", f.Name, format, err)
	}
	return nil
}

// fonts has the one font that figures are laid out with; plot's own collection has
// twelve.
var fonts = sync.OnceValue(func() font.Collection {
	face, err := opentype.Parse(liberationsansregular.TTF)
	if err != nil {
		panic(err) // the font is part of the program
	}
	return font.Collection{{Font: font.Font{Typeface: "Liberation", Variant: "Sans"}, Face: face}}
})

func (f Figure) on(c vg.Canvas, anchors bool) {
	p := &pen{c: c, height: f.height, anchors: anchors, fonts: font.NewCache(fonts())}
	p.rect(0, 0, f.width, f.height, inkPaper)
	f.draw(p)
}

func (f Figure) raw() string {
	c := vgsvg.New(vg.Length(f.width), vg.Length(f.height))
	f.on(c, true)
	var b strings.Builder
	_, _ = c.WriteTo(&b) // a strings.Builder takes everything
	return anchored(b.String())
}

// svg names fonts with the same metrics as the one that the figure was laid out with.
func (f Figure) svg() string {
	return strings.ReplaceAll(f.raw(), "font-family:Liberation Sans;", "font-family:Liberation Sans,Arimo,Arial,Helvetica,sans-serif;")
}

// inline returns the figure as an element of the page: its colours are variables of the
// page, so that they follow its theme, and its fonts are the page's too.
func (f Figure) inline() string {
	s := f.raw()
	s = s[strings.Index(s, "<svg"):]
	s = fmt.Sprintf(`<svg viewBox="0 0 %g %g" role="img" aria-label="%s">`,
		f.width, f.height, html.EscapeString(f.Alt)) + s[strings.Index(s, ">")+1:]
	swaps := []string{"font-family:Liberation Sans;font-variant:normal;font-weight:normal;font-style:normal;", "", "\n", ""}
	for _, i := range inks() {
		for _, of := range []string{"fill:", "stroke:"} {
			swaps = append(swaps, of+i.light, of+"var(--"+i.name+")")
		}
	}
	return strings.NewReplacer(swaps...).Replace(s)
}

// anchored makes the viewer of an SVG align texts, because its font may not be the one
// that they were measured in. The pen marks such texts with a private-use character.
func anchored(svg string) string {
	for mark, anchor := range map[string]string{"\ue001": "middle", "\ue002": "end"} {
		svg = regexp.MustCompile(`(<text [^>]*)>`+mark).ReplaceAllString(svg, `$1 text-anchor="`+anchor+`">`)
	}
	return svg
}

// undated removes the time of writing from a PDF.
func undated(pdf []byte) []byte {
	return regexp.MustCompile(`(/(?:CreationDate|ModDate) \(D:)\d{14}`).ReplaceAll(pdf, []byte("${1}20000101000000"))
}

// pdfCanvas writes text in the only code page that vgpdf's fonts support.
type pdfCanvas struct{ *vgpdf.Canvas }

func (c pdfCanvas) FillString(f font.Face, pt vg.Point, s string) {
	c.Canvas.FillString(f, pt, windows1252(s))
}

func windows1252(s string) string {
	b := make([]byte, 0, len(s))
	for _, r := range s {
		switch {
		case r < 0x80, r >= 0xa0 && r <= 0xff:
			b = append(b, byte(r))
		case r == '…':
			b = append(b, 0x85)
		case r == '–', r == '−':
			b = append(b, 0x96)
		default:
			b = append(b, '?')
		}
	}
	return string(b)
}

// ink is a colour by its role: the one in a separate file, and the one in the page's
// dark theme. The light colours all differ, because the page finds them by value, and
// none is black, which vgsvg leaves out.
type ink struct{ name, light, dark string }

// The inks. The colours of series differ in lightness as well as hue, so that people
// with the common kinds of colour blindness can tell them apart. Shapes differ too.
const (
	inkPaper = iota
	inkText
	inkMuted
	inkGrid
	inkProcess
	inkSoftirq
	inkIrq
	inkSteal
	inkIdle
	inkSeries // the first of seriesInks
)

const seriesInks = 7

func inks() []ink {
	return []ink{
		inkPaper:      {"paper", "#FFFFFF", "#15181B"},
		inkText:       {"ink", "#1B1F23", "#E6E9EC"},
		inkMuted:      {"muted", "#5B6670", "#9CA7B1"},
		inkGrid:       {"grid", "#DFE4E8", "#31383F"},
		inkProcess:    {"process", "#5B8DB8", "#5F93BF"},
		inkSoftirq:    {"softirq", "#D1622B", "#E8854F"},
		inkIrq:        {"irq", "#7D3C8C", "#C58AD6"},
		inkSteal:      {"steal", "#3F464D", "#C4CCD3"},
		inkIdle:       {"idle", "#EEF1F3", "#23292F"},
		inkSeries:     {"s1", "#0B62A4", "#6CB4EE"},
		inkSeries + 1: {"s2", "#C4500E", "#F2935C"},
		inkSeries + 2: {"s3", "#0A7F5A", "#4CC9A0"},
		inkSeries + 3: {"s4", "#9B3F8F", "#DC9AD3"},
		inkSeries + 4: {"s5", "#937000", "#E0B93F"},
		inkSeries + 5: {"s6", "#1787A5", "#63CBE3"},
		inkSeries + 6: {"s7", "#7A4B3A", "#CBA292"},
	}
}

// pen draws on any canvas, in points from the top left corner.
type pen struct {
	c      vg.Canvas
	height float64
	fonts  *font.Cache
	// anchors leaves the alignment of text to anchored.
	anchors bool
}

type point struct{ x, y float64 }

func (p *pen) at(q point) vg.Point {
	return vg.Point{X: vg.Length(q.x), Y: vg.Length(p.height - q.y)}
}

func (p *pen) colour(i int) {
	var c color.RGBA
	c.A = 0xff
	// The inks are well-formed constants of this file.
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

func (p *pen) rect(x, y, w, h float64, ink int) { p.rects([][4]float64{{x, y, w, h}}, ink) }

// rects fills many rectangles of one colour as one path, which keeps the file of
// hundreds of bars small.
func (p *pen) rects(all [][4]float64, ink int) {
	var path vg.Path
	for _, r := range all {
		x, y, w, h := r[0], r[1], r[2], r[3]
		path = append(path, p.outline([]point{{x, y}, {x + w, y}, {x + w, y + h}, {x, y + h}}, true)...)
	}
	if len(path) > 0 {
		p.colour(ink)
		p.c.Fill(path)
	}
}

func (p *pen) fill(outline []point, ink int) {
	p.colour(ink)
	p.c.Fill(p.outline(outline, true))
}

func (p *pen) line(width float64, ink int, dash []vg.Length, points ...point) {
	p.colour(ink)
	p.c.SetLineWidth(vg.Length(width))
	p.c.SetLineDash(dash, 0)
	p.c.Stroke(p.outline(points, false))
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
func (p *pen) text(q point, s string, size float64, ink int, align float64) {
	if s == "" {
		return
	}
	switch {
	case !p.anchors:
		q.x -= align * p.width(s, size)
	case align == alignCentre:
		s = "\ue001" + s
	case align == alignRight:
		s = "\ue002" + s
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

const markers = 5

// marker is one of a few shapes, filled or hollow.
func (p *pen) marker(shape int, q point, size float64, ink int, filled bool) {
	var path vg.Path
	corners := func(angles ...float64) {
		var points []point
		for _, a := range angles {
			sin, cos := math.Sincos(a * math.Pi / 180)
			points = append(points, point{q.x + 1.25*size*cos, q.y - 1.25*size*sin})
		}
		path = p.outline(points, true)
	}
	switch shape % markers {
	case 0:
		path.Move(p.at(point{q.x + size, q.y}))
		path.Arc(p.at(q), vg.Length(size), 0, 2*math.Pi)
		path.Close()
	case 1:
		corners(45, 135, 225, 315)
	case 2:
		corners(90, 210, 330)
	case 3:
		corners(0, 90, 180, 270)
	case 4:
		corners(270, 30, 150)
	}
	p.colour(ink)
	if !filled {
		p.colour(inkPaper)
	}
	p.c.Fill(path)
	p.colour(ink)
	p.c.SetLineWidth(1.2)
	p.c.SetLineDash(nil, 0)
	p.c.Stroke(path)
}

// ring draws a ring around an existing mark.
func (p *pen) ring(q point, size float64, ink int) {
	var path vg.Path
	path.Move(p.at(point{q.x + size, q.y}))
	path.Arc(p.at(q), vg.Length(size), 0, 2*math.Pi)
	path.Close()
	p.colour(ink)
	p.c.SetLineWidth(1)
	p.c.SetLineDash(nil, 0)
	p.c.Stroke(path)
}
