package report

import (
	"fmt"
	"io"
	"slices"

	"slipstream.dev/internal/report/draw"
	"slipstream.dev/internal/spec"
)

// Figure is a picture, with its numbers and a text alternative for readers who cannot see it.
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
	// First is true if this figure and the next one share a row of the page.
	First bool
	// Data has the numbers that the figure is drawn from.
	Data    Data
	Picture draw.Picture
}

// Section is the section of the page that a figure is in.
type Section string

// Sections of figures.
const (
	SectionSeries   Section = "series"
	SectionScaling  Section = "scaling"
	SectionLatency  Section = "latency"
	SectionCPU      Section = "cpu"
	SectionTimeline Section = "course"
)

// Data is a small table; the first column names the row.
type Data struct {
	Columns []string
	Rows    [][]string
}

// Section returns the figures of one section.
func (m *Model) Section(s Section) []Figure {
	var out []Figure
	for _, f := range m.Figures {
		if f.Section == s {
			out = append(out, f)
		}
	}
	return out
}

// Write writes the picture of a figure in one of draw.Formats.
func (f Figure) Write(w io.Writer, format string) error {
	if err := f.Picture.Write(w, format); err != nil {
		return fmt.Errorf("figure %s as %s: %w", f.Name, format, err)
	}
	return nil
}

// drawFigures returns all figures, in the order of the report.
func (m *Model) drawFigures() []Figure {
	out := slices.Concat(m.seriesFigures(), m.scalingFigures())
	ends := func(pairs []int) []int { // both ends of a list, or one number if they are equal
		return slices.Compact([]int{pairs[0], pairs[len(pairs)-1]})
	}
	// With the most pairs, a NIC or a core is at its limit if it ever is.
	last := func(pairs []int) []int { return pairs[len(pairs)-1:] }
	for _, at := range []struct {
		pairs func([]int) []int
		draw  func(spec.Workload, int) (Figure, bool)
	}{{ends, m.latencyFigure}, {ends, m.cpuFigure}, {ends, m.coresFigure}, {last, m.timelineFigure}, {last, m.nicsFigure}} {
		for _, w := range m.exp.Spec.Workloads {
			all := m.pairsOf(w)
			if len(all) == 0 {
				continue
			}
			chosen := at.pairs(all)
			for i, pairs := range chosen {
				if f, ok := at.draw(w, pairs); ok {
					f.First = i == 0 && len(chosen) > 1
					out = append(out, f)
				}
			}
		}
	}
	return out
}

// variantStyle gives the baseline the colour of text and the host network a dashed grey, because readers compare
// the others with both. A variant has the same style in all figures.
func (m *Model) variantStyle(name string) draw.Style {
	v := m.variant(name)
	switch {
	case name == m.exp.Spec.Baseline:
		return draw.Style{Ink: draw.Text}
	case m.native(v):
		return draw.Style{Ink: draw.Muted, Shape: draw.Diamond, Dashed: true}
	}
	n := 0
	for _, o := range m.exp.Spec.Variants {
		if o.Name == name {
			break
		}
		if o.Name != m.exp.Spec.Baseline && !m.native(o) {
			n++
		}
	}
	return draw.SeriesStyle(n)
}
