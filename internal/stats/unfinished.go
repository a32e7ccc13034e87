package stats

import (
	"fmt"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// Progress tells how far a run has come. With runs: auto, Trials and Blocks may grow when the first blocks are done.
type Progress struct {
	Trials, Done        int // a trial that failed twice is done: it is not tried again
	Blocks, WholeBlocks int // a block is whole when all its trials are done
}

// ProgressOf returns how far a run with these trials has come.
func ProgressOf(exp *spec.Experiment, trials []record.Trial) (Progress, error) {
	blocks, _, err := BlocksWanted(exp, trials)
	if err != nil {
		return Progress{}, err
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
	p := Progress{Trials: blocks * cells, Done: len(done), Blocks: blocks}
	for _, n := range whole {
		if n == cells {
			p.WholeBlocks++
		}
	}
	return p, nil
}

// Unfinished says what a run still lacks if it was interrupted or is in progress. It is
// empty for a complete run.
func Unfinished(exp *spec.Experiment, trials []record.Trial) (string, error) {
	p, err := ProgressOf(exp, trials)
	if err != nil || p.Done >= p.Trials {
		return "", err
	}
	are := "done"
	if exp.Spec.Target.Imported != nil {
		are = "present"
	}
	return fmt.Sprintf("%d of %d trials are %s, %d of %d blocks are complete", p.Done, p.Trials, are, p.WholeBlocks, p.Blocks), nil
}
