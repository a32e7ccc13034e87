package draw

import (
	"cmp"
	"math"
	"slices"
)

// Step is a value between two times, in seconds.
type Step struct{ From, To, Value float64 }

// Steps is a value over time, without overlaps.
type Steps []Step

// Map returns the steps with other values.
func (s Steps) Map(f func(float64) float64) Steps {
	var out Steps
	for _, one := range s {
		out = append(out, Step{one.From, one.To, f(one.Value)})
	}
	return out
}

// Share returns the share of the time for which a condition holds.
func (s Steps) Share(holds func(Step) bool) float64 {
	var all, part float64
	for _, one := range s {
		all += one.To - one.From
		if holds(one) {
			part += one.To - one.From
		}
	}
	if all == 0 {
		return 0
	}
	return part / all
}

// Mean returns the mean over time.
func (s Steps) Mean() float64 {
	var time, sum float64
	for _, one := range s {
		time += one.To - one.From
		sum += (one.To - one.From) * one.Value
	}
	return sum / max(time, 1e-9)
}

// Range returns the lowest value, the median and the highest.
func (s Steps) Range() (lowest, median, highest float64) {
	if len(s) == 0 {
		return 0, 0, 0
	}
	sorted := slices.SortedFunc(slices.Values(s), func(a, b Step) int { return cmp.Compare(a.Value, b.Value) })
	return sorted[0].Value, sorted[(len(s)-1)/2].Value, sorted[len(s)-1].Value
}

// End returns the end of the last step.
func (s Steps) End() float64 {
	if len(s) == 0 {
		return 0
	}
	return s[len(s)-1].To
}

// mostSteps is the number of levels that a panel has room for.
const mostSteps = 60

// groups joins neighbouring steps into at most mostSteps groups.
func (s Steps) groups() (groups []Steps) {
	size := (len(s) + mostSteps - 1) / mostSteps
	for from := 0; from < len(s); from += size {
		groups = append(groups, s[from:min(from+size, len(s))])
	}
	return groups
}

// line returns points of time and value, with a level for each step. If the steps are too short to draw, it has
// the lowest and the highest level of each group, which keeps their spikes.
func (s Steps) line() (line []point) {
	for _, group := range s.groups() {
		lowest, _, highest := group.Range()
		if lowest < highest {
			line = append(line, point{group[0].From, lowest})
		}
		line = append(line, point{group[0].From, highest}, point{group.End(), highest})
	}
	return line
}

// stepLine draws the levels. place converts a time and a value into a point.
func (p *pen) stepLine(s Steps, ink Ink, place func(t, v float64) point) {
	line := s.line()
	for i, q := range line {
		line[i] = place(q.x, q.y)
	}
	if len(line) > 0 {
		p.line(1.2, ink, nil, line...)
	}
}

// stepArea fills the area below the means of the groups.
func (p *pen) stepArea(s Steps, ink Ink, place func(t, v float64) point) {
	if len(s) == 0 {
		return
	}
	outline := []point{place(s[0].From, 0)}
	for _, group := range s.groups() {
		from, to := place(group[0].From, group.Mean()), place(group.End(), group.Mean())
		if last := len(outline) - 1; math.Abs(outline[last].y-from.y) < 0.05 && last > 0 {
			outline[last] = to
			continue
		}
		outline = append(outline, from, to)
	}
	p.fill(append(outline, place(s.End(), 0)), ink)
}
