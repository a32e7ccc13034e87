package stats

import (
	"fmt"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// Unfinished says what a run still lacks if it was interrupted or is in progress. It is
// empty for a complete run. A trial that failed twice is done: it is not tried again.
func Unfinished(exp *spec.Experiment, trials []record.Trial) (string, error) {
	blocks, _, err := BlocksWanted(exp, trials)
	if err != nil {
		return "", err
	}
	cells := 0
	for _, w := range exp.Spec.Workloads {
		cells += len(exp.PairsOf(w)) * exp.Rounds() * len(exp.Spec.Variants) * exp.Repeats()
	}
	type trial struct {
		key
		block, repeat, round int
	}
	attempts, done, whole := map[trial]int{}, map[trial]bool{}, map[int]int{}
	for _, tr := range record.LastEntries(trials) {
		t := trial{key{tr.Variant, tr.Workload, tr.Pairs}, tr.Block, tr.Repeat, tr.Round}
		attempts[t]++
		if over := tr.Status == record.StatusOK || attempts[t] > 1; over && !done[t] {
			done[t] = true
			whole[tr.Block]++
		}
	}
	if len(done) >= blocks*cells {
		return "", nil
	}
	full := 0
	for _, n := range whole {
		if n == cells {
			full++
		}
	}
	are := "done"
	if exp.Spec.Target.Imported != nil {
		are = "present"
	}
	return fmt.Sprintf("%d of %d trials are %s, %d of %d blocks are complete", len(done), blocks*cells, are, full, blocks), nil
}
