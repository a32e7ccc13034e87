package stats

import (
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats/estimate"
)

// Result has the trials of one run of an experiment.
type Result struct {
	// Name distinguishes the run from others of the same experiment.
	Name       string
	Experiment *spec.Experiment
	Trials     []record.Trial
}

// Only limits a comparison to names. An empty list is no limit.
type Only struct{ Variants, Workloads, Metrics []string }

func (o Only) includes(c *cell) bool {
	return emptyOrHas(o.Variants, c.variant.Name) && emptyOrHas(o.Workloads, c.workload.Name)
}

// decides reports whether a gate considers a metric of a cell: a requested one, or by default the primary
// one.
func (o Only) decides(c *cell, metric string) bool {
	if len(o.Metrics) > 0 {
		return slices.Contains(o.Metrics, metric)
	}
	return metric == c.primary
}

func emptyOrHas(names []string, name string) bool {
	return len(names) == 0 || slices.Contains(names, name)
}

// Side is one of the two runs.
type Side struct {
	Name string `json:"name"`
	// Unfinished says what the run still lacks. It is empty for a complete run.
	Unfinished string `json:"unfinished,omitempty"`
}

// Comparison sets a second run beside a first, cell by cell.
type Comparison struct {
	Before Side `json:"before"`
	After  Side `json:"after"`
	// OtherTraffic names the workloads that are not compared because their traffic differs between the runs.
	OtherTraffic []string `json:"otherTraffic,omitempty"`
	// Margin within which a ratio counts as the same.
	Margin float64 `json:"margin"`
	// Changes are the rows that both runs have, in the order of the second.
	Changes []Change `json:"changes"`
	// Missing are the cells that only one run has, in words.
	Missing []string `json:"missing"`
	Gate    Gate     `json:"gate"`
}

// Change is a row of the second run; its Versus is the ratio to the first.
type Change struct {
	Row
	// Before is the row's mean in the first run.
	Before float64 `json:"before"`
	// Primary rows decide the gate, or those of the metrics that were asked for.
	Primary bool `json:"primary"`
}

// Gate is the verdict of a comparison, for a pipeline to act on.
type Gate string

// good: every primary row is the same or faster. slower: at least one is slower. inconclusive: none is
// slower, but one is inconclusive or missing.
const (
	GateGood         Gate = "good"
	GateSlower       Gate = "slower"
	GateInconclusive Gate = "inconclusive"
)

// Compare judges how b differs from a. Cells are matched by name. Blocks of two runs have nothing in common,
// so they are not paired: the interval is Welch's on logs. It covers the scatter within each run, but not
// whatever else changed between the runs. P is adjusted by Holm's procedure, over all primary rows and,
// separately, over all others. The margin is b's. Workloads with the same name and different traffic are not
// compared. If a run is compared with itself, all rows are the same, however noisy it is.
func Compare(a, b Result, only Only) (*Comparison, error) {
	c := &Comparison{Before: Side{Name: a.Name}, After: Side{Name: b.Name}, Margin: b.Experiment.Spec.Margin, Changes: []Change{}, Missing: []string{}, Gate: GateGood}
	other := otherTraffic(a, b, only)
	c.OtherTraffic = slices.Sorted(maps.Values(other))
	var tables [2]*table
	for i, r := range []Result{a, b} {
		t, err := sortTrials(r.Experiment, r.Trials)
		if err != nil {
			return nil, fmt.Errorf("compare %s: %w", r.Name, err)
		}
		tables[i] = t
		side := []*Side{&c.Before, &c.After}[i]
		if side.Unfinished, err = Unfinished(r.Experiment, r.Trials); err != nil {
			return nil, fmt.Errorf("compare %s: %w", r.Name, err)
		}
	}
	before, after := tables[0], tables[1]
	for _, now := range after.cells {
		if !only.includes(now) || other[now.workload.Name] != "" {
			continue
		}
		was := before.byKey[key{now.variant.Name, now.workload.Name, now.pairs}]
		for _, metric := range now.metrics() {
			decides := only.decides(now, metric)
			change, ok := compareCell(before, after, was, now, metric)
			switch {
			case ok:
				change.Primary = decides
				change.Versus.Baseline = a.Name
				c.Changes = append(c.Changes, change)
			case decides:
				c.addMissing(now, a.Name)
			}
		}
	}
	for _, was := range before.cells {
		if only.includes(was) && other[was.workload.Name] == "" && after.byKey[key{was.variant.Name, was.workload.Name, was.pairs}] == nil {
			c.addMissing(was, b.Name)
		}
	}
	c.setGate(len(a.Trials) > 0 && reflect.DeepEqual(a.Trials, b.Trials))
	return c, nil
}

func compareCell(before, after *table, was, now *cell, metric string) (Change, bool) {
	if was == nil || metrics.Get(metric).NotComparedBecause != "" {
		return Change{}, false
	}
	x, okx := before.logs(was, metric)
	y, oky := after.logs(now, metric)
	if !okx || !oky {
		return Change{}, false
	}
	_, old := was.series(metric)
	change := Change{Row: after.row(now, metric), Before: estimate.Mean(old, 0).Mean}
	change.Versus = versus("", y.Minus(x))
	return change, true
}

// logs estimates the mean of a metric's logs. It returns false if a value has no log, or if there are no values.
func (t *table) logs(c *cell, metric string) (estimate.Estimate, bool) {
	blocks, values := c.series(metric)
	for i, x := range values {
		if x <= 0 {
			return estimate.Estimate{}, false
		}
		values[i] = math.Log(x)
	}
	if len(values) == 0 {
		return estimate.Estimate{}, false
	}
	return t.mean(blocks, values), true
}

func (c *Comparison) addMissing(of *cell, in string) {
	c.Missing = append(c.Missing, fmt.Sprintf("%s %s: not in %s", of.variant.Name, At(of.workload.Name, of.pairs), in))
}

// setGate judges all changes, and derives the gate from the primary ones. A run that is compared with itself is the
// same in everything.
func (c *Comparison) setGate(itself bool) {
	families := make(map[bool][]*Row)
	for i := range c.Changes {
		families[c.Changes[i].Primary] = append(families[c.Changes[i].Primary], &c.Changes[i].Row)
	}
	for _, rows := range families {
		judge(rows, c.Margin)
		for _, r := range rows {
			if itself {
				*r.Versus = Versus{Baseline: r.Versus.Baseline, N: r.Versus.N, Ratio: 1, CI95: [2]float64{1, 1}, P: 1, Verdict: Same}
			}
		}
	}
	if len(families[true]) == 0 || len(c.Missing) > 0 {
		c.Gate = GateInconclusive
	}
	for _, r := range families[true] {
		switch r.Versus.Verdict {
		case Slower:
			c.Gate = GateSlower
			return
		case Inconclusive:
			c.Gate = GateInconclusive
		}
	}
}
