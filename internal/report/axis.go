package report

import (
	"cmp"
	"math"

	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/words"
)

// axis says how to print the values of an axis.
type axis struct {
	// title is printed below the chart. It is empty if the tick labels contain the noun.
	title string
	// A value is followed by unit or, if it has a noun, by one or many. An empty many is one plus an s.
	one, many, unit string
	scale           float64
}

// axis returns the axis with one of the names of spec, such as spec.AxisPairs.
func (m *Model) axis(name string) axis {
	switch name {
	case spec.AxisPairs:
		return axis{one: "pair", scale: 1}
	case spec.AxisBackends:
		return axis{title: "backends", one: "backend", scale: 1}
	case spec.AxisPolicies:
		return axis{title: "network policies", one: "policy", many: "policies", scale: 1}
	case spec.AxisConnections:
		return axis{title: "connections of a pair", one: "connection", scale: 1}
	case spec.AxisSize:
		return axis{title: "size, bytes", one: "byte", scale: 1}
	case spec.AxisRate:
		return axis{title: "rate of the NIC, Mb/s", unit: "Mb/s", scale: 1e-6}
	}
	currency := ""
	for _, v := range m.exp.Spec.Variants {
		if _, of := m.exp.PriceOf(v); of != "" {
			currency = of
		}
	}
	return axis{title: "price of all nodes, " + currency + "/h", unit: currency + "/h", scale: 1}
}

// number formats a value without its unit, as precisely as it was set.
func (a axis) number(x float64) string {
	x *= a.scale
	return number.Fixed(x, number.DecimalsWritten(x))
}

// tick formats a value below a chart.
func (a axis) tick(x float64) string {
	if a.title == "" {
		return a.at(x)
	}
	return a.number(x)
}

// at formats a value in a sentence: "16000 backends", "4.7 Mb/s".
func (a axis) at(x float64) string { return a.withUnit(a.number(x)) }

func (a axis) withUnit(number string) string {
	switch {
	case a.one == "":
		return number + " " + a.unit
	case number == "1":
		return "1 " + a.one
	}
	return number + " " + cmp.Or(a.many, a.one+"s")
}

// list formats several values: "1, 4 and 16 pairs".
func (a axis) list(xs []float64) string {
	var texts []string
	for _, x := range xs {
		texts = append(texts, a.number(x))
	}
	return a.withUnit(words.And(texts))
}

// between formats a value that was interpolated: "23 (12–40) backends".
func (a axis) between(x float64, ci number.Interval) string {
	x *= a.scale
	decimals := max(0, 1-int(math.Floor(math.Log10(x))))
	return a.withUnit(number.Format(x, ci.Scale(a.scale), decimals).String())
}
