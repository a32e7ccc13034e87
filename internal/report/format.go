package report

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"slipstream.dev/internal/metrics"
)

// quantity describes how people see a metric.
type quantity struct {
	name  string  // for headings: "throughput"
	unit  string  // "Gb/s"
	scale float64 // from the metric's unit to unit
}

func quantityOf(metric string) quantity {
	m := metrics.Get(metric)
	return quantity{m.Title, m.Shown, m.Scale}
}

// Quantity formats a value of a metric for people, with its unit.
func Quantity(v float64, metric string) string {
	q := quantityOf(metric)
	return significant(v*q.scale) + " " + q.unit
}

// Estimate is a number for people and its interval, without the unit. The interval is
// empty if there is none, as with a single block.
type Estimate struct{ Value, Interval string }

// String returns "0.86 (0.84–0.88)", for example.
func (e Estimate) String() string { return e.with("") }

// with puts a unit after the value: "41 % (39–43)".
func (e Estimate) with(unit string) string {
	s := e.Value
	if unit != "" {
		s += " " + unit
	}
	if e.Interval != "" {
		s += " (" + e.Interval + ")"
	}
	return s
}

// interval is a 95 % interval. It is unknown if a bound is not finite.
type interval struct{ lo, hi float64 }

func (c interval) known() bool {
	return !math.IsNaN(c.lo-c.hi) && !math.IsInf(c.lo, 0) && !math.IsInf(c.hi, 0) && c.lo <= c.hi
}

// mapped returns the interval under a monotonic f, falling or rising. An unknown
// interval stays unknown: 1/∞ would make it certain.
func (c interval) mapped(f func(float64) float64) interval {
	if !c.known() {
		return c
	}
	a, b := f(c.lo), f(c.hi)
	return interval{math.Min(a, b), math.Max(a, b)}
}

func estimate(v float64, ci interval, decimals int) Estimate {
	e := Estimate{Value: fixed(v, decimals)}
	if ci.known() {
		to := "–"
		switch { // a dash next to a minus is hard to read
		case ci.lo < 0 && ci.hi > 0:
			to = " to +"
		case ci.lo < 0:
			to = " to "
		}
		e.Interval = fixed(ci.lo, decimals) + to + fixed(ci.hi, decimals)
	}
	return e
}

// percent returns an estimate in %, with one decimal if the interval is narrow enough.
func percent(share float64, ci interval) Estimate {
	ci = ci.mapped(func(x float64) float64 { return 100 * x })
	decimals := 0
	if ci.known() && ci.hi-ci.lo < 1 {
		decimals = 1
	}
	return estimate(100*share, ci, decimals)
}

func fixed(v float64, decimals int) string {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return "–"
	}
	s := strconv.FormatFloat(v, 'f', decimals, 64)
	if strings.Trim(s, "-0.") == "" {
		return strings.TrimPrefix(s, "-")
	}
	return strings.Replace(s, "-", "−", 1)
}

// decimalsFor returns the number of decimals for three significant digits of v.
func decimalsFor(v float64) int {
	if v = math.Abs(v); v == 0 || math.IsNaN(v) || math.IsInf(v, 0) {
		return 0
	}
	return min(max(2-int(math.Floor(math.Log10(v))), 0), 6)
}

func significant(v float64) string { return fixed(v, decimalsFor(v)) }

func pValue(p float64) string {
	switch {
	case math.IsNaN(p):
		return ""
	case p < 0.001:
		return "< 0.001"
	}
	return fixed(p, 3)
}

func pairs(n int) string { return plural(n, "pair") }

func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// list joins words for a sentence: "a, b and c".
func list(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " and " + words[last]
}

// slug makes a name fit for a file and an HTML id. Names that differ only in a sign,
// such as rps and rps+, stay different.
func slug(parts ...string) string {
	var b strings.Builder
	for _, r := range strings.ToLower(strings.Join(parts, "-")) {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '-', r == '_':
			b.WriteRune(r)
		case r == '+':
			b.WriteString("-plus")
		default:
			fmt.Fprintf(&b, "-%x", r)
		}
	}
	return b.String()
}
