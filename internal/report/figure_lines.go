package report

import (
	"fmt"
	"slices"
	"strings"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/report/draw"
	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/words"
)

// lineChart is a figure of lines over an axis, of ratios or of values.
type lineChart struct {
	axis  axis
	xs    []float64 // values of the axis, rising
	lines []line
	each  string // what a line stands for, for the table of the numbers
}

// line is one line of a chart.
type line struct {
	name   string
	style  draw.Style
	points []linePoint
}

// linePoint is a value with its text for the table of the numbers.
type linePoint struct {
	draw.Mark
	text string
}

// ratioPoint returns a comparison as a point at a value of the axis.
func ratioPoint(x float64, v *stats.Versus, published []float64) linePoint {
	p := linePoint{Mark: draw.Mark{
		X: x, Y: v.Ratio, CI: number.Of(v.CI95, v.N), Filled: v.Verdict == stats.Faster || v.Verdict == stats.Slower, Rings: published,
	}}
	p.text = strings.TrimSpace(ratio(v.Ratio, v.CI95, v.N).String() + " " + string(v.Verdict))
	if len(published) > 0 {
		p.text += ", published " + ratios(published)
	}
	return p
}

// add adds a line, unless it has no points.
func (c *lineChart) add(l line) {
	if len(l.points) == 0 {
		return
	}
	c.lines = append(c.lines, l)
	for _, p := range l.points {
		if !slices.Contains(c.xs, p.X) {
			c.xs = append(c.xs, p.X)
		}
	}
	slices.Sort(c.xs)
}

// ratios completes the figure of a chart of ratios to a variant or series.
func (c lineChart) ratios(f Figure, versus string) (Figure, bool) {
	f.Caption += " Bars are 95% intervals. A filled mark is faster or slower, a hollow one is the same or inconclusive."
	if slices.ContainsFunc(c.lines, func(l line) bool {
		return slices.ContainsFunc(l.points, func(p linePoint) bool { return len(p.Rings) > 0 })
	}) {
		f.Caption += " A ring is a published figure."
	}
	return c.figure(f, "ratio to "+versus, versus)
}

// values completes the figure of a chart of values in a unit.
func (c lineChart) values(f Figure, unit string) (Figure, bool) {
	f.Caption += " Bars are 95% intervals of the means."
	return c.figure(f, unit, "")
}

// figure fills in the parts that charts of ratios and of values share. It returns false if there are no lines.
func (c lineChart) figure(f Figure, yTitle, reference string) (Figure, bool) {
	if len(c.lines) == 0 {
		return Figure{}, false
	}
	f.Data = Data{Columns: []string{c.each}}
	for _, x := range c.xs {
		f.Data.Columns = append(f.Data.Columns, c.axis.at(x))
	}
	chart := draw.Lines{Xs: c.xs, XTitle: c.axis.title, XTick: c.axis.tick, YTitle: yTitle, Reference: reference}
	var ends []string
	for _, l := range c.lines {
		f.Data.Rows = append(f.Data.Rows, l.row(c.xs))
		last := l.points[len(l.points)-1]
		ends = append(ends, fmt.Sprintf("%s %s at %s", l.name, last.text, c.axis.at(last.X)))
		curve := draw.Curve{Name: l.name, Style: l.style}
		for _, p := range l.points {
			curve.Marks = append(curve.Marks, p.Mark)
		}
		chart.Curves = append(chart.Curves, curve)
	}
	f.Alt = fmt.Sprintf("%s at %s: %s.", f.Title, c.axis.list(c.xs), words.And(ends))
	f.Picture = chart.Picture()
	return f, true
}

// row returns the line's row of the table of the numbers.
func (l line) row(xs []float64) []string {
	row := []string{l.name}
	for _, x := range xs {
		text := "–"
		for _, p := range l.points {
			if p.X == x {
				text = p.text
			}
		}
		row = append(row, text)
	}
	return row
}

// scalingFigures returns the figures of ratios over the number of pairs, for each workload and baseline.
func (m *Model) scalingFigures() []Figure {
	var out []Figure
	for _, w := range m.exp.Spec.Workloads {
		tables := m.judgedTables(w.Name)
		if len(tables) == 0 {
			continue
		}
		for _, versus := range tables[0].Baselines {
			if f, ok := m.scalingFigure(tables[0], versus); ok {
				out = append(out, f)
			}
		}
	}
	return out
}

// scalingFigure draws the ratios of variants to one of them over the number of pairs, unless they are in the
// figures of a series.
func (m *Model) scalingFigure(t Table, versus string) (Figure, bool) {
	c := lineChart{axis: m.axis(spec.AxisPairs), each: "Variant"}
	for _, p := range t.Pairs {
		c.xs = append(c.xs, float64(p))
	}
	for _, row := range t.Rows {
		if m.inSeries(t, row.Variant, versus) {
			continue
		}
		line := line{name: row.Variant, style: m.variantStyle(row.Variant)}
		for i, l := range row.Cells {
			if l.drawable() && l.Versus == versus {
				line.points = append(line.points, ratioPoint(float64(t.Pairs[i]), l.row.Versus, l.published))
			}
		}
		c.add(line)
	}
	return c.ratios(Figure{
		Section: SectionScaling,
		Name:    slug(t.Workload, t.Metric, "versus", versus),
		Title:   fmt.Sprintf("%s relative to %s", capitalized(t.Title), versus),
		Caption: fmt.Sprintf("Ratio to %s in the same block; %s is better.", versus, t.Better),
	}, versus)
}

// inSeries reports whether a figure of a series already shows the ratios of a variant to another one: a series over
// pairs has the same ratios, and a series of variants shows them along its own axis.
func (m *Model) inSeries(t Table, variant, versus string) bool {
	return slices.ContainsFunc(m.summary.Series, func(s stats.Series) bool {
		return s.Workload == t.Workload && s.Metric == t.Metric && slices.ContainsFunc(s.Points, func(p stats.Point) bool {
			over := s.Axis == spec.AxisPairs && p.Versus != nil && p.Versus.Baseline == versus
			return p.Variant == variant && (over || spec.OfVariants(s.Axis))
		})
	})
}

// seriesKey identifies the figure in which a series is drawn.
type seriesKey struct {
	axis, workload string
	pairs          int
	metric         string
}

func keyOf(s stats.Series) seriesKey { return seriesKey{s.Axis, s.Workload, s.Pairs, s.Metric} }

// title returns "ab time of all requests", for example, and pairsText ", 1 pair".
func (k seriesKey) title() string { return k.workload + " " + quantityOf(k.metric).name }

func (k seriesKey) pairsText() string {
	if k.pairs == 0 {
		return ""
	}
	return ", " + pairs(k.pairs)
}

// slug returns the name of a figure.
func (k seriesKey) slug(more ...string) string {
	parts := []string{k.workload, k.metric, "over", k.axis}
	if k.pairs > 0 {
		parts = append(parts, fmt.Sprint(k.pairs))
	}
	return slug(append(parts, more...)...)
}

// seriesFigures returns the figures for each key: one of the values of all series, and one of ratios for each series
// that others are compared with.
func (m *Model) seriesFigures() []Figure {
	var out []Figure
	var keys []seriesKey
	for _, s := range m.summary.Series {
		if k := keyOf(s); !slices.Contains(keys, k) {
			keys = append(keys, k)
		}
	}
	for _, k := range keys {
		if f, ok := m.valuesFigure(k); ok {
			out = append(out, f)
		}
		for _, other := range m.exp.Spec.Series {
			if f, ok := m.ratiosFigure(k, other.Name); ok {
				out = append(out, f)
			}
		}
	}
	return out
}

// seriesStyle gives the series that others are compared with the colour of text.
func (m *Model) seriesStyle(name string) draw.Style {
	n := 0
	for _, s := range m.exp.Spec.Series {
		versus := slices.ContainsFunc(m.exp.Spec.Series, func(o spec.Series) bool { return o.Versus == s.Name })
		switch {
		case s.Name == name && versus:
			return draw.Style{Ink: draw.Text, Shape: draw.Diamond}
		case s.Name == name:
			return draw.SeriesStyle(n)
		case !versus:
			n++
		}
	}
	return draw.Style{Ink: draw.Text}
}

// valuesFigure shows the measured values, in their unit.
func (m *Model) valuesFigure(k seriesKey) (Figure, bool) {
	c := lineChart{axis: m.axis(k.axis), each: "Series"}
	q := quantityOf(k.metric)
	for _, s := range m.summary.Series {
		if keyOf(s) != k {
			continue
		}
		line := line{name: s.Name, style: m.seriesStyle(s.Name)}
		for _, p := range s.Points {
			if r := m.rows[cell{p.Variant, p.Workload, p.Pairs, k.metric}]; r != nil && r.N > 0 {
				mark := draw.Mark{X: p.Value, Y: r.Mean * q.scale, CI: number.Of(r.CI95, r.N).Scale(q.scale), Filled: true}
				line.points = append(line.points, linePoint{mark, q.estimate(r.Mean, r.CI95, r.N).With(q.unit)})
			}
		}
		c.add(line)
	}
	return c.values(Figure{
		Section: SectionSeries,
		Name:    k.slug(),
		Title:   fmt.Sprintf("%s over %s%s", capitalized(k.title()), k.axis, k.pairsText()),
		Caption: capitalized(string(metrics.Get(k.metric).Better)) + " is better.",
	}, q.unit)
}

// ratiosFigure shows the ratios of series to one of them.
func (m *Model) ratiosFigure(k seriesKey, versus string) (Figure, bool) {
	c := lineChart{axis: m.axis(k.axis), each: "Series"}
	for _, s := range m.summary.Series {
		if keyOf(s) != k || s.Versus != versus {
			continue
		}
		line := line{name: s.Name, style: m.seriesStyle(s.Name)}
		for _, p := range s.Points {
			if p.Versus != nil {
				row := &stats.Row{Variant: p.Variant, Workload: p.Workload, Pairs: p.Pairs, Metric: k.metric, Versus: p.Versus}
				line.points = append(line.points, ratioPoint(p.Value, p.Versus, m.publishedRatios(row)))
			}
		}
		c.add(line)
	}
	return c.ratios(Figure{
		Section: SectionSeries,
		Name:    k.slug("versus", versus),
		Title:   fmt.Sprintf("%s relative to %s over %s%s", capitalized(k.title()), versus, k.axis, k.pairsText()),
		Caption: fmt.Sprintf("Ratio to %s at the same value, in the same block; %s is better.", versus, metrics.Get(k.metric).Better),
	}, versus)
}
