// Package estimate computes means, ratios and crossings from numbers, with intervals and p-values. Ratios are means of logs.
// It does not know what a trial is: internal/stats extracts the numbers from trials, and pkg/stats offers the same
// estimates to other programs.
package estimate

import (
	"math"

	"gonum.org/v1/gonum/stat"
	"gonum.org/v1/gonum/stat/distuv"
)

// Alpha is the accepted error rate: the share of intervals that miss the truth, and the share of families of
// variants in which any false difference is found.
const Alpha = 0.05

// Estimate is a mean with its standard error, on the scale of its values.
type Estimate struct {
	N            int // 1 or more
	Mean, SE, DF float64
}

// Mean estimates the mean of xs, which are in the order of their blocks. The
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
// must count. So Mean takes the larger of this variance and the plain one,
// which can only widen the interval.
func Mean(xs []float64, pilot int) Estimate {
	e := Estimate{N: len(xs), Mean: stat.Mean(xs, nil)}
	if e.N < 2 {
		return e
	}
	squares, df := SumOfSquares(xs), float64(e.N-1)
	variance := squares / df
	if pilot > 1 && pilot < e.N {
		df = float64(e.N - pilot)
		variance = max(variance, (squares-SumOfSquares(xs[:pilot]))/df)
	}
	e.DF, e.SE = df, math.Sqrt(variance/float64(e.N))
	return e
}

// SumOfSquares returns the sum of squares about the mean.
func SumOfSquares(xs []float64) float64 {
	return stat.Variance(xs, nil) * float64(len(xs)-1)
}

// Minus estimates the difference of two means that share no blocks. The method is Welch's, which allows two
// different variances.
func (e Estimate) Minus(o Estimate) Estimate {
	d := Estimate{N: min(e.N, o.N), Mean: e.Mean - o.Mean, SE: math.Hypot(e.SE, o.SE)}
	if d.N < 2 {
		return Estimate{N: d.N, Mean: d.Mean}
	}
	if d.SE == 0 {
		d.DF = e.DF + o.DF
		return d
	}
	a, b := e.SE/d.SE, o.SE/d.SE
	d.DF = 1 / (math.Pow(a, 4)/e.DF + math.Pow(b, 4)/o.DF)
	return d
}

// HalfWidth returns half the width of the 95% interval. It is 0 for N 1, which has no interval.
func (e Estimate) HalfWidth() float64 {
	if e.SE == 0 {
		return 0
	}
	return Student(e.DF).Quantile(1-Alpha/2) * e.SE
}

// Interval returns the 95% interval of the mean.
func (e Estimate) Interval() [2]float64 {
	h := e.HalfWidth()
	return [2]float64{e.Mean - h, e.Mean + h}
}

// Ratio returns the ratio whose log is estimated, with its 95% interval.
func (e Estimate) Ratio() (ratio float64, ci95 [2]float64) {
	ci := e.Interval()
	return math.Exp(e.Mean), [2]float64{math.Exp(ci[0]), math.Exp(ci[1])}
}

// P returns the two-sided p-value of a true mean of 0. It is 1 for N 1, which has no p-value.
func (e Estimate) P() float64 {
	switch {
	case e.N < 2 || e.Mean == 0:
		return 1
	case e.SE == 0:
		return 0
	}
	return TailProbability(e.Mean/e.SE, e.DF)
}

// TailProbability returns the probability that Student's t is at least as far from 0 as x.
func TailProbability(x, df float64) float64 { return 2 * Student(df).CDF(-math.Abs(x)) }

// Student returns Student's t distribution.
func Student(df float64) distuv.StudentsT { return distuv.StudentsT{Sigma: 1, Nu: df} }

// Trend returns how far the last quarter of a series lies above its first (0.18 means 18%), and whether the
// slope of its logs is significant.
func Trend(blocks []int, values []float64) (rise float64, significant bool) {
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
	return rise, TailProbability(r*math.Sqrt(df/(1-r*r)), df) <= Alpha
}
