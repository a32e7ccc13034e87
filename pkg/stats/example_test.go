package stats_test

import (
	"fmt"

	"slipstream.dev/pkg/stats"
)

// Throughput in Gbit/s, by block. The machine became slower from block to block, which cancels within them.
var (
	vxlan = []float64{9.77, 9.60, 9.52, 9.31, 9.20, 9.05}
	fast  = []float64{12.61, 12.50, 12.22, 12.11, 11.98, 11.65}
	again = []float64{9.75, 9.63, 9.50, 9.33, 9.18, 9.06} // the baseline, measured again
)

func ExamplePaired() {
	r, err := stats.Paired(fast, vxlan)
	if err != nil {
		panic(err)
	}
	fmt.Printf("%.3f (%.3f to %.3f) in %d blocks\n", r.Value, r.CI95[0], r.CI95[1], r.N)
	// Output: 1.294 (1.286 to 1.303) in 6 blocks
}

// Equivalence: the whole interval has to lie within the margin.
func ExampleRatio_Verdict() {
	for _, variant := range [][]float64{fast, again, again[:2]} {
		r, err := stats.Paired(variant, vxlan[:len(variant)])
		if err != nil {
			panic(err)
		}
		fmt.Printf("%.3f (%.3f to %.3f): %s\n", r.Value, r.CI95[0], r.CI95[1], r.Verdict(0.02))
	}
	// Output:
	// 1.294 (1.286 to 1.303): higher
	// 1.000 (0.997 to 1.003): same
	// 1.001 (0.968 to 1.034): inconclusive
}

// Several variants are compared with one baseline, so their p-values are adjusted before they are judged.
func ExampleHolm() {
	names := []string{"fast", "again"}
	var ratios []stats.Ratio
	var ps []float64
	for _, variant := range [][]float64{fast, again} {
		r, err := stats.Paired(variant, vxlan)
		if err != nil {
			panic(err)
		}
		ratios, ps = append(ratios, r), append(ps, r.P)
	}
	for i, p := range stats.Holm(ps) {
		ratios[i].P = p
		fmt.Println(names[i], ratios[i].Verdict(0.02))
	}
	// Output:
	// fast higher
	// again same
}

// Accelerated Networking is switched off and on between periods, in the order off, on, on, off and so on. Each period is slower by 1%
// than the one before, and that cancels.
func ExampleSwitchBack() {
	off := []stats.Period{{1, 10.00}, {4, 9.69}, {5, 9.62}, {8, 9.33}, {9, 9.22}, {12, 8.96}}
	on := []stats.Period{{2, 11.87}, {3, 11.77}, {6, 11.42}, {7, 11.29}, {10, 10.98}, {11, 10.84}}
	r, err := stats.SwitchBack(on, off)
	if err != nil {
		panic(err)
	}
	fmt.Printf("%.3f (%.3f to %.3f)\n", r.Value, r.CI95[0], r.CI95[1])
	// Output: 1.200 (1.197 to 1.203)
}

// The median latency of two proxies at four request rates: below which rate is the new one faster?
func ExampleCrossover() {
	c, err := stats.Crossover([]stats.Point{
		{At: 1000, Variant: []float64{81, 83, 82, 80}, Baseline: []float64{100, 101, 99, 100}},
		{At: 2000, Variant: []float64{96, 97, 99, 96}, Baseline: []float64{104, 106, 105, 104}},
		{At: 4000, Variant: []float64{125, 121, 124, 126}, Baseline: []float64{115, 113, 114, 116}},
		{At: 8000, Variant: []float64{180, 178, 183, 181}, Baseline: []float64{140, 139, 141, 140}},
	}, 1)
	if err != nil {
		panic(err)
	}
	fmt.Printf("%.0f (%.0f to %.0f) requests/s\n", c.At, c.CI95[0], c.CI95[1])
	// Output: 2811 (2621 to 2993) requests/s
}
