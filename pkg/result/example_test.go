package result_test

import (
	"encoding/json"
	"fmt"

	"slipstream.dev/pkg/result"
	"slipstream.dev/pkg/stats"
)

// A job of a pipeline looks at the main metric of each workload.
func ExampleOpen() {
	r, err := result.Open("testdata/demo-20260901T083000Z") // or demo.zip
	if err != nil {
		panic(err)
	}
	for _, row := range r.Rows {
		if v := row.Versus; v != nil && row.Primary {
			ci := v.Ratio.CI95
			fmt.Printf("%s, %s: %s is %.2f (%.2f to %.2f) of %s: %s\n", row.Variant, row.Workload, row.Metric, v.Ratio.Value, ci[0], ci[1], v.Baseline, v.Verdict)
		}
	}
	for _, e := range r.Expectations {
		fmt.Printf("%s: %s\n", e.Claim, e.Outcome)
	}
	// Output:
	// native, stream: throughput is 1.76 (1.72 to 1.79) of vxlan: faster
	// native, pingpong: latency_p50 is 0.65 (0.64 to 0.66) of vxlan: faster
	// rps, stream: throughput is 1.01 (1.00 to 1.03) of vxlan: inconclusive
	// rps, pingpong: latency_p50 is 1.13 (1.12 to 1.14) of vxlan: slower
	// native is faster than vxlan of stream: met
}

// Values that count are in blocks, so that they can be compared in another way, or with those of another baseline.
func ExampleRow() {
	r, err := result.Open("testdata/demo-20260901T083000Z")
	if err != nil {
		panic(err)
	}
	values := make(map[string][]float64)
	for _, row := range r.Rows {
		if row.Workload == "pingpong" && row.Metric == "latency_p99" {
			for _, b := range row.Blocks {
				values[row.Variant] = append(values[row.Variant], b.Value)
			}
		}
	}
	ratio, err := stats.Paired(values["rps"], values["native"])
	if err != nil {
		panic(err)
	}
	fmt.Printf("p99 of rps / native: %.2f (%.2f to %.2f)\n", ratio.Value, ratio.CI95[0], ratio.CI95[1])
	// Output: p99 of rps / native: 1.76 (1.62 to 1.91)
}

// Every field of a trial is in its JSON, by the names of docs/reference/results.md.
func ExampleTrial() {
	r, err := result.Open("testdata/demo-20260901T083000Z")
	if err != nil {
		panic(err)
	}
	for _, t := range r.Trials {
		if t.Error == "" {
			continue
		}
		text, err := json.Marshal(t)
		if err != nil {
			panic(err)
		}
		var more struct {
			Took float64 `json:"took"` // seconds
		}
		if err := json.Unmarshal(text, &more); err != nil {
			panic(err)
		}
		fmt.Printf("block %d, %s, failed after %.1f s: %s\n", t.Block, t.Variant, more.Took, t.Error)
	}
	// Output: block 3, native, failed after 2.6 s: client of pair 0: a connection was stalled at the end of the window
}
