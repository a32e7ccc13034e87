package draw

import (
	"fmt"
	"strings"
)

// Ink names a colour by its role.
type Ink int

// The inks. The colours of series differ in lightness as well as hue, so that people with the common kinds of
// colour blindness can tell them apart. Shapes differ too.
const (
	Paper Ink = iota
	Text
	Muted
	Grid
	Process
	Softirq
	IRQ
	Steal
	Idle
	Series // the first of seriesInks
)

const seriesInks = 7

// ink is a colour: its name in CSS, its value in files and light pages, and its value in dark pages. The light values
// all differ, because InlineSVG replaces them by value. None is black, because vgsvg omits black.
type ink struct{ name, light, dark string }

func inks() []ink {
	return []ink{
		Paper:      {"paper", "#FFFFFF", "#15181B"},
		Text:       {"ink", "#1B1F23", "#E6E9EC"},
		Muted:      {"muted", "#5B6670", "#9CA7B1"},
		Grid:       {"grid", "#DFE4E8", "#31383F"},
		Process:    {"process", "#5B8DB8", "#5F93BF"},
		Softirq:    {"softirq", "#D1622B", "#E8854F"},
		IRQ:        {"irq", "#7D3C8C", "#C58AD6"},
		Steal:      {"steal", "#3F464D", "#C4CCD3"},
		Idle:       {"idle", "#EEF1F3", "#23292F"},
		Series:     {"s1", "#0B62A4", "#6CB4EE"},
		Series + 1: {"s2", "#C4500E", "#F2935C"},
		Series + 2: {"s3", "#0A7F5A", "#4CC9A0"},
		Series + 3: {"s4", "#9B3F8F", "#DC9AD3"},
		Series + 4: {"s5", "#937000", "#E0B93F"},
		Series + 5: {"s6", "#1787A5", "#63CBE3"},
		Series + 6: {"s7", "#7A4B3A", "#CBA292"},
	}
}

// CSS returns the inks as variables of a page.
func CSS() string {
	var light, dark strings.Builder
	for _, i := range inks() {
		fmt.Fprintf(&light, "--%s:%s;", i.name, i.light)
		fmt.Fprintf(&dark, "--%s:%s;", i.name, i.dark)
	}
	// Paper is light even if the screen is dark.
	return ":root{" + light.String() + "}\n@media screen and (prefers-color-scheme:dark){:root{" + dark.String() + "}}\n"
}

// Style says how a series is drawn.
type Style struct {
	Ink    Ink
	Shape  Shape
	Dashed bool
}

// SeriesStyle returns the style of the nth series.
func SeriesStyle(n int) Style {
	return Style{Ink: Series + Ink(n%seriesInks), Shape: Shape(n) % shapes}
}

// Shape is the shape of a series' markers.
type Shape int

// The shapes.
const (
	Circle Shape = iota
	Square
	Triangle
	Diamond
	TriangleDown
	shapes
)
