package cli

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"slipstream.dev/internal/azure"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
)

var began = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

var pools = [2][]azure.Node{
	{{Name: "old-0", Ready: true}, {Name: "old-1", Ready: true}, {Name: "old-2", Ready: true}},
	{{Name: "new-0", Ready: true}, {Name: "new-1", Ready: true}, {Name: "new-2"}},
}

// standIn writes what slipstream run would write for a pool with factor times the old pool's rate. The run with
// number fail fails.
func standIn(t *testing.T, factor float64, pairs map[string]int, fail int) func(context.Context, []string) error {
	runs := 0
	return func(_ context.Context, argv []string) error {
		if runs++; runs == fail {
			return errors.New("interrupted")
		}
		args := make(map[string]string)
		for i := 3; i+1 < len(argv); i += 2 {
			args[argv[i]] = argv[i+1]
		}
		pairs[args["--client-node"]+" "+args["--server-node"]]++
		rate := 1e9 * (1 + 0.01*rand.Float64())
		if strings.HasPrefix(args["--client-node"], "new") {
			rate *= factor
		}
		dir, err := record.Create(args["--out"], "pool", time.Now(), poolExperiment, record.Environment{})
		if err != nil {
			return err
		}
		defer dir.Close()
		for i, trial := range []record.Trial{
			{Workload: "stream", Metrics: map[string]float64{metrics.Throughput: rate}},
			{Workload: "pingpong", Metrics: map[string]float64{metrics.LatencyP50: 1e5 / rate}},
		} {
			trial.Variant, trial.Pairs, trial.Block, trial.Order, trial.Status, trial.Attempt = "pool", 1, 1, i+1, record.StatusOK, 1
			if err := dir.Append(trial); err != nil {
				t.Error(err)
			}
		}
		return nil
	}
}

// Only a faster pool is proven: not one with half the rate, and not an equal one.
func TestProof(t *testing.T) {
	for factor, good := range map[float64]bool{2: true, 1: false, 0.5: false} {
		pairs := make(map[string]int)
		p := prover{blocks: 6, dir: t.TempDir(), note: func(string) {}, exec: standIn(t, factor, pairs, 0)}
		proof, err := p.run(t.Context(), began, pools[0], pools[1])
		if err != nil {
			t.Fatal(err)
		}
		if proof.Good != good || !strings.Contains(proof.Text, "stream throughput: new/old") || !strings.Contains(proof.Text, "n = 6") {
			t.Errorf("factor %g: %+v", factor, proof)
		}
		if len(pairs) != 6+2 { // all pairs of three nodes; only two of the new nodes are ready
			t.Errorf("measured %v", pairs)
		}
	}
}

// A repeated command does not measure again what has been measured.
func TestProofGoesOn(t *testing.T) {
	dir, pairs := t.TempDir(), make(map[string]int)
	p := prover{blocks: 4, dir: dir, note: func(string) {}, exec: standIn(t, 2, pairs, 5)}
	if _, err := p.run(t.Context(), began, pools[0], pools[1]); err == nil {
		t.Fatal("not interrupted")
	}
	p.exec = standIn(t, 2, pairs, 0)
	if _, err := p.run(t.Context(), began, pools[0], pools[1]); err != nil {
		t.Fatal(err)
	}
	runs := 0
	for _, n := range pairs {
		runs += n
	}
	if runs != 8 {
		t.Errorf("%d runs, not 8", runs)
	}
	again := make(map[string]int)
	p.exec = standIn(t, 2, again, 0)
	if _, err := p.run(t.Context(), began.Add(time.Hour), pools[0], pools[1]); err != nil || len(again) == 0 {
		t.Errorf("another migration measured %v: %v", again, err)
	}
	p.dir = t.TempDir()
	if _, err := p.run(t.Context(), began, pools[0], pools[1][:1]); err == nil || !strings.Contains(err.Error(), "new pool has fewer than two Ready nodes") {
		t.Errorf("one node: %v", err)
	}
}
