package stats

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func near[T any](t *testing.T, name string, got, want T, within float64) {
	t.Helper()
	if diff := cmp.Diff(want, got, cmpopts.EquateApprox(within, 0)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}

// TestPaired compares with R, for which the log ratios are the differences of two drugs in Student's paper (?sleep, t.test).
func TestPaired(t *testing.T) {
	differences := []float64{-1.2, -2.4, -1.3, -1.3, 0, -1, -1.8, -0.8, -4.6, -1.4}
	var variant, baseline []float64
	for i, d := range differences {
		baseline = append(baseline, float64(10+i))
		variant = append(variant, baseline[i]*math.Exp(d))
	}
	r, err := Paired(variant, baseline)
	if err != nil {
		t.Fatal(err)
	}
	near(t, "ratio", r, Ratio{N: 10, Value: math.Exp(-1.58), CI95: [2]float64{math.Exp(-2.4598858), math.Exp(-0.7001142)}, P: 0.002833}, 2e-4)
	if r.Verdict(0.02) != Lower {
		t.Errorf("verdict %s", r.Verdict(0.02))
	}
	swapped, err := Paired(baseline, variant)
	if err != nil || swapped.Verdict(0.02) != Higher || math.Abs(swapped.Value*r.Value-1) > 1e-12 {
		t.Errorf("swapped: %+v, %v", swapped, err)
	}
}

// TestSwitchBack has the numbers of estimate's TestSwitchBack: the log ratios are 0.08 + 0.02·apart ± 0.01.
func TestSwitchBack(t *testing.T) {
	var on, off []Period
	for i, log := range []float64{0.11, 0.05, 0.09, 0.07} {
		first, second := 2*i+1, 2*i+2
		if i%2 == 1 {
			first, second = second, first
		}
		off = append(off, Period{first, 100})
		on = append(on, Period{second, 100 * math.Exp(log)})
	}
	r, err := SwitchBack(on, off)
	if err != nil {
		t.Fatal(err)
	}
	near(t, "interval", r.CI95, [2]float64{math.Exp(0.08 - 4.3027*0.0070711), math.Exp(0.08 + 4.3027*0.0070711)}, 1e-6)
	if r, err := SwitchBack(on[:1], off[:1]); err != nil || r.N != 1 || r.CI95 != [2]float64{r.Value, r.Value} || r.Verdict(1) != Inconclusive {
		t.Errorf("one block: %+v, %v", r, err)
	}
	off[1].Number = on[1].Number
	if _, err := SwitchBack(on, off); err == nil || err.Error() != "block 1: variant and baseline have the same period 3" {
		t.Errorf("same period: %v", err)
	}
}

// TestVerdict has the borders: the interval within the margin, and p at 0.05.
func TestVerdict(t *testing.T) {
	for _, c := range []struct {
		name string
		r    Ratio
		want Verdict
	}{
		{"significant and within the margin", Ratio{5, 1.01, [2]float64{1.001, 1.019}, 0.01}, Same},
		{"at the ends of the margin", Ratio{5, 1, [2]float64{1 / 1.02, 1.02}, 1}, Same},
		{"beyond the lower end", Ratio{5, 0.99, [2]float64{0.98, 1}, 0.05}, Lower},
		{"beyond the upper end", Ratio{5, 1.01, [2]float64{1, 1.021}, 0.05}, Higher},
		{"not significant", Ratio{5, 1.01, [2]float64{0.99, 1.03}, 0.051}, Inconclusive},
		{"one block", Ratio{1, 1, [2]float64{1, 1}, 1}, Inconclusive},
	} {
		if got := c.r.Verdict(0.02); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// TestCrossover: log ratios of −0.2 at 1 and 0.1 at 8 cross 0 at two thirds of the way, at 4. In both blocks the whole line is shifted.
func TestCrossover(t *testing.T) {
	at := func(x, log float64) Point {
		p := Point{At: x}
		for _, by := range []float64{-0.001, 0, 0.001} {
			p.Variant, p.Baseline = append(p.Variant, 7*math.Exp(log+by)), append(p.Baseline, 7)
		}
		return p
	}
	points := []Point{at(1, -0.2), at(8, 0.1)}
	c, err := Crossover(points, 1)
	if err != nil {
		t.Fatal(err)
	}
	// The mean is rejected where it is 4.3027 standard errors of 0.001/√3 from 0. The log ratio rises by 0.1 when the axis doubles.
	reach := 4.30265 * 0.001 / math.Sqrt(3) / 0.1
	near(t, "crossing", c, Crossing{4, [2]float64{4 * math.Exp2(-reach), 4 * math.Exp2(reach)}}, 1e-5)

	c, err = Crossover(points, math.Exp(0.0999))
	if err != nil || c.CI95[1] != 8 || c.CI95[0] > 7.9 {
		t.Errorf("near the last point: %+v, %v", c, err)
	}
	if _, err := Crossover(points, 2); !errors.Is(err, ErrNoCrossing) {
		t.Errorf("above all: %v", err)
	}
}

// TestErrors: whatever cannot be compared is an error that names the block, never a NaN.
func TestErrors(t *testing.T) {
	ok := Point{At: 1, Variant: []float64{1, 2}, Baseline: []float64{1, 2}}
	for _, c := range []struct {
		name string
		call func() error
		want string
	}{
		{"no block", func() error { _, err := Paired(nil, nil); return err }, "there is no block"},
		{"lengths", func() error { _, err := Paired([]float64{1, 2}, []float64{1}); return err }, "2 values of the variant and 1 of the baseline"},
		{"zero", func() error { _, err := Paired([]float64{1, 2}, []float64{1, 0}); return err }, "block 1: 0 is not a positive number"},
		{"NaN", func() error { _, err := Paired([]float64{math.NaN()}, []float64{1}); return err }, "block 0: NaN is not a positive number"},
		{"infinite", func() error { _, err := SwitchBack([]Period{{1, math.Inf(1)}}, []Period{{2, 1}}); return err }, "block 0: +Inf is not a positive number"},
		{"one point", func() error { _, err := Crossover([]Point{ok}, 1); return err }, "two points and two blocks"},
		{"one block", func() error { _, err := Crossover([]Point{{1, []float64{1}, []float64{1}}, ok}, 1); return err }, "two points and two blocks"},
		{"level", func() error { _, err := Crossover([]Point{ok, {2, ok.Variant, ok.Baseline}}, 0); return err }, "the level 0 is not a positive number"},
		{"order", func() error { _, err := Crossover([]Point{ok, ok}, 1); return err }, "point 1: 1 is not above 1"},
		{"blocks", func() error {
			_, err := Crossover([]Point{ok, {2, []float64{1, 2, 3}, []float64{1, 2, 3}}}, 1)
			return err
		}, "point 1: it has 3 blocks, and the first point has 2"},
		{"value", func() error { _, err := Crossover([]Point{ok, {2, []float64{1, -1}, []float64{1, 2}}}, 1); return err }, "point 1: block 1: -1 is not a positive number"},
	} {
		if err := c.call(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}
