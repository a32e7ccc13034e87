// Package result reads results of slipstream: the folder of a run or an import, or a bundle that slipstream report --bundle wrote. It has
// the trials, the environment in which they ran, and the comparisons with their verdicts.
//
// The comparisons are computed from the trials when a result is opened, as slipstream report does. So they do not depend on whether the
// run has ended, nor on the version of slipstream that ran it. docs/reference/results.md of the project explains all names, units and
// warnings, and docs/explanation/method.md the statistics. Package stats computes the same from other numbers.
package result

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"time"

	"slipstream.dev/internal/bundle"
	"slipstream.dev/internal/record"
	analysis "slipstream.dev/internal/stats"
	"slipstream.dev/pkg/stats"
)

// Result is what one run of an experiment gave.
type Result struct {
	// Experiment is the name of the experiment, Baseline that of its baseline variant.
	Experiment, Baseline string
	// Unfinished says which trials the run lacks, because it is under way or was interrupted. It is empty if the run is complete.
	Unfinished  string
	Environment Environment
	// Trials are all attempts, in the order in which they ran. Row.Blocks has the values that count.
	Trials []Trial
	// Rows are the values and comparisons, in the experiment's order of variants, workloads, pairs and metrics.
	Rows []Row
	// Expectations are the outcomes of what the experiment expects, in its order.
	Expectations []Expectation
}

// Environment describes the program and the machines of a run. json.Marshal gives all of environment.json.
type Environment struct {
	Version string            // of slipstream
	Started time.Time         // when the run began
	Command string            // the command that repeats the run
	Labels  map[string]string // what the user said of the run, such as branch and commit
	Nodes   []Node            // in the experiment's order

	record record.Environment
}

// Node is a machine, or a node of a lab on one.
type Node struct {
	Name         string
	Kernel       string // release of the kernel
	Arch         string // architecture, as uname -m prints it
	Distribution string // PRETTY_NAME of /etc/os-release
	CPU          string // name of the CPU
}

// Trial is one variant with one workload and number of pairs, measured once. json.Marshal gives all of its line in trials.jsonl:
// what each pair, host and device counted, and the histogram of latencies.
type Trial struct {
	Block    int // number of its block, from 1
	Order    int // its place in the whole run, from 1
	Attempt  int // from 1; a failed trial is repeated
	Variant  string
	Workload string
	Pairs    int // number of client-server pairs at the same time
	// Period is the number of its period, from 1, if variants are switched; otherwise 0.
	Period int
	// Started is when the trial began, by the controller's clock.
	Started time.Time
	// Error says why a trial failed. It is empty if the trial succeeded.
	Error string
	// Metrics are its values by name, over all pairs, in base units: bit/s, s.
	Metrics  map[string]float64
	Warnings []Warning

	record record.Trial
}

// Warning says what may make a value wrong or uncertain.
type Warning struct {
	Code    string // kind of warning, such as generator-bound
	Message string // a sentence with the figures
}

// Row is one metric of one variant, workload and number of pairs.
type Row struct {
	Variant  string
	Workload string
	Pairs    int    // number of client-server pairs at the same time
	Metric   string // such as throughput or latency_p50
	Unit     string // of Mean, CI95 and the blocks' values: bit/s, s, or 1 for a share
	// Primary marks the main metric of the workload, by which gates decide.
	Primary bool
	// N is the number of blocks with a trial that succeeded. If there is none, the row has no values.
	N int
	// Mean is the arithmetic mean of the blocks. CI95 are the ends of its 95% interval; with one block both are the mean.
	Mean float64
	CI95 [2]float64
	// Versus is the comparison with the row's baseline. It is nil in rows of a baseline itself, for loss, and if there is no ratio, as a
	// warning says then.
	Versus   *Versus
	Blocks   []Block
	Warnings []Warning
}

// Block is what one block contributes to a row.
type Block struct {
	Number int // from 1
	Value  float64
	// Ratio is the ratio to the baseline's value in the same block. It is 0 if there is none.
	Ratio float64
}

// Versus is a comparison of a row with its baseline.
type Versus struct {
	Baseline string // variant with which it is compared
	// Ratio is variant / baseline. Its P is adjusted by Holm's procedure over the variants that have the same baseline, workload, pairs and
	// metric.
	Ratio   stats.Ratio
	Verdict Verdict
}

// Verdict says what a comparison proves about performance: half the latency is faster.
type Verdict string

// Same means that the whole interval is within the experiment's margin. Faster and Slower need an adjusted p-value of at most 0.05.
// Inconclusive is everything else.
const (
	Faster       Verdict = "faster"
	Slower       Verdict = "slower"
	Same         Verdict = "same"
	Inconclusive Verdict = "inconclusive"
)

// Expectation is a claim of the experiment, such as "rps is faster", and what came of it.
type Expectation struct {
	Claim   string
	Outcome Outcome
}

// Outcome of an expectation.
type Outcome string

// An expectation is met if all its comparisons agree, failed if one contradicts it, and otherwise inconclusive.
const (
	Met       Outcome = "met"
	Failed    Outcome = "failed"
	Undecided Outcome = "inconclusive"
)

// Open reads a results folder, or a bundle (demo.zip), whole into memory. A result may come from somebody else: symbolic links are not
// followed, files that are too large are refused, and so is a bundle of which a file was changed since it was sealed. It does not verify
// that what a trial reports follows from what its pairs measured, as slipstream verify does. It returns an error if no trial has ended yet, and
// for a format that is later than this package.
func Open(path string) (*Result, error) {
	r, err := open(path)
	if err != nil {
		return nil, fmt.Errorf("open result %s: %w", path, err)
	}
	return convert(r), nil
}

func open(path string) (*bundle.Result, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.IsDir() {
		dir, err := record.Open(path)
		if err != nil {
			return nil, err
		}
		defer dir.Close()
		return bundle.Read(dir)
	}
	if !info.Mode().IsRegular() {
		return nil, &fs.PathError{Op: "open", Path: path, Err: fs.ErrInvalid}
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := bundle.Open(f)
	if err != nil {
		return nil, err
	}
	return b.Result()
}

func convert(from *bundle.Result) *Result {
	r := &Result{
		Experiment: from.Summary.Experiment, Baseline: from.Summary.Baseline, Unfinished: from.Summary.Unfinished,
		Environment: environment(from.Environment),
	}
	for _, t := range from.Trials {
		r.Trials = append(r.Trials, Trial{
			Block: t.Block, Order: t.Order, Attempt: t.Attempt, Variant: t.Variant, Workload: t.Workload, Pairs: t.Pairs, Period: t.Period,
			Started: t.Started, Error: t.Error, Metrics: t.Metrics, Warnings: warnings(t.Warnings), record: t,
		})
	}
	for _, row := range from.Summary.Rows {
		r.Rows = append(r.Rows, convertRow(row))
	}
	for _, e := range from.Summary.Expected {
		r.Expectations = append(r.Expectations, Expectation{e.Claim, Outcome(e.Outcome)})
	}
	return r
}

func environment(env record.Environment) Environment {
	e := Environment{Version: env.Version, Started: env.Started, Command: env.Command, Labels: env.Labels, record: env}
	for _, n := range env.Nodes {
		e.Nodes = append(e.Nodes, Node{Name: n.Name, Kernel: n.Kernel, Arch: n.Arch, Distribution: n.Distribution, CPU: n.CPUModel})
	}
	return e
}

func convertRow(from analysis.Row) Row {
	r := Row{
		Variant: from.Variant, Workload: from.Workload, Pairs: from.Pairs, Metric: from.Metric, Unit: from.Unit,
		Primary: from.Primary, N: from.N, Mean: from.Mean, CI95: from.CI95, Warnings: warnings(from.Warnings),
	}
	for _, b := range from.Blocks {
		r.Blocks = append(r.Blocks, Block{b.Block, b.Value, b.Ratio})
	}
	if v := from.Versus; v != nil {
		r.Versus = &Versus{v.Baseline, stats.Ratio{N: v.N, Value: v.Ratio, CI95: v.CI95, P: v.P}, Verdict(v.Verdict)}
	}
	return r
}

func warnings(from []record.Warning) (all []Warning) {
	for _, w := range from {
		all = append(all, Warning{w.Code, w.Message})
	}
	return all
}

// MarshalJSON returns all of environment.json.
func (e Environment) MarshalJSON() ([]byte, error) { return json.Marshal(e.record) }

// MarshalJSON returns all of the trial's line in trials.jsonl.
func (t Trial) MarshalJSON() ([]byte, error) { return json.Marshal(t.record) }
