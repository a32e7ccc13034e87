package stats

import (
	"cmp"
	"math"
	"slices"

	"gonum.org/v1/gonum/stat"
	"gonum.org/v1/gonum/stat/distuv"
)

// alpha is the accepted error rate: the share of intervals that miss the truth, and of families of variants
// with any false difference.
const alpha = 0.05

// estimate is a mean with its standard error, on the scale of its values.
type estimate struct {
	n            int // 1 or more
	mean, se, df float64
}

// mean estimates the mean of xs, which are in the order of their blocks. The
// first pilot values determined the number of blocks; pilot is 0 if that number
// was set.
//
// Had the scatter of the pilot been larger, there would be more blocks. So the
// pilot's scatter is not an unbiased estimate, and the sum of squares within
// the pilot is subtracted from that of all values. The remainder, within the
// other blocks and between them and the pilot, has n − pilot degrees of
// freedom. For normal values it is independent of the pilot's scatter, and so
// of n, as is the mean of all values: mean / se follows Student's t for any n.
// (Stein, "A two-sample test for a linear hypothesis whose power is independent
// of the variance", Annals of Mathematical Statistics 16, 1945, keeps the
// pilot's scatter instead and ignores that of the other blocks.)
//
// If the values are not normal, an outlier in the pilot moves the mean, and
// must count. So mean takes the larger of this variance and the plain one,
// which can only widen the interval.
func mean(xs []float64, pilot int) estimate {
	e := estimate{n: len(xs), mean: stat.Mean(xs, nil)}
	if e.n < 2 {
		return e
	}
	squares, df := sumOfSquares(xs), float64(e.n-1)
	variance := squares / df
	if pilot > 1 && pilot < e.n {
		df = float64(e.n - pilot)
		variance = max(variance, (squares-sumOfSquares(xs[:pilot]))/df)
	}
	e.df, e.se = df, math.Sqrt(variance/float64(e.n))
	return e
}

// Mean estimates the mean of values, each from a block of its own, with its 95 % interval by Student's t. One
// value has no interval: both ends are the value.
func Mean(values []float64) (m float64, ci95 [2]float64) {
	e := mean(values, 0)
	return e.mean, e.interval()
}

// sumOfSquares returns the sum of squares about the mean.
func sumOfSquares(xs []float64) float64 {
	return stat.Variance(xs, nil) * float64(len(xs)-1)
}

// minus estimates the difference of two means that share no blocks. The method is Welch's, which allows two
// different variances.
func (e estimate) minus(o estimate) estimate {
	d := estimate{n: min(e.n, o.n), mean: e.mean - o.mean, se: math.Hypot(e.se, o.se)}
	if d.n < 2 {
		return estimate{n: d.n, mean: d.mean}
	}
	if d.se == 0 {
		d.df = e.df + o.df
		return d
	}
	a, b := e.se/d.se, o.se/d.se
	d.df = 1 / (math.Pow(a, 4)/e.df + math.Pow(b, 4)/o.df)
	return d
}

// halfWidth returns half the width of the 95 % interval. It is 0 for n 1, which has no interval.
func (e estimate) halfWidth() float64 {
	if e.se == 0 {
		return 0
	}
	return student(e.df).Quantile(1-alpha/2) * e.se
}

func (e estimate) interval() [2]float64 {
	h := e.halfWidth()
	return [2]float64{e.mean - h, e.mean + h}
}

// p returns the two-sided p-value of a true mean of 0. It is 1 for n 1, which has no p-value.
func (e estimate) p() float64 {
	switch {
	case e.n < 2 || e.mean == 0:
		return 1
	case e.se == 0:
		return 0
	}
	return tailProbability(e.mean/e.se, e.df)
}

// tailProbability returns the probability that Student's t is at least as far from 0 as x.
func tailProbability(x, df float64) float64 { return 2 * student(df).CDF(-math.Abs(x)) }

func student(df float64) distuv.StudentsT { return distuv.StudentsT{Sigma: 1, Nu: df} }

// holm adjusts p-values so that at most one family in twenty has a false difference among its p-values of at
// most 0.05 (Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of
// Statistics 6, 1979).
func holm(ps []float64) []float64 {
	rank := make([]int, len(ps))
	for i := range rank {
		rank[i] = i
	}
	slices.SortFunc(rank, func(i, j int) int { return cmp.Compare(ps[i], ps[j]) })
	adjusted := make([]float64, len(ps))
	least := 0.0
	for done, i := range rank {
		least = max(least, min(1, float64(len(ps)-done)*ps[i]))
		adjusted[i] = least
	}
	return adjusted
}

// trend returns how far the last quarter of a series lies above its first (0.18 means 18 %), and whether the
// slope of its logs is significant.
func trend(blocks []int, values []float64) (rise float64, significant bool) {
	n := len(values)
	if n < 4 {
		return 0, false
	}
	at, logs := make([]float64, n), make([]float64, n)
	for i, x := range values {
		if x <= 0 {
			return 0, false
		}
		at[i], logs[i] = float64(blocks[i]), math.Log(x)
	}
	quarter := n / 4
	rise = math.Expm1(stat.Mean(logs[n-quarter:], nil) - stat.Mean(logs[:quarter], nil))
	r, df := stat.Correlation(at, logs, nil), float64(n-2)
	// Without any scatter there is no trend: the correlation is NaN then.
	return rise, tailProbability(r*math.Sqrt(df/(1-r*r)), df) <= alpha
}
