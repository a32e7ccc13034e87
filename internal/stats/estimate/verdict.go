package estimate

import (
	"cmp"
	"slices"
)

// Holm adjusts the p-values of a family of comparisons. If those of at most 0.05 then count as differences, at
// most one family in twenty has a false one (Holm, "A simple sequentially rejective multiple test procedure",
// Scandinavian Journal of Statistics 6, 1979).
func Holm(ps []float64) []float64 {
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

// Judge decides on a ratio from n blocks. side is 0 if the ratio equals 1 to within the margin: its whole 95% interval must lie
// within. That takes precedence, because a difference can be significant and yet too small to matter. Otherwise side is 1 or -1
// if the ratio is above or below 1, with a p of at most Alpha. If nothing is proven, ok is false.
func Judge(n int, ratio float64, ci95 [2]float64, p, margin float64) (side int, ok bool) {
	switch {
	case n < 2:
		return 0, false
	// The bounds are each other's inverse, so that swapping the variant and its baseline makes no
	// difference.
	case ci95[0] >= 1/(1+margin) && ci95[1] <= 1+margin:
		return 0, true
	case p > Alpha:
		return 0, false
	}
	return cmp.Compare(ratio, 1), true
}
