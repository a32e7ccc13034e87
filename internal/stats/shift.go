package stats

import (
	"math"
	"math/rand/v2"
	"slices"

	"gonum.org/v1/gonum/stat"

	"slipstream.dev/internal/stats/estimate"
)

// Shift is a place in a series of results at which their level changed.
type Shift struct {
	// At is the number of the first result at the new level, from 0. It lies between From and To with a
	// probability of about 90 %.
	At   int `json:"at"`
	From int `json:"from"`
	To   int `json:"to"`
	// Ratio of the new level to the old one, with its interval.
	Ratio float64    `json:"ratio"`
	CI95  [2]float64 `json:"ci95"`
	P     float64    `json:"p"` // p-value of "there is no change here"
}

const (
	// leastLevel is the minimum number of results that make a level: fewer may be outliers.
	leastLevel = 3
	// permutations allow p-values down to 1/5000. A smaller alpha needs more of them.
	permutations = 4999
	resamples    = 999
)

// Shifts finds the places at which the level of a series changed; values are positive, in order of time. alpha is the
// probability of finding one in a series without any. The same values give the same shifts.
//
// The method is binary segmentation (Vostrikova, "Detecting 'disorder' in multidimensional random processes", Soviet
// Mathematics Doklady 24, 1981) of the logs by the largest standardised CUSUM. Its p-value is that of a permutation
// test, which assumes no distribution (Antoch and Hušková, "Permutation tests in change point analysis", Statistics &
// Probability Letters 53, 2001). Each place is then estimated again between its neighbours (Bai, "Estimating multiple
// breaks one at a time", Econometric Theory 13, 1997). Its interval is from a bootstrap of the residuals (Hušková and
// Kirch, "Bootstrapping confidence intervals for the change-point of time series", Journal of Time Series Analysis
// 29, 2008), and that of the ratio is Welch's, which ignores that the place was chosen. In simulations of 30 results
// both contain the truth in about 90% (TestShiftsHoldTheirPromises).
func Shifts(values []float64, alpha float64) []Shift {
	logs := make([]float64, len(values))
	for i, v := range values {
		if !(v > 0) || math.IsInf(v, 0) {
			return nil // there are no ratios
		}
		logs[i] = math.Log(v)
	}
	rng := rand.New(rand.NewPCG(1, uint64(len(logs))))
	ps := make(map[int]float64)
	divide(logs, 0, alpha, rng, ps)
	var found []int
	for at := range ps {
		found = append(found, at)
	}
	slices.Sort(found)
	edge := func(i int) int {
		switch {
		case i < 0:
			return 0
		case i >= len(found):
			return len(logs)
		}
		return found[i]
	}
	var shifts []Shift
	for i, at := range found {
		before, after := edge(i-1), edge(i+1)
		k, _ := largestCUSUM(logs[before:after])
		p := ps[at]
		found[i] = before + k
		s := shift(logs[before:after], k, rng)
		s.At, s.From, s.To, s.P = s.At+before, s.From+before, s.To+before, p
		shifts = append(shifts, s)
	}
	return shifts
}

// divide adds the places at which the level changes to ps, with their p-values. from is the place of the first log.
func divide(logs []float64, from int, alpha float64, rng *rand.Rand, ps map[int]float64) {
	k, largest := largestCUSUM(logs)
	if k == 0 || largest == 0 {
		return
	}
	permutations := max(permutations, int(math.Ceil(1/alpha)))
	shuffled, above := slices.Clone(logs), 0
	for range permutations {
		rng.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		if _, c := largestCUSUM(shuffled); c >= largest*(1-1e-12) {
			above++
		}
		if float64(above+1)/float64(permutations+1) > alpha {
			return
		}
	}
	ps[from+k] = float64(above+1) / float64(permutations+1)
	divide(logs[:k], from, alpha, rng, ps)
	divide(logs[k:], from+k, alpha, rng, ps)
}

// largestCUSUM returns where the means before and after differ most, in units of their standard error, and by how much.
// k is 0 if there are too few values.
func largestCUSUM(logs []float64) (k int, largest float64) {
	n := float64(len(logs))
	centre, sum := stat.Mean(logs, nil), 0.0
	for i, x := range logs {
		sum += x - centre
		done := i + 1
		if done < leastLevel || len(logs)-done < leastLevel {
			continue
		}
		if c := math.Abs(sum) / math.Sqrt(float64(done)*(n-float64(done))/n); k == 0 || c > largest {
			k, largest = done, c
		}
	}
	return k, largest
}

// shift describes a change at k.
func shift(logs []float64, k int, rng *rand.Rand) Shift {
	before, after := estimate.Mean(logs[:k], 0), estimate.Mean(logs[k:], 0)
	s := Shift{At: k}
	s.Ratio, s.CI95 = after.Minus(before).Ratio()
	again := make([]float64, len(logs))
	var away []float64 // distances of the places of the resamples
	for range resamples {
		for i := range again {
			side, level := logs[:k], before.Mean
			if i >= k {
				side, level = logs[k:], after.Mean
			}
			// Residuals about a mean are too small on average.
			wider := math.Sqrt(float64(len(side)) / float64(len(side)-1))
			again[i] = level + wider*(side[rng.IntN(len(side))]-level)
		}
		at, _ := largestCUSUM(again)
		away = append(away, math.Abs(float64(at-k)))
	}
	slices.Sort(away)
	d := int(stat.Quantile(1-estimate.Alpha, stat.Empirical, away, nil))
	s.From, s.To = max(leastLevel, k-d), min(len(logs)-leastLevel, k+d)
	return s
}
