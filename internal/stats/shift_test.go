package stats

import (
	"math"
	"math/rand/v2"
	"testing"

	"slipstream.dev/internal/stats/estimate"
	"slipstream.dev/internal/testenv"
)

// levels returns a series with noise of a relative size, whose level is multiplied at the given places.
func levels(rng *rand.Rand, n int, noise float64, at map[int]float64) []float64 {
	values, level := make([]float64, n), 1e9
	for i := range values {
		if by := at[i]; by != 0 {
			level *= by
		}
		values[i] = level * math.Exp(noise*rng.NormFloat64())
	}
	return values
}

func TestShifts(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	for name, c := range map[string]struct {
		values []float64
		want   []int
	}{
		"nothing":          {nil, nil},
		"constant":         {[]float64{1, 1, 1, 1, 1, 1, 1, 1}, nil},
		"noise":            {levels(rng, 40, 0.02, nil), nil},
		"a value below 0":  {[]float64{1, 1, 1, 1, -1, 2, 2, 2, 2}, nil},
		"one outlier":      {levels(rng, 30, 0.01, map[int]float64{12: 2, 13: 0.5}), nil},
		"a step":           {levels(rng, 20, 0.01, map[int]float64{12: 0.9}), []int{12}},
		"without noise":    {levels(rng, 12, 0, map[int]float64{6: 0.9}), []int{6}},
		"down and up":      {levels(rng, 40, 0.01, map[int]float64{10: 0.9, 25: 1 / 0.9}), []int{10, 25}},
		"too few to prove": {[]float64{1, 1.01, 0.99, 2, 2.01}, nil},
	} {
		found := Shifts(c.values, estimate.Alpha)
		if len(found) != len(c.want) {
			t.Errorf("%s: found %+v, want shifts at %v", name, found, c.want)
			continue
		}
		for i, s := range found {
			if s.At != c.want[i] || s.From > s.At || s.To < s.At || s.P > estimate.Alpha {
				t.Errorf("%s: found %+v, want it at %d", name, s, c.want[i])
			}
		}
	}
}

// TestShiftsOfMany: a clear step is found however many series share the probability of a mistake.
func TestShiftsOfMany(t *testing.T) {
	values := levels(rand.New(rand.NewPCG(7, 7)), 40, 0.01, map[int]float64{20: 0.5})
	if found := Shifts(values, estimate.Alpha/2000); len(found) != 1 || found[0].At != 20 {
		t.Errorf("found %+v, want a shift at 20", found)
	}
}

// TestShiftsHoldTheirPromises: a change is found in at most a twentieth of the series that have none, and the
// intervals of the place and of the ratio contain the truth in about 90 % of the cases.
func TestShiftsHoldTheirPromises(t *testing.T) {
	testenv.NeedTime(t)
	const rounds, step = 300, 0.96
	rng := rand.New(rand.NewPCG(1, 2))
	falsely, found, placed, sized := 0, 0, 0, 0
	for range rounds {
		if len(Shifts(levels(rng, 30, 0.02, nil), estimate.Alpha)) > 0 {
			falsely++
		}
		shifts := Shifts(levels(rng, 30, 0.02, map[int]float64{14: step}), estimate.Alpha)
		if len(shifts) == 0 {
			continue
		}
		found++
		if s := shifts[0]; s.From <= 14 && s.To >= 14 {
			placed++
		}
		if s := shifts[0]; s.CI95[0] <= step && s.CI95[1] >= step {
			sized++
		}
	}
	share := func(n, of int) float64 { return float64(n) / float64(of) }
	t.Logf("false %.3f, found %.3f, place covered %.3f, ratio covered %.3f", share(falsely, rounds), share(found, rounds), share(placed, found), share(sized, found))
	if share(falsely, rounds) > 0.08 || share(found, rounds) < 0.9 || share(placed, found) < 0.87 || share(sized, found) < 0.87 {
		t.Error("out of bounds")
	}
}
