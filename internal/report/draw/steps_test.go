package draw

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
)

// tenths returns steps of 100 ms.
func tenths(values ...float64) (all Steps) {
	for i, v := range values {
		all = append(all, Step{float64(i) / 10, float64(i+1) / 10, v})
	}
	return all
}

// TestStepsKeepSpikes: the highest and lowest values are drawn even if many intervals share a part of the
// line.
func TestStepsKeepSpikes(t *testing.T) {
	values := slices.Repeat([]float64{3}, 12*mostSteps)
	values[500], values[600] = 5, 1
	line := tenths(values...).line()
	byValue := func(a, b point) int { return cmp.Compare(a.y, b.y) }
	if n := len(line); n > 3*mostSteps || slices.MaxFunc(line, byValue).y != 5 || slices.MinFunc(line, byValue).y != 1 || line[n-1] != (point{72, 3}) {
		t.Errorf("%v", line)
	}
	if got := fmt.Sprint(len(Steps(nil).line()), len(tenths(1, 2).line())); got != "0 4" {
		t.Errorf("lines of none and two have %s points", got)
	}
}
