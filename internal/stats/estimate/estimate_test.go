package estimate

import (
	"math"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// Extra hours of sleep under two drugs, ten patients: the example of Student's
// paper, with the intervals and p-values that R prints for it (?sleep, t.test).
var (
	drug1 = []float64{0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0}
	drug2 = []float64{1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4}
)

func differences() []float64 {
	d := make([]float64, len(drug1))
	for i := range d {
		d[i] = drug1[i] - drug2[i]
	}
	return d
}

func TestPaired(t *testing.T) {
	e := Mean(differences(), 0)
	near(t, "interval", e.Interval(), [2]float64{-2.4598858, -0.7001142}, 1e-7)
	near(t, "p", e.P(), 0.002833, 1e-6)
}

func TestWelch(t *testing.T) {
	e := Mean(drug1, 0).Minus(Mean(drug2, 0))
	near(t, "interval", e.Interval(), [2]float64{-3.3654832, 0.2054832}, 1e-7)
	near(t, "df", e.DF, 17.776, 1e-3)
	near(t, "p", e.P(), 0.07939, 1e-5)
}

// TestMeanAfterPilot: after a pilot of four, the scatter is that within the other six,
// and that between the four and the six. Each is computed separately here. If the
// pilot's scatter is larger, the scatter of all values counts.
func TestMeanAfterPilot(t *testing.T) {
	xs := differences()
	before, after := Mean(xs[:4], 0), Mean(xs[4:], 0)
	squares := after.SE*after.SE*6*5 + 4*6/10.0*math.Pow(before.Mean-after.Mean, 2)
	near(t, "estimate", Mean(xs, 4), Estimate{N: 10, Mean: -1.58, SE: math.Sqrt(squares / 6 / 10), DF: 6}, 1e-12)
	slices.Reverse(xs)
	near(t, "loud pilot", Mean(xs, 4), Estimate{N: 10, Mean: -1.58, SE: Mean(xs, 0).SE, DF: 6}, 1e-12)
}

// TestDegenerate: values without scatter, or a single value, must not give NaN, which
// JSON cannot represent, nor an interval that suggests precision.
func TestDegenerate(t *testing.T) {
	one, flat := Mean([]float64{2}, 0), Mean([]float64{2, 2, 2}, 0)
	for _, c := range []struct {
		name     string
		e        Estimate
		interval [2]float64
		p        float64
	}{
		{"one value", one, [2]float64{2, 2}, 1},
		{"one value less one", one.Minus(one), [2]float64{0, 0}, 1},
		{"one value less three", one.Minus(flat), [2]float64{0, 0}, 1},
		{"no scatter", flat, [2]float64{2, 2}, 0},
		{"no scatter after a pilot", Mean([]float64{2, 2, 2, 2}, 2), [2]float64{2, 2}, 0},
		{"no scatter, no difference", flat.Minus(flat), [2]float64{0, 0}, 1},
	} {
		near(t, c.name, c.e.Interval(), c.interval, 0)
		near(t, c.name, c.e.P(), c.p, 0)
	}
}

// TestHolm compares with R's p.adjust(c(0.03, 0.01, 0.05, 0.02, 0.04), "holm"), and
// checks that no adjusted p exceeds 1.
func TestHolm(t *testing.T) {
	near(t, "five", Holm([]float64{0.03, 0.01, 0.05, 0.02, 0.04}), []float64{0.09, 0.05, 0.09, 0.08, 0.09}, 1e-12)
	near(t, "capped", Holm([]float64{0.7, 0.6}), []float64{1, 1}, 0)
	near(t, "none", Holm(nil), []float64{}, 0)
}

func TestTrend(t *testing.T) {
	blocks := []int{1, 2, 3, 4, 5, 6, 7, 8}
	for _, c := range []struct {
		name        string
		values      []float64
		rise        float64
		significant bool
	}{
		{"steady rise", []float64{100, 102, 104, 106, 108, 110, 112, 114}, math.Sqrt(112*114/100.0/102) - 1, true},
		{"one outlier at the end", []float64{100, 101, 99, 100, 101, 99, 100, 130}, math.Sqrt(100*130/100.0/101) - 1, false},
		{"flat", []float64{5, 5, 5, 5, 5, 5, 5, 5}, 0, false},
		{"a zero", []float64{0, 5, 5, 5, 5, 5, 5, 5}, 0, false},
		{"too few", []float64{1, 2, 3}, 0, false},
	} {
		rise, significant := Trend(blocks[:len(c.values)], c.values)
		near(t, c.name, rise, c.rise, 1e-12)
		if significant != c.significant {
			t.Errorf("%s: significant is %v, want %v", c.name, significant, c.significant)
		}
	}
}

func near[T any](t *testing.T, name string, got, want T, within float64) {
	t.Helper()
	if diff := cmp.Diff(want, got, cmpopts.EquateApprox(0, within)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}
