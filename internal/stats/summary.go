// Package stats turns the trials of an experiment into estimates, intervals and verdicts, and computes how
// many blocks an experiment with runs: auto needs. The unit is the trial, or the period if something is
// switched between periods. The parts of a unit (packets, seconds, pairs, a period's trials) are never pooled
// as if they were independent. docs/explanation/method.md explains the method.
//
// The package reads the records of internal/record, and internal/report shows its results. It measures
// nothing, and can judge an old result on any machine.
package stats

import (
	"fmt"
	"math"
	"slices"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats/estimate"
	"slipstream.dev/internal/words"
)

// Summary has the estimates and verdicts of every combination of variant, workload and pairs:
// summary.json.
type Summary struct {
	Experiment string `json:"experiment"` // name of the experiment
	// Unfinished says which trials the run still lacks; empty if it is complete.
	Unfinished string `json:"unfinished,omitempty"`
	Baseline   string `json:"baseline"` // name of its baseline
	// Rows are the results, in the experiment's order of variants, workloads and pairs,
	// then in record's order of metrics.
	Rows []Row `json:"rows"`
	// Expected are the outcomes of the experiment's expectations, in its order.
	Expected []Expected `json:"expected,omitempty"`
	// Series are the experiment's series, in its order, once for each workload and number of pairs.
	Series []Series `json:"series,omitempty"`
	// Meshes are the links of the mesh, once for each variant, workload and metric; absent without a mesh.
	Meshes []Mesh `json:"meshes,omitempty"`
	// Limits are the NICs and cores that limited a result, in the experiment's order; absent if
	// no NIC has a rate limit and no node has a role.
	Limits []Limit `json:"limits,omitempty"`
	Prices []Price `json:"prices,omitempty"` // what each variant achieves for its price
	// Published are the experiment's published figures, compared with the measured ones, in its order.
	Published []Published `json:"published,omitempty"`
}

// Row is one metric of one combination of variant, workload and pairs. If all its trials
// failed, there is one row, for its primary metric, with n 0.
type Row struct {
	Variant  string `json:"variant"`  // name of the variant
	Workload string `json:"workload"` // name of the workload
	Pairs    int    `json:"pairs"`    // number of pairs
	Metric   string `json:"metric"`   // name of the metric
	Unit     string `json:"unit"`     // its unit
	Primary  bool   `json:"primary"`  // whether the metric is the main one of the workload, by which gates decide
	N        int    `json:"n"`        // blocks with a trial that succeeded
	// Mean is the arithmetic mean of the trials. With fewer than two blocks there is no
	// interval: both its ends are the mean, and there is a warning few-blocks.
	Mean float64    `json:"mean"`
	CI95 [2]float64 `json:"ci95"` // 95% interval of the mean
	// Versus is the comparison with the baseline; absent in the baseline's own rows, for loss, and if
	// there is no ratio (warning no-ratio).
	Versus   *Versus          `json:"versus,omitempty"`
	Warnings []record.Warning `json:"warnings"` // what may make its figures wrong or uncertain
	// Blocks has the values behind Mean and Ratio, in order. trials.jsonl has them too.
	Blocks []Block `json:"-"`
}

// Block is one block of a row: the value that its trial measured, and the ratio to the baseline's trial, 0 if
// there is none.
type Block struct {
	Block        int
	Value, Ratio float64
}

// Versus is a row's comparison with its baseline: the ratio variant / baseline.
type Versus struct {
	Baseline string `json:"baseline"` // name of the variant that it is compared with
	// N is the number of blocks in which both succeeded; 1 if they give no interval.
	N int `json:"n"`
	// Ratio is the geometric mean of the blocks' ratios. Its interval is not adjusted
	// for the number of comparisons. With n 1 both its ends are the ratio, and the
	// verdict is inconclusive.
	Ratio float64    `json:"ratio"`
	CI95  [2]float64 `json:"ci95"` // 95% interval of the ratio
	// P is the p-value of "the ratio is 1", adjusted by Holm's procedure over the variants that are
	// compared with the same baseline, under the same workload, pairs and metric.
	P       float64 `json:"p"`
	Verdict Verdict `json:"verdict"` // faster, slower, same or inconclusive
}

// Analyze judges the trials of one experiment, which may be incomplete. If a trial has several attempts, the
// last successful one counts. Failed trials are left out, with a warning. A trial that does not belong to exp
// is an error, and so is a metric that is unknown or not a finite number.
func Analyze(exp *spec.Experiment, trials []record.Trial) (*Summary, error) {
	t, err := sortTrials(exp, trials)
	if err != nil {
		return nil, fmt.Errorf("analyze %s: %w", exp.Metadata.Name, err)
	}
	s := &Summary{Experiment: exp.Metadata.Name, Baseline: exp.Spec.Baseline, Rows: []Row{}}
	if s.Unfinished, err = Unfinished(exp, trials); err != nil {
		return nil, fmt.Errorf("analyze %s: %w", exp.Metadata.Name, err)
	}
	for _, c := range t.cells {
		for _, metric := range c.metrics() {
			r := t.row(c, metric)
			t.compare(&r, c)
			s.Rows = append(s.Rows, r)
		}
	}
	type family struct {
		baseline, workload, metric string
		pairs                      int
	}
	families := make(map[family][]*Row)
	for i := range s.Rows {
		if r := &s.Rows[i]; r.Versus != nil {
			f := family{r.Versus.Baseline, r.Workload, r.Metric, r.Pairs}
			families[f] = append(families[f], r)
		}
	}
	for _, rows := range families {
		judge(rows, exp.Spec.Margin)
	}
	s.Expected = t.expected(s)
	s.Series, s.Limits, s.Prices = t.series(), t.limits(), t.prices(s.Rows)
	s.Published = t.published(s)
	s.Meshes = t.meshes()
	return s, nil
}

// row summarises a metric of a cell's own trials.
func (t *table) row(c *cell, metric string) Row {
	blocks, values := c.series(metric)
	r := Row{
		Variant: c.variant.Name, Workload: c.workload.Name, Pairs: c.pairs,
		Metric: metric, Unit: metrics.Get(metric).Unit, Primary: metric == c.primary, N: len(values), Warnings: c.warnings(),
	}
	if r.N == 0 {
		return r
	}
	for i, b := range blocks {
		r.Blocks = append(r.Blocks, Block{Block: b, Value: values[i]})
	}
	own := t.mean(blocks, values)
	r.Mean, r.CI95 = own.Mean, own.Interval()
	least, rests := fewBlocks, words.Count(r.N, "block")
	if t.exp.Switches() {
		least, rests = fewPeriods, words.Count(r.N, "period")+" of the variant"
	}
	if r.N < least {
		r.warn(record.WarnFewBlocks, "the interval rests on %s, and should rest on at least %d", rests, least)
	}
	return r
}

// compare adds to a row the comparison of the cell with its baseline. The adjustment of P and the verdict
// depend on the family, and are added later.
func (t *table) compare(r *Row, c *cell) {
	base := t.baseline(c)
	if base == nil {
		rise, significant := estimate.Trend(c.series(r.Metric))
		switch {
		case !r.Primary || !significant || math.Abs(rise) <= driftTold:
		case !t.paired():
			r.warn(record.WarnApart, "each variant was measured by itself, and %s of this one moved by %+.0f%% "+
				"from the first quarter of its runs to the last: a ratio to it may be off by as much", r.Metric, 100*rise)
		default:
			r.warn(record.WarnDrift, "%s moved by %+.0f%% from the first quarter of the blocks to the last: "+
				"the machine changed, and means mix its states; ratios are taken within blocks, so they hold", r.Metric, 100*rise)
		}
		return
	}
	if r.N == 0 || metrics.Get(r.Metric).NotComparedBecause != "" {
		return
	}
	e, blocks, ratios, err := t.ratio(c, base, r.Metric)
	if err != nil {
		r.warn(record.WarnNoRatio, "no comparison with %s: %v", base.variant.Name, err)
		return
	}
	for i, b := range blocks {
		at := slices.IndexFunc(r.Blocks, func(own Block) bool { return own.Block == b })
		r.Blocks[at].Ratio = math.Exp(ratios[i])
	}
	r.Versus = versus(base.variant.Name, e)
	if !t.paired() {
		r.warn(record.WarnApart, "each variant was measured by itself: "+
			"a ratio may come from what else changed between the two measurements")
	}
	if runs := t.exp.Spec.Runs; r.Primary && runs.Auto && e.HalfWidth() > math.Log1p(runs.Width) {
		r.warn(record.WarnFewBlocks, "after %d blocks the interval of the ratio is ±%.1f%%, and ±%.1f%% was asked for",
			e.N, 100*math.Expm1(e.HalfWidth()), 100*runs.Width)
	}
}

func (r *Row) warn(code, format string, args ...any) {
	r.Warnings = append(r.Warnings, record.Warnf(code, format, args...))
}

const (
	// fewBlocks is the number of blocks below which Student's quantile becomes unreasonably large: 2.8
	// with five blocks, 3.2 with four, 12.7 with two.
	fewBlocks = 5
	// fewPeriods is the same for the periods of each variant: 4.3 with four, 12.7 with three.
	fewPeriods = 4
	// driftTold is the drift, as a share, above which readers of the means are warned.
	driftTold = 0.05
)
