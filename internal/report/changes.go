package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report/draw"
	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/stats"
)

// Changes shows a comparison of two runs: the rows that its gate considers. If Strict
// is true, an inconclusive row is a failure.
type Changes struct {
	*stats.Comparison
	Strict bool
	// Setups lists the differences between the setups of the two runs. They may be the point of the comparison, or
	// explain its outcome.
	Setups []Difference
}

// NewChanges prepares the comparison of two results, given their environments.
func NewChanges(c *stats.Comparison, results [2]stats.Result, environments [2]record.Environment) Changes {
	var sides [2]*Model
	for i, r := range results {
		sides[i] = &Model{Environment: environments[i], exp: r.Experiment}
		sides[i].describeSetup(r.Trials)
	}
	return Changes{Comparison: c, Setups: differences(sides)}
}

// Change is one row, as text.
type Change struct {
	Variant, Workload, Metric, Unit string
	Pairs                           int
	Before, After, Ratio            string
	Verdict                         stats.Verdict
	// Bar shows how many times better the second run is.
	Bar *Bar

	description string
}

// Name returns the name of the first or the second run.
func (c Changes) Name(i int) string { return [...]string{c.Before.Name, c.After.Name}[i] }

// scale returns the scale of all bars.
func (c Changes) scale() draw.Scale {
	var all []draw.Ratio
	for i := range c.Comparison.Changes {
		if r := &c.Comparison.Changes[i]; r.Decides {
			all = append(all, gainOf(&r.Row, nil))
		}
	}
	return draw.ScaleOf(all)
}

// Ticks returns the axis under the bars.
func (c Changes) Ticks() []draw.Tick { return c.scale().Ticks() }

// Rows returns the rows that the gate considers.
func (c Changes) Rows() []Change {
	var out []Change
	scale := c.scale()
	for i := range c.Comparison.Changes {
		r := &c.Comparison.Changes[i]
		if !r.Decides {
			continue
		}
		q := quantityOf(r.Metric)
		show := func(v float64) string { return number.Significant(v * q.scale) }
		out = append(out, Change{
			Variant: r.Variant, Workload: r.Workload, Metric: q.name, Unit: q.unit, Pairs: r.Pairs,
			Before: show(r.Before), After: show(r.Mean),
			Ratio: ratio(r.Versus.Ratio, r.Versus.CI95, r.Versus.N).String(), Verdict: r.Versus.Verdict,
			Bar:         newBar(scale, gainOf(&r.Row, nil), &r.Row, nil),
			description: r.Variant + ": " + Describe(&r.Row),
		})
	}
	return out
}

// Notices returns what a reader must know before reading anything else.
func (c Changes) Notices() []string {
	var out []string
	for _, side := range []stats.Side{c.Before, c.After} {
		if side.Unfinished != "" {
			out = append(out, fmt.Sprintf("%s is unfinished: %s.", side.Name, side.Unfinished))
		}
	}
	for _, d := range c.Setups {
		if d.Name == startedFact || d.Name == commandFact {
			continue // these differ between any two runs
		}
		out = append(out, fmt.Sprintf("%s differs: %s in %s, %s in %s.", d.Name, cmp.Or(d.Sides[0], "nothing"), c.Before.Name, cmp.Or(d.Sides[1], "nothing"), c.After.Name))
	}
	return out
}

// NotCompared lists the workloads whose traffic differs between the runs.
func (c Changes) NotCompared() (out []string) {
	for _, other := range c.OtherTraffic {
		out = append(out, other+". It was not compared.")
	}
	return out
}

// Summary describes the comparison in a sentence or two.
func (c Changes) Summary() string {
	count := map[stats.Verdict]int{}
	var slower []string
	rows := c.Rows()
	for _, r := range rows {
		count[r.Verdict]++
		if r.Verdict == stats.Slower {
			slower = append(slower, r.description)
		}
	}
	if len(rows) == 0 {
		return "The results have no variant, workload and number of pairs in common, so nothing was compared."
	}
	text := fmt.Sprintf("%s compared with %s: %d faster, %d slower, %d the same, %d inconclusive.", c.After.Name, c.Before.Name,
		count[stats.Faster], count[stats.Slower], count[stats.Same], count[stats.Inconclusive])
	if len(slower) > 0 {
		text += " Slower: " + strings.Join(slower[:min(len(slower), few)], "; ")
		if more := len(slower) - few; more > 0 {
			text += fmt.Sprintf("; and %d more", more)
		}
		text += "."
	}
	return text
}

// Compared reports whether there was any row for a gate to consider.
func (c Changes) Compared() bool {
	return slices.ContainsFunc(c.Comparison.Changes, func(r stats.Change) bool { return r.Decides })
}
