package stats

import (
	"math"

	"gonum.org/v1/gonum/mathext"
	"gonum.org/v1/gonum/stat"
)

// moderated shrinks the variances of many estimates towards a common one, so that few values suffice for each. If the variances
// differ only by chance, each becomes the common one. The more the true variances differ, the less it shrinks them. The variances
// have df degrees of freedom, the results have total. It assumes that the true variances follow a scaled inverse χ² distribution
// (Smyth, "Linear models and empirical Bayes methods for assessing differential expression in microarray experiments", Statistical
// Applications in Genetics and Molecular Biology 3, 2004, section 6).
func moderated(variances, df []float64) (results, total []float64) {
	typical, prior := priorOf(variances, df)
	var all float64
	for _, d := range df {
		all += d
	}
	for i, v := range variances {
		d := df[i]
		if math.IsInf(prior, 1) {
			results, total = append(results, typical), append(total, all)
			continue
		}
		results, total = append(results, (prior*typical+d*v)/(prior+d)), append(total, min(prior+d, all))
	}
	return results, total
}

// priorOf estimates the common variance, and its degrees of freedom: infinitely many if the variances differ no more than
// by chance.
func priorOf(variances, df []float64) (typical, prior float64) {
	// Values that were rounded, and medians, may have no scatter at all, and 0 has no log.
	least := 1e-5 * median(variances)
	var logs []float64
	var chance, squares, all float64
	for i, v := range variances {
		half := df[i] / 2
		logs = append(logs, math.Log(max(v, least))-mathext.Digamma(half)+math.Log(half))
		chance += trigamma(half) / float64(len(df))
		squares, all = squares+v*df[i], all+df[i]
	}
	if least == 0 || len(logs) < 3 {
		return squares / all, math.Inf(1)
	}
	mean, scatter := stat.MeanVariance(logs, nil)
	if scatter <= chance {
		return squares / all, math.Inf(1)
	}
	half := inverseTrigamma(scatter - chance)
	return math.Exp(mean + mathext.Digamma(half) - math.Log(half)), 2 * half
}

func trigamma(x float64) float64 { return mathext.Zeta(2, x) }

// inverseTrigamma solves trigamma(x) = y by Newton's method, for 1/trigamma, which is convex and nearly linear.
func inverseTrigamma(y float64) float64 {
	x := 0.5 + 1/y
	for range 50 {
		t := trigamma(x)
		step := t * (1 - t/y) / (-2 * mathext.Zeta(3, x))
		x += step
		if -step < 1e-8*x {
			break
		}
	}
	return x
}
