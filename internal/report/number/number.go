// Package number formats numbers and their intervals for people. It knows no metrics and no units.
package number

import (
	"math"
	"strconv"
	"strings"
)

// Interval is a 95% interval. It is unknown if a bound is not finite.
type Interval struct{ Low, High float64 }

// Of returns the interval of n blocks. One block has none, whatever ci is.
func Of(ci [2]float64, n int) Interval {
	if n < 2 {
		return Interval{math.Inf(-1), math.Inf(1)}
	}
	return Interval{ci[0], ci[1]}
}

// Known reports whether the interval has both bounds.
func (c Interval) Known() bool {
	return !math.IsNaN(c.Low-c.High) && !math.IsInf(c.Low, 0) && !math.IsInf(c.High, 0) && c.Low <= c.High
}

// Map returns the interval under a monotonic f, falling or rising. An unknown interval stays unknown: 1/∞ would
// make it certain.
func (c Interval) Map(f func(float64) float64) Interval {
	if !c.Known() {
		return c
	}
	a, b := f(c.Low), f(c.High)
	return Interval{math.Min(a, b), math.Max(a, b)}
}

// Scale returns the interval in another unit.
func (c Interval) Scale(factor float64) Interval {
	return c.Map(func(x float64) float64 { return x * factor })
}

// Inverse returns the interval of the inverse.
func (c Interval) Inverse() Interval { return c.Map(func(x float64) float64 { return 1 / x }) }

// Estimate is a value and its interval as text, without the unit. The interval is empty if there is none, as
// with a single block.
type Estimate struct{ Value, Interval string }

// String returns "0.86 (0.84–0.88)", for example.
func (e Estimate) String() string { return e.With("") }

// With puts a unit after the value: "41% (39–43)".
func (e Estimate) With(unit string) string {
	s := WithUnit(e.Value, unit)
	if e.Interval != "" {
		s += " (" + e.Interval + ")"
	}
	return s
}

// WithUnit puts a unit after a value: "1.2 Gb/s", but "41%".
func WithUnit(value, unit string) string {
	if unit == "" || unit == "%" {
		return value + unit
	}
	return value + " " + unit
}

// Format formats a value and its interval with the same number of decimals.
func Format(v float64, ci Interval, decimals int) Estimate {
	e := Estimate{Value: Fixed(v, decimals)}
	if ci.Known() {
		to := "–"
		switch { // a dash next to a minus is hard to read
		case ci.Low < 0 && ci.High > 0:
			to = " to +"
		case ci.Low < 0:
			to = " to "
		}
		e.Interval = Fixed(ci.Low, decimals) + to + Fixed(ci.High, decimals)
	}
	return e
}

// Percent formats a share in %, with one decimal if the interval is narrow enough.
func Percent(share float64, ci Interval) Estimate {
	ci = ci.Scale(100)
	decimals := 0
	if ci.Known() && ci.High-ci.Low < 1 {
		decimals = 1
	}
	return Format(100*share, ci, decimals)
}

// Share formats a share in whole %.
func Share(share float64) string { return WithUnit(Fixed(100*share, 0), "%") }

// Fixed formats a value with a number of decimals, and a dash if it is not finite.
func Fixed(v float64, decimals int) string {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return "–"
	}
	s := strconv.FormatFloat(v, 'f', decimals, 64)
	if strings.Trim(s, "-0.") == "" {
		return strings.TrimPrefix(s, "-")
	}
	return strings.Replace(s, "-", "−", 1)
}

// Decimals returns the number of decimals for three significant digits of v.
func Decimals(v float64) int {
	if v = math.Abs(v); v == 0 || math.IsNaN(v) || math.IsInf(v, 0) {
		return 0
	}
	return min(max(2-int(math.Floor(math.Log10(v))), 0), 6)
}

// DecimalsWritten returns the number of decimals, up to 6, that x needs to be printed exactly.
func DecimalsWritten(x float64) int {
	for n := range 6 {
		if scaled := x * math.Pow10(n); math.Abs(scaled-math.Round(scaled)) < 1e-6*scaled {
			return n
		}
	}
	return 6
}

// Significant formats a value with three significant digits.
func Significant(v float64) string { return Fixed(v, Decimals(v)) }

// PValue formats a p-value.
func PValue(p float64) string {
	switch {
	case math.IsNaN(p):
		return ""
	case p < 0.001:
		return "< 0.001"
	}
	return Fixed(p, 3)
}
