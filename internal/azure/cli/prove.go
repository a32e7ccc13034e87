package cli

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"slipstream.dev/internal/azure"
	"slipstream.dev/internal/place/command"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

// prover compares two pools: in each block it runs slipstream once on a pair of nodes of each pool, in random order.
// Each block takes another pair.
type prover struct {
	blocks                              int
	image, dir, kubeconfig, kubecontext string
	note                                func(string)
	// exec runs a program; nil means to run it and to interrupt it when the context ends.
	exec func(context.Context, []string) error
}

//go:embed pool.yaml
var poolExperiment []byte

// The runs of each pool are joined into one of these variants.
const (
	oldPool = "old"
	newPool = "new"
)

func (p prover) run(ctx context.Context, began time.Time, old, fresh []azure.Node) (azure.Proof, error) {
	p.dir += "-" + began.Format("20060102T150405Z")
	pairs := map[string][][2]string{oldPool: mesh(old), newPool: mesh(fresh)}
	for variant, all := range pairs {
		if len(all) == 0 {
			return azure.Proof{}, fmt.Errorf("the %s pool has fewer than two Ready nodes, so it cannot be measured; to continue without measuring: --anyway", variant)
		}
	}
	program, err := command.Find("slipstream")
	if err != nil && p.exec == nil {
		return azure.Proof{}, errors.New("the program slipstream, which measures, is neither in this program's folder nor in PATH: install it")
	}
	if err := os.MkdirAll(p.dir, 0o700); err != nil {
		return azure.Proof{}, err
	}
	file := filepath.Join(p.dir, "pool.yaml")
	if err := os.WriteFile(file, poolExperiment, 0o600); err != nil {
		return azure.Proof{}, err
	}
	var trials []record.Trial
	for block := 1; block <= p.blocks; block++ {
		order := []string{oldPool, newPool}
		if rand.IntN(2) == 0 {
			order = []string{newPool, oldPool}
		}
		for _, variant := range order {
			pair := pairs[variant][(block-1)%len(pairs[variant])]
			p.note(fmt.Sprintf("block %d of %d: %s pool, %s to %s", block, p.blocks, variant, pair[0], pair[1]))
			of, err := p.once(ctx, program, file, pair, fmt.Sprintf("%d-%s", block, variant))
			if err != nil {
				return azure.Proof{}, err
			}
			for _, t := range of {
				t.Variant, t.Block, t.Order, t.Entry = variant, block, len(trials)+1, 0
				trials = append(trials, t)
			}
		}
	}
	return judge(trials, p.blocks)
}

// removeTime bounds how long an interrupted run may take to remove its pods.
const removeTime = 2 * time.Minute

// mesh returns every ordered pair of nodes that are ready and not cordoned. The first pairs are those of each node
// with the next.
func mesh(nodes []azure.Node) (pairs [][2]string) {
	var names []string
	for _, n := range nodes {
		if n.Ready && !n.Cordoned {
			names = append(names, n.Name)
		}
	}
	for step := 1; step < len(names); step++ {
		for i := range names {
			pairs = append(pairs, [2]string{names[i], names[(i+step)%len(names)]})
		}
	}
	return pairs
}

// once runs slipstream on a pair of nodes, unless an earlier call has already measured that pair.
func (p prover) once(ctx context.Context, program, file string, pair [2]string, name string) ([]record.Trial, error) {
	sum := sha256.Sum256([]byte(pair[0] + "/" + pair[1]))
	out := filepath.Join(p.dir, fmt.Sprintf("%s-%x", name, sum[:4]))
	if trials, err := read(out); err == nil {
		return trials, nil
	}
	if err := os.RemoveAll(out); err != nil { // the rest of a run that was cut short
		return nil, err
	}
	argv := []string{program, "run", file, "--out", out, "--client-node", pair[0], "--server-node", pair[1]}
	for flag, value := range map[string]string{"--image": p.image, "--kubeconfig": p.kubeconfig, "--context": p.kubecontext} {
		if value != "" {
			argv = append(argv, flag, value)
		}
	}
	run := p.exec
	if run == nil {
		run = func(ctx context.Context, argv []string) error { return command.Interrupt(ctx, removeTime, argv) }
	}
	if err := run(ctx, argv); err != nil {
		return nil, err
	}
	return read(out)
}

// read reads the trials of the only result below a folder. It fails unless all of them succeeded.
func read(out string) ([]record.Trial, error) {
	folders, err := filepath.Glob(filepath.Join(out, "*", "trials.jsonl"))
	if err != nil || len(folders) != 1 {
		return nil, fmt.Errorf("%s has %d results, not one", out, len(folders))
	}
	dir, err := record.Open(filepath.Dir(folders[0]))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	trials, err := dir.Trials()
	if err != nil {
		return nil, err
	}
	ok := make([]record.Trial, 0, len(trials))
	for _, t := range trials {
		if t.Status == record.StatusOK {
			ok = append(ok, t)
		}
	}
	exp, err := spec.Parse("pool.yaml", poolExperiment, nil)
	if err == nil && len(ok) < len(exp.Spec.Workloads) {
		err = fmt.Errorf("%s: %d of %d trials succeeded", filepath.Dir(folders[0]), len(ok), len(exp.Spec.Workloads))
	}
	return ok, err
}

// judge compares the pools: the new one must be faster in at least one metric, and slower in none.
func judge(trials []record.Trial, blocks int) (azure.Proof, error) {
	text := bytes.Replace(poolExperiment, []byte("baseline: pool"), []byte("baseline: "+oldPool), 1)
	text = bytes.Replace(text, []byte("- {name: pool}"), []byte("- {name: "+oldPool+"}\n  - {name: "+newPool+"}"), 1)
	exp, err := spec.Parse("pool.yaml", text, []string{fmt.Sprintf("spec.runs=%d", blocks)})
	if err != nil {
		return azure.Proof{}, err
	}
	summary, err := stats.Analyze(exp, trials)
	if err != nil {
		return azure.Proof{}, err
	}
	proof := summary.Proof(exp, exp.Spec.Variants[1])
	var lines []string
	for _, r := range proof.All {
		lines = append(lines, fmt.Sprintf("%s %s: new/old %.3f (%.3f to %.3f, n = %d), %s", r.Workload, r.Metric, r.Versus.Ratio, r.Versus.CI95[0], r.Versus.CI95[1], r.Versus.N, r.Versus.Verdict))
	}
	for _, missing := range proof.Missing {
		lines = append(lines, missing+": no comparison")
	}
	return azure.Proof{Good: proof.Good() && len(proof.Missing) == 0, Text: strings.Join(lines, "; ")}, nil
}
