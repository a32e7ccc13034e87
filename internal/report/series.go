package report

import (
	"fmt"
	"slices"
	"strings"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

// traffic is the traffic and the axis that the series of a figure have in common.
type traffic struct {
	axis, workload string
	pairs          int
	metric         string
}

func trafficOf(s stats.Series) traffic { return traffic{s.Axis, s.Workload, s.Pairs, s.Metric} }

// what returns "ab time of all requests", for example, and at ", 1 pair".
func (t traffic) what() string { return t.workload + " " + quantityOf(t.metric).name }

func (t traffic) at() string {
	if t.pairs == 0 {
		return ""
	}
	return ", " + pairs(t.pairs)
}

// slug returns the name of a figure.
func (t traffic) slug(more ...string) string {
	parts := []string{t.workload, t.metric, "over", t.axis}
	if t.pairs > 0 {
		parts = append(parts, fmt.Sprint(t.pairs))
	}
	return slug(append(parts, more...)...)
}

// inSeries reports whether the figures of series already show the ratios of a table's variant to another
// one. Over pairs the ratios are the same, and variants that differ along an axis are lines over that
// axis.
func (m *Model) inSeries(t Table, variant, versus string) bool {
	return slices.ContainsFunc(m.summary.Series, func(s stats.Series) bool {
		return s.Workload == t.Workload && s.Metric == t.Metric && slices.ContainsFunc(s.Points, func(p stats.Point) bool {
			over := s.Axis == spec.AxisPairs && p.Versus != nil && p.Versus.Baseline == versus
			return p.Variant == variant && (over || spec.OfVariants(s.Axis))
		})
	})
}

// seriesFigures returns the figures for each traffic: one with the values of all series, and one for
// each series that others are compared with, with the ratios to it.
func (m *Model) seriesFigures() []Figure {
	var out []Figure
	var order []traffic
	for _, s := range m.summary.Series {
		if t := trafficOf(s); !slices.Contains(order, t) {
			order = append(order, t)
		}
	}
	for _, t := range order {
		if f, ok := m.valuesFigure(t); ok {
			out = append(out, f)
		}
		for _, other := range m.exp.Spec.Series {
			if f, ok := m.ratiosFigure(t, other.Name); ok {
				out = append(out, f)
			}
		}
	}
	return out
}

// seriesLook describes how a series is drawn. Those that others are compared with have the colour of
// text.
func (m *Model) seriesLook(name string) look {
	n := 0
	for _, s := range m.exp.Spec.Series {
		versus := slices.ContainsFunc(m.exp.Spec.Series, func(o spec.Series) bool { return o.Versus == s.Name })
		switch {
		case s.Name == name && versus:
			return look{ink: inkText, shape: 3}
		case s.Name == name:
			return look{ink: inkSeries + n%seriesInks, shape: n % markers}
		case !versus:
			n++
		}
	}
	return look{ink: inkText}
}

// valuesFigure shows the measured values, in their unit.
func (m *Model) valuesFigure(t traffic) (Figure, bool) {
	c := chart{axis: m.axis(t.axis), each: "Series"}
	q := quantityOf(t.metric)
	for _, s := range m.summary.Series {
		if trafficOf(s) != t {
			continue
		}
		line := curve{name: s.Name, look: m.seriesLook(s.Name)}
		for _, p := range s.Points {
			if r := m.rows[cell{p.Variant, p.Workload, p.Pairs, t.metric}]; r != nil && r.N > 0 {
				y, ci := r.Mean*q.scale, of(r.CI95, r.N).mapped(func(x float64) float64 { return x * q.scale })
				line.points = append(line.points, sample{x: p.Value, y: y, ci: ci, filled: true, text: estimate(y, ci, decimalsFor(y)).with(q.unit)})
			}
		}
		c.add(line)
	}
	return c.values(Figure{
		Section: SectionSeries,
		Name:    t.slug(),
		Title:   fmt.Sprintf("%s over %s%s", upper(t.what()), t.axis, t.at()),
		Caption: upper(string(metrics.Get(t.metric).Better)) + " is better.",
	}, q.unit), len(c.curves) > 0
}

// ratiosFigure shows the ratios of series to one of them.
func (m *Model) ratiosFigure(t traffic, versus string) (Figure, bool) {
	c := chart{axis: m.axis(t.axis), each: "Series"}
	for _, s := range m.summary.Series {
		if trafficOf(s) != t || s.Versus != versus {
			continue
		}
		line := curve{name: s.Name, look: m.seriesLook(s.Name)}
		for _, p := range s.Points {
			if p.Versus != nil {
				row := &stats.Row{Variant: p.Variant, Workload: p.Workload, Pairs: p.Pairs, Metric: t.metric, Versus: p.Versus}
				line.points = append(line.points, ratioSample(p.Value, p.Versus, theirs(m.summary.Published, row)))
			}
		}
		c.add(line)
	}
	if len(c.curves) == 0 {
		return Figure{}, false
	}
	return c.ratios(Figure{
		Section: SectionSeries,
		Name:    t.slug("versus", versus),
		Title:   fmt.Sprintf("%s relative to %s over %s%s", upper(t.what()), versus, t.axis, t.at()),
		Caption: fmt.Sprintf("Ratio to %s at the same value, in the same block; %s is better.", versus, metrics.Get(t.metric).Better),
	}, versus), true
}

// crossovers say, for each series that is compared with another one, which of them is faster, and where.
func (m *Model) crossovers() []string {
	var out []string
	for _, s := range m.summary.Series {
		points := slices.DeleteFunc(slices.Clone(s.Points), func(p stats.Point) bool { return p.Versus == nil })
		if len(points) > 0 {
			out = append(out, fmt.Sprintf("%s%s: %s.", trafficOf(s).what(), trafficOf(s).at(), m.crossover(s, points)))
		}
	}
	return out
}

// crossover words the verdicts of a series at the values that the other series has too.
func (m *Model) crossover(s stats.Series, points []stats.Point) string {
	a := m.axis(s.Axis)
	stretches := stretchesOf(points)
	switch {
	case len(stretches) == 0:
		return fmt.Sprintf("no difference of %s from %s is proven at %s", s.Name, s.Versus, a.list(valuesOf(points)))
	case len(stretches) == 1 && len(stretches[0].at) == len(points):
		return fmt.Sprintf("%s is %s everywhere measured, at %s", s.Name, than(stretches[0].verdict, s.Versus), a.list(stretches[0].at))
	case len(s.Crossovers) == 0 || len(s.Crossovers) != len(stretches)-1:
		return m.atEach(s, points, stretches)
	}
	last := len(s.Crossovers) - 1
	at := func(c stats.Crossover) string { return a.between(c.Value, interval{c.CI95[0], c.CI95[1]}) }
	text := fmt.Sprintf("%s is %s from %s on", s.Name, than(s.Crossovers[last].To, s.Versus), at(s.Crossovers[last]))
	for _, c := range slices.Backward(s.Crossovers[:last]) {
		text += fmt.Sprintf(", %s from %s on", alone(c.To), at(c))
	}
	return text + fmt.Sprintf(", and %s below", alone(s.Crossovers[0].From)) + open(a, points, false)
}

// atEach lists the values of each verdict. It is used if no crossovers describe them.
func (m *Model) atEach(s stats.Series, points []stats.Point, stretches []stretch) string {
	a := m.axis(s.Axis)
	var all []string
	for i, one := range stretches {
		what := alone(one.verdict)
		if i == 0 {
			what = than(one.verdict, s.Versus)
		}
		all = append(all, what+" at "+a.list(one.at))
	}
	return fmt.Sprintf("%s is %s", s.Name, strings.Join(all, ", ")) + open(a, points, true)
}

// open names the values without a verdict. It includes those between two different verdicts, where a
// crossover is, only if gaps is true.
func open(a axis, points []stats.Point, gaps bool) string {
	var xs []float64
	for i, p := range points {
		below, above := stretchesOf(points[:i]), stretchesOf(points[i:])
		gap := len(below) > 0 && len(above) > 0 && below[len(below)-1].verdict != above[0].verdict
		if p.Versus.Verdict == stats.Inconclusive && (gaps || !gap) {
			xs = append(xs, p.Value)
		}
	}
	if len(xs) == 0 {
		return ""
	}
	return "; no difference is proven at " + a.list(xs)
}

// than words a verdict with what it is relative to, alone without it.
func than(v stats.Verdict, versus string) string {
	if v == stats.Same {
		return "the same as " + versus
	}
	return fmt.Sprintf("%s than %s", v, versus)
}

func alone(v stats.Verdict) string {
	if v == stats.Same {
		return "the same"
	}
	return string(v)
}

// stretch is a sequence of values with the same verdict. Values without a verdict do not end it.
type stretch struct {
	verdict stats.Verdict
	at      []float64
}

func stretchesOf(points []stats.Point) []stretch {
	var out []stretch
	for _, p := range points {
		switch v := p.Versus.Verdict; {
		case v == stats.Inconclusive:
			continue
		case len(out) == 0 || out[len(out)-1].verdict != v:
			out = append(out, stretch{verdict: v})
		}
		last := &out[len(out)-1]
		last.at = append(last.at, p.Value)
	}
	return out
}

func valuesOf(points []stats.Point) []float64 {
	var out []float64
	for _, p := range points {
		out = append(out, p.Value)
	}
	return out
}
