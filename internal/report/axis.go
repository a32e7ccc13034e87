package report

import (
	"cmp"
	"math"

	"slipstream.dev/internal/spec"
)

// axis describes how people see the values of an axis.
type axis struct {
	// title stands below a chart. It is empty if the marks have the noun themselves.
	title string
	// A value has a unit, or one as its noun; many is the plural if it is not one plus an s.
	one, many, unit string
	scale           float64
}

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
	return fixed(x, decimalsOf(x))
}

// decimalsOf returns the number of decimals that somebody wrote.
func decimalsOf(x float64) int {
	for n := range 6 {
		if scaled := x * math.Pow10(n); math.Abs(scaled-math.Round(scaled)) < 1e-6*scaled {
			return n
		}
	}
	return 6
}

// mark formats a value below a chart.
func (a axis) mark(x float64) string {
	if a.title == "" {
		return a.at(x)
	}
	return a.number(x)
}

// at formats a value in a sentence: "16000 backends", "4.7 Mb/s".
func (a axis) at(x float64) string { return a.with(a.number(x)) }

func (a axis) with(number string) string {
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
	var words []string
	for _, x := range xs {
		words = append(words, a.number(x))
	}
	return a.with(list(words))
}

// between formats a value that was interpolated: "23 (12–40) backends".
func (a axis) between(x float64, ci interval) string {
	x *= a.scale
	decimals := max(0, 1-int(math.Floor(math.Log10(x))))
	return a.with(estimate(x, ci.mapped(func(v float64) float64 { return v * a.scale }), decimals).String())
}
