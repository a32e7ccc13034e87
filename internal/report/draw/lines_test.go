package draw

import (
	"math"
	"testing"

	"slipstream.dev/internal/report/number"
)

// TestLinesShowEveryMark: every value and ring has a place on the axis, even a value without an interval. Only
// long intervals are cut off.
func TestLinesShowEveryMark(t *testing.T) {
	none := number.Interval{Low: math.Inf(-1), High: math.Inf(1)}
	for name, c := range map[string]struct {
		reference string
		marks     []Mark
		high      float64
	}{
		"a ratio without an interval":               {"vxlan", []Mark{{X: 1, Y: 1.9, CI: none}}, 2},
		"a ratio without one beside one with":       {"vxlan", []Mark{{X: 1, Y: 3, CI: none}, {X: 2, Y: 1.1, CI: number.Interval{Low: 1, High: 1.2}}}, 3.5},
		"a value without an interval":               {"", []Mark{{X: 1, Y: 1.9, CI: none}}, 2},
		"a ring above":                              {"vxlan", []Mark{{X: 1, Y: 1.1, CI: none, Rings: []float64{2.9}}}, 3},
		"a ratio below 1":                           {"vxlan", []Mark{{X: 1, Y: 0.5, CI: none}}, 1.2},
		"an interval that would flatten everything": {"vxlan", []Mark{{X: 1, Y: 2, CI: number.Interval{Low: 0.1, High: 90}}}, 3.5},
	} {
		if axis := (Lines{Curves: []Curve{{Marks: c.marks}}, Reference: c.reference}).yAxis(); math.Abs(axis.high-c.high) > 1e-9 {
			t.Errorf("%s: the axis ends at %g, want %g", name, axis.high, c.high)
		}
	}
}
