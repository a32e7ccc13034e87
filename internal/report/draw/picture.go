// Package draw draws charts: lines, percentiles, stacked bars, dots, time series, and the bars of ratios in a
// table. A chart is a value that describes what to draw; its Picture can be written as SVG, PNG or PDF. The
// package knows values and names, but nothing about results: internal/report decides what is drawn and says what it
// means.
package draw

import (
	"bytes"
	"fmt"
	"html"
	"io"
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

// Picture is a chart after its layout.
type Picture struct {
	width, height float64 // in points
	draw          func(*pen)
}

// Measures of every picture, in points.
const (
	pictureWidth = 366.0 // two side by side on a desk, one on a phone
	small        = 9.0   // ticks
	normal       = 10.0  // labels
)

// Formats returns the formats that Write can write.
func Formats() []string { return []string{"svg", "png", "pdf"} }

// Write writes the picture in one of Formats. The same picture gives the same bytes.
func (p Picture) Write(w io.Writer, format string) error {
	var buf bytes.Buffer
	var err error
	switch format {
	case "svg":
		buf.WriteString(p.SVG())
	case "png":
		// Three times the nominal resolution: enough for a slide.
		c := vgimg.PngCanvas{Canvas: vgimg.NewWith(vgimg.UseWH(vg.Length(p.width), vg.Length(p.height)), vgimg.UseDPI(216))}
		p.on(c, false)
		_, err = c.WriteTo(&buf)
	case "pdf":
		c := pdfCanvas{vgpdf.New(vg.Length(p.width), vg.Length(p.height))}
		p.on(c, false)
		if _, err = c.WriteTo(&buf); err == nil {
			buf = *bytes.NewBuffer(undated(buf.Bytes()))
		}
	default:
		return fmt.Errorf("the format is none of %s", strings.Join(Formats(), ", "))
	}
	if err == nil {
		_, err = w.Write(buf.Bytes())
	}
	return err
}

// fonts has the one font that pictures are laid out with; plot's own collection has twelve.
var fonts = sync.OnceValue(func() font.Collection {
	face, err := opentype.Parse(liberationsansregular.TTF)
	if err != nil {
		panic(err) // the font is part of the program
	}
	return font.Collection{{Font: font.Font{Typeface: "Liberation", Variant: "Sans"}, Face: face}}
})

func (p Picture) on(c vg.Canvas, anchors bool) {
	pen := &pen{c: c, height: p.height, anchors: anchors, fonts: font.NewCache(fonts())}
	pen.rect(0, 0, p.width, p.height, Paper)
	p.draw(pen)
}

func (p Picture) rawSVG() string {
	c := vgsvg.New(vg.Length(p.width), vg.Length(p.height))
	p.on(c, true)
	var b strings.Builder
	_, _ = c.WriteTo(&b) // a strings.Builder takes everything
	return anchored(b.String())
}

// SVG returns the picture as a file. It names fonts with the same metrics as the one that the picture was laid
// out with.
func (p Picture) SVG() string {
	return strings.ReplaceAll(p.rawSVG(), "font-family:Liberation Sans;", "font-family:Liberation Sans,Arimo,Arial,Helvetica,sans-serif;")
}

// InlineSVG returns the picture as an element of an HTML page, with a text alternative: its colours are
// variables of the page, so that they follow its theme, and its fonts are the page's too.
func (p Picture) InlineSVG(alt string) string {
	s := p.rawSVG()
	s = s[strings.Index(s, "<svg"):]
	s = fmt.Sprintf(`<svg viewBox="0 0 %g %g" role="img" aria-label="%s">`,
		p.width, p.height, html.EscapeString(alt)) + s[strings.Index(s, ">")+1:]
	swaps := []string{"font-family:Liberation Sans;font-variant:normal;font-weight:normal;font-style:normal;", "", "\n", ""}
	for _, i := range inks() {
		for _, of := range []string{"fill:", "stroke:"} {
			swaps = append(swaps, of+i.light, of+"var(--"+i.name+")")
		}
	}
	return strings.NewReplacer(swaps...).Replace(s)
}

// Marks that the pen puts before texts that the viewer of an SVG aligns.
const (
	markMiddle = "\ue001"
	markEnd    = "\ue002"
)

// anchored turns the marks into text-anchor attributes. The viewer then aligns the texts, because its font may differ
// from the one that measured them.
func anchored(svg string) string {
	for mark, anchor := range map[string]string{markMiddle: "middle", markEnd: "end"} {
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
