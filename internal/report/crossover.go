package report

import (
	"fmt"
	"slices"
	"strings"

	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/stats"
)

// crossovers returns a sentence for each series that is compared with another one: which of the two is faster, and
// where.
func (m *Model) crossovers() []string {
	var out []string
	for _, s := range m.summary.Series {
		points := slices.DeleteFunc(slices.Clone(s.Points), func(p stats.Point) bool { return p.Versus == nil })
		if len(points) > 0 {
			out = append(out, fmt.Sprintf("%s%s: %s.", keyOf(s).title(), keyOf(s).pairsText(), m.crossover(s, points)))
		}
	}
	return out
}

// crossover describes the verdicts of a series along its axis. The points are the values that both series have.
func (m *Model) crossover(s stats.Series, points []stats.Point) string {
	a := m.axis(s.Axis)
	stretches := stretchesOf(points)
	switch {
	case len(stretches) == 0:
		return fmt.Sprintf("no difference of %s from %s is proven at %s", s.Name, s.Versus, a.list(valuesOf(points)))
	case len(stretches) == 1 && len(stretches[0].at) == len(points):
		return fmt.Sprintf("%s is %s everywhere measured, at %s", s.Name, verdictThan(stretches[0].verdict, s.Versus), a.list(stretches[0].at))
	case len(s.Crossovers) == 0 || len(s.Crossovers) != len(stretches)-1:
		return m.atEach(s, points, stretches)
	}
	last := len(s.Crossovers) - 1
	at := func(c stats.Crossover) string {
		return a.between(c.Value, number.Interval{Low: c.CI95[0], High: c.CI95[1]})
	}
	text := fmt.Sprintf("%s is %s from %s on", s.Name, verdictThan(s.Crossovers[last].To, s.Versus), at(s.Crossovers[last]))
	for _, c := range slices.Backward(s.Crossovers[:last]) {
		text += fmt.Sprintf(", %s from %s on", verdictWord(c.To), at(c))
	}
	return text + fmt.Sprintf(", and %s below", verdictWord(s.Crossovers[0].From)) + unproven(a, points, false)
}

// atEach lists the values of each verdict. It is used if no crossovers describe them.
func (m *Model) atEach(s stats.Series, points []stats.Point, stretches []stretch) string {
	a := m.axis(s.Axis)
	var all []string
	for i, one := range stretches {
		what := verdictWord(one.verdict)
		if i == 0 {
			what = verdictThan(one.verdict, s.Versus)
		}
		all = append(all, what+" at "+a.list(one.at))
	}
	return fmt.Sprintf("%s is %s", s.Name, strings.Join(all, ", ")) + unproven(a, points, true)
}

// unproven names the values without a verdict. Those between two different verdicts, where a crossover lies, are
// included only if gaps is true.
func unproven(a axis, points []stats.Point, gaps bool) string {
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

// verdictThan returns "faster than vxlan", and verdictWord just "faster".
func verdictThan(v stats.Verdict, versus string) string {
	if v == stats.Same {
		return "the same as " + versus
	}
	return fmt.Sprintf("%s than %s", v, versus)
}

func verdictWord(v stats.Verdict) string {
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
