package stats

import (
	"fmt"
	"math"
	"sort"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats/estimate"
)

// PilotBlocks is the number of blocks in the pilot of runs: auto, which determines the total number.
const PilotBlocks = spec.AutoFirstBlocks

// leastBlocks leaves four blocks after the pilot. They give the interval four
// degrees of freedom, and so the same quantile of Student's t (2.8) as five
// blocks without a pilot.
const leastBlocks = PilotBlocks + 4

// BlocksWanted returns the total number of blocks that exp needs, and the reason in a few words.
// With runs: auto, only the scatter within the pilot decides: even the widest interval of a primary
// metric must become as narrow as requested. The number is at least four more than the pilot, and at
// most runs.max. Before the end of the pilot it is the minimum.
func BlocksWanted(exp *spec.Experiment, trials []record.Trial) (blocks int, why string, err error) {
	runs := exp.Spec.Runs
	if !runs.Auto {
		return runs.N, "the experiment", nil
	}
	if runs.Max <= leastBlocks {
		return runs.Max, "the limit", nil
	}
	var pilot []record.Trial
	for _, tr := range trials {
		if tr.Block <= PilotBlocks {
			pilot = append(pilot, tr)
		}
	}
	t, err := sortTrials(exp, pilot)
	if err != nil {
		return 0, "", fmt.Errorf("blocks for %s: %w", exp.Metadata.Name, err)
	}
	blocks, why = leastBlocks, "an unbiased interval, which takes four blocks more than the pilot"
	if t.blocks < PilotBlocks {
		return blocks, why, nil
	}
	for _, c := range t.cells {
		base := t.baseline(c)
		if base == nil {
			continue
		}
		at, ratios, err := logRatios(c, base, c.primary)
		if err != nil || len(ratios) < 2 {
			continue // Analyze warns about it
		}
		e := t.mean(at, ratios)
		n := leastBlocks + sort.Search(runs.Max-leastBlocks, func(more int) bool {
			n := float64(leastBlocks + more)
			se := e.SE * math.Sqrt(float64(e.N)/n)
			// Narrow enough: a ratio that differs from 1 by the width would be
			// significant.
			return estimate.TailProbability(math.Log1p(runs.Width)/se, n-PilotBlocks) <= estimate.Alpha
		})
		if n > blocks {
			blocks = n
			why = fmt.Sprintf("%s %s, where the interval is ±%.1f%% so far", c.variant.Name, At(c.workload.Name, c.pairs),
				100*math.Expm1(e.HalfWidth()))
		}
	}
	return blocks, why, nil
}
