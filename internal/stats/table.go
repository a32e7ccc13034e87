package stats

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats/estimate"
	"slipstream.dev/internal/words"
)

// primary returns the main metric of a workload: it determines the number of blocks of runs: auto, and gates
// decide by it. For a latency it is the median, or the mean if the tool of some variant reports no
// percentiles. Tails are judged too, but are too noisy to determine how long a run must take. If no trial has that metric,
// because the tool reported no median, it is the rate by which the workload is judged, or the mean.
func (t *table) primary(w spec.Workload) string {
	main := mainMetric(t.exp, w)
	candidates := slices.Concat([]string{main}, Judged(t.exp, w), []string{metrics.LatencyMean})
	for _, metric := range slices.DeleteFunc(candidates, func(metric string) bool { return metric == metrics.LatencyP99 }) {
		if slices.ContainsFunc(t.cells, func(c *cell) bool { return c.workload.Name == w.Name && c.has(metric) }) {
			return metric
		}
	}
	return main
}

// mainMetric returns the metric for which a workload is run.
func mainMetric(exp *spec.Experiment, w spec.Workload) string {
	switch {
	case w.Stream != nil:
		return metrics.Throughput
	case meanAlone(exp, w):
		return metrics.LatencyMean
	}
	return metrics.LatencyP50
}

// Judged returns the metrics that a workload of an experiment is judged by, the leading one first.
func Judged(exp *spec.Experiment, w spec.Workload) []string {
	switch {
	case meanAlone(exp, w):
		return []string{metrics.LatencyMean}
	case w.PingPong != nil, w.Connect != nil:
		return []string{metrics.LatencyP50, metrics.LatencyP99}
	case w.UnderLoad != nil:
		return []string{metrics.LatencyP99, metrics.LatencyP50}
	case w.HTTP != nil && w.HTTP.Page:
		return []string{metrics.LatencyP50, metrics.LatencyP99}
	case w.HTTP != nil && w.HTTP.Requests > 0:
		return []string{metrics.Completion, metrics.LatencyP50, metrics.LatencyP99}
	case w.HTTP != nil, w.Application != nil:
		return []string{metrics.Rate, metrics.LatencyP50, metrics.LatencyP99}
	}
	return []string{metrics.Throughput}
}

// meanAlone reports whether the mean is the only latency that all variants have, because the tool of one
// reports no percentiles. latte reports them only with -hist, which a run sets, but which may be missing from
// an imported one.
func meanAlone(exp *spec.Experiment, w spec.Workload) bool {
	return (w.PingPong != nil || w.Application != nil) && slices.ContainsFunc(exp.Spec.Variants, func(v spec.Variant) bool {
		tool := exp.WorkloadFor(v, w).Traffic().Tool
		return tool == spec.ToolQperf || tool == spec.ToolMemcached || tool == spec.ToolLatte && exp.Spec.Target.Imported != nil
	})
}

// table has the trials of an experiment by cell and block.
type table struct {
	exp    *spec.Experiment
	blocks int     // last block that has a trial
	cells  []*cell // cells with trials, in the experiment's order
	byKey  map[key]*cell
}

type key struct {
	variant, workload string
	pairs             int
}

// At describes a workload and a number of pairs: "stream at 4 pairs".
func At(workload string, pairs int) string {
	return workload + " at " + words.Count(pairs, "pair")
}

// cell is one variant × workload × pairs.
type cell struct {
	variant  spec.Variant
	workload spec.Workload
	pairs    int
	primary  string // main metric of the workload
	// trials has the trials that count, by block - 1: one, or those of a period or of the rounds of a
	// mesh. A block without a successful trial has none.
	trials [][]*record.Trial
	failed int // failed attempts
}

func sortTrials(exp *spec.Experiment, trials []record.Trial) (*table, error) {
	t := &table{exp: exp, byKey: make(map[key]*cell)}
	trials = record.LastEntries(trials)
	for i := range trials {
		if err := check(&trials[i]); err != nil {
			return nil, fmt.Errorf("trial %d: %w", trials[i].Order, err)
		}
		t.blocks = max(t.blocks, trials[i].Block)
	}
	for i := range trials {
		tr := &trials[i]
		k := key{tr.Variant, tr.Workload, tr.Pairs}
		c := t.byKey[k]
		if c == nil {
			c = &cell{trials: make([][]*record.Trial, t.blocks)}
			t.byKey[k] = c
		}
		counts := &c.trials[tr.Block-1]
		i := slices.IndexFunc(*counts, func(other *record.Trial) bool { return other.Repeat == tr.Repeat && other.Round == tr.Round })
		failed := tr.Status != record.StatusOK
		if failed {
			c.failed++
		}
		switch {
		case failed:
		case i < 0:
			*counts = append(*counts, tr)
		case (*counts)[i].Attempt <= tr.Attempt:
			(*counts)[i] = tr
		}
	}
	for _, v := range exp.Spec.Variants {
		for _, w := range exp.Spec.Workloads {
			for _, pairs := range exp.PairsOf(w) {
				if c := t.byKey[key{v.Name, w.Name, pairs}]; c != nil {
					c.variant, c.workload, c.pairs = v, w, pairs
					t.cells = append(t.cells, c)
				}
			}
		}
	}
	for _, c := range t.cells {
		c.primary = t.primary(c.workload)
	}
	for k, c := range t.byKey {
		if c.pairs == 0 {
			return nil, fmt.Errorf("trials of variant %q, workload %q, %d pairs: the experiment has no such combination",
				k.variant, k.workload, k.pairs)
		}
	}
	return t, nil
}

func check(tr *record.Trial) error {
	if tr.Block < 1 || tr.Block > spec.MaxBlocks {
		return fmt.Errorf("block %d: blocks count from 1 to %d at most", tr.Block, spec.MaxBlocks)
	}
	for metric, x := range tr.Metrics {
		if m, ok := metrics.Lookup(metric); !ok || m.OfLinks() {
			return fmt.Errorf("metric %q is unknown", metric)
		}
		if math.IsNaN(x) || math.IsInf(x, 0) {
			return fmt.Errorf("%s is %v", metric, x)
		}
	}
	return nil
}

// baseline returns the cell that c is compared with. It is nil if c is a baseline itself, or if the other
// cell has no trials yet.
func (t *table) baseline(c *cell) *cell {
	return t.byKey[key{t.exp.BaselineOf(c.variant), c.workload.Name, c.pairs}]
}

// pilot returns the number of blocks that determined the total number. It is 0 if the number was set, or if
// the run ended too early.
func (t *table) pilot() int {
	if runs := t.exp.Spec.Runs; runs.Auto && runs.Max > leastBlocks && t.blocks >= leastBlocks {
		return PilotBlocks
	}
	return 0
}

// pilotOf returns how many of the blocks, which are in order, determined the total number.
func (t *table) pilotOf(blocks []int) int {
	n := 0
	for n < len(blocks) && blocks[n] <= t.pilot() {
		n++
	}
	return n
}

// mean estimates the mean of a series.
func (t *table) mean(blocks []int, values []float64) estimate.Estimate {
	return estimate.Mean(values, t.pilotOf(blocks))
}

// Mean estimates the mean of values, each from a block of its own, with its 95% interval by Student's t. One
// value has no interval: both ends are the value.
func Mean(values []float64) (m float64, ci95 [2]float64) {
	e := estimate.Mean(values, 0)
	return e.Mean, e.Interval()
}

// String is the name of the cell: "fastpath stream at 4 pairs".
func (c *cell) String() string { return c.variant.Name + " " + At(c.workload.Name, c.pairs) }

// has reports whether a trial of the cell has the metric.
func (c *cell) has(metric string) bool {
	blocks, _ := c.series(metric)
	return blocks != nil
}

// metrics returns the metrics of the cell, in order, or its primary one if no trial succeeded.
func (c *cell) metrics() []string {
	var found []string
	for _, m := range metrics.OfTrials() {
		for _, name := range c.named(m) {
			if c.has(name) {
				found = append(found, name)
			}
		}
	}
	if found == nil {
		return []string{c.primary}
	}
	return found
}

// named returns the names that a metric has in the cell's trials, in order: one for each DaemonSet, or its own.
func (c *cell) named(m metrics.Metric) []string {
	if !m.ByDaemonSet {
		return []string{m.Name}
	}
	names := make(map[string]bool)
	for _, trials := range c.trials {
		for _, tr := range trials {
			for name := range tr.Metrics {
				if strings.HasPrefix(name, metrics.OfDaemonSet(m.Name, "")) {
					names[name] = true
				}
			}
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// series returns the values of a metric, and the blocks that have it.
func (c *cell) series(metric string) (blocks []int, values []float64) {
	for b := 1; b <= len(c.trials); b++ {
		if x, ok := c.value(b, metric); ok {
			blocks, values = append(blocks, b), append(values, x)
		}
	}
	return blocks, values
}

// value returns a block's value of a metric: that of its trial, or the mean over its period's trials or its
// rounds.
func (c *cell) value(block int, metric string) (x float64, ok bool) {
	n := 0.0
	for _, tr := range c.trials[block-1] {
		if y, has := tr.Metrics[metric]; has {
			n++
			x += (y - x) / n
		}
	}
	return x, n > 0
}

// all returns all trials that count.
func (c *cell) all() []*record.Trial { return slices.Concat(c.trials...) }

var (
	errNoBlock = errors.New("no block has both")
	errNoRatio = errors.New("a ratio needs a reference value above 0")
)

// ratio estimates log(c) − log(base). It uses the blocks that have both, and returns their ratios. If the
// runs of two variants are not paired, it compares the mean of the one with that of the other, and returns no
// blocks.
func (t *table) ratio(c, base *cell, metric string) (e estimate.Estimate, blocks []int, ratios []float64, err error) {
	if !t.paired() {
		own, ok := t.logs(c, metric)
		other, both := t.logs(base, metric)
		if !ok || !both {
			return e, nil, nil, errNoRatio
		}
		return own.Minus(other), nil, nil, nil
	}
	if blocks, ratios, err = logRatios(c, base, metric); err != nil {
		return e, nil, nil, err
	}
	return estimate.Within(ratios, periodsApart(c, base, blocks), t.pilotOf(blocks)), blocks, ratios, nil
}

// paired reports whether the trials of a block belong together.
func (t *table) paired() bool {
	imported := t.exp.Spec.Target.Imported
	return imported == nil || imported.Interleaved
}

// logRatios returns log(c) − log(base) for the blocks that have both. If a value is not above 0, there is no
// result: leaving out only its block would favour one of the two.
func logRatios(c, base *cell, metric string) (blocks []int, ratios []float64, err error) {
	for b := 1; b <= len(c.trials); b++ {
		x, ok := c.value(b, metric)
		y, both := base.value(b, metric)
		if !ok || !both {
			continue
		}
		if x <= 0 || y <= 0 {
			return nil, nil, errNoRatio
		}
		blocks, ratios = append(blocks, b), append(ratios, math.Log(x)-math.Log(y))
	}
	if blocks == nil {
		return nil, nil, errNoBlock
	}
	return blocks, ratios, nil
}

// warnings returns the warnings of the cell's trials, one for each code, with its first message and the
// number of trials that had it. A warning about failures comes last.
func (c *cell) warnings() []record.Warning {
	warnings := []record.Warning{}
	count := make(map[string]int)
	good := 0
	for _, tr := range c.all() {
		good++
		seen := make(map[string]bool)
		for _, w := range tr.Warnings {
			if seen[w.Code] {
				continue
			}
			seen[w.Code] = true
			if count[w.Code]++; count[w.Code] == 1 {
				warnings = append(warnings, w)
			}
		}
	}
	for i, w := range warnings {
		warnings[i].Message = fmt.Sprintf("in %d of %d trials: %s", count[w.Code], good, w.Message)
	}
	if c.failed > 0 {
		blocks := 0
		for _, of := range c.trials {
			if len(of) > 0 {
				blocks++
			}
		}
		warnings = append(warnings, record.Warnf(record.WarnFailedTrials,
			"%d of %d attempts failed; %d blocks have a trial that succeeded", c.failed, c.failed+good, blocks))
	}
	return warnings
}
