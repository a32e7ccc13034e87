package stats

import (
	"cmp"
	"math"
	"slices"

	"gonum.org/v1/gonum/stat"
	"gonum.org/v1/gonum/stat/distuv"
)

// alpha is the risk that is taken: of an interval that misses the truth, and of
// any false difference among the variants of one family.
const alpha = 0.05

// estimate is a mean with its standard error, on the scale of its values.
type estimate struct {
	n            int // 1 or more
	mean, se, df float64
}

// mean estimates the mean of xs, which stand in the order of their blocks. The
// first pilot of them decided how many there are; 0 means that nobody looked.
//
// A scatter that decided the number of blocks is no longer an honest witness:
// had it come out larger, there would be more of them. So the sum of squares
// within the pilot is taken out of that of all. What is left, that within the
// other blocks and that between them and the pilot, has n − pilot degrees of
// freedom and, for normal values, is independent of the pilot's scatter and so
// of n, as the mean of all is: mean / se has Student's t, whatever n came out.
// (Stein, "A two-sample test for a linear hypothesis whose power is independent
// of the variance", Annals of Mathematical Statistics 16, 1945, keeps the
// pilot's scatter instead and never looks at that of the other blocks.) Where
// the values are not normal an outlier of the pilot moves the mean and must not
// be forgotten: the larger of that variance and the plain one is taken, which
// can only widen the interval.
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

// Mean is that of values of which each is of a block by itself, with its 95 % interval by Student's t. One
// value has no interval: both ends are the value.
func Mean(values []float64) (m float64, ci95 [2]float64) {
	e := mean(values, 0)
	return e.mean, e.interval()
}

// sumOfSquares about the mean.
func sumOfSquares(xs []float64) float64 {
	return stat.Variance(xs, nil) * float64(len(xs)-1)
}

// minus is the difference of two means that share no blocks: Welch's, whose two
// variances need not be equal.
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

// halfWidth of the 95 % interval; 0 for n 1, which has none.
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

// p is two-sided, of a true mean of 0; 1 for n 1, which says nothing.
func (e estimate) p() float64 {
	switch {
	case e.n < 2 || e.mean == 0:
		return 1
	case e.se == 0:
		return 0
	}
	return beyond(e.mean/e.se, e.df)
}

// beyond is the probability that Student's t is as far from 0 as x is.
func beyond(x, df float64) float64 { return 2 * student(df).CDF(-math.Abs(x)) }

func student(df float64) distuv.StudentsT { return distuv.StudentsT{Sigma: 1, Nu: df} }

// holm adjusts p-values: those of at most 0.05 hold all together but in one
// family of twenty (Holm, "A simple sequentially rejective multiple test
// procedure", Scandinavian Journal of Statistics 6, 1979).
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

// trend of a series over its blocks: how far its last quarter lies above its
// first, 0.18 being 18 %, and whether the slope of its logs is significant.
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
	// No scatter at all is no trend: the correlation is not a number then.
	return rise, beyond(r*math.Sqrt(df/(1-r*r)), df) <= alpha
}
