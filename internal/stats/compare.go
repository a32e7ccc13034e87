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
	// Imported is how the trials were imported, if they were.
	Imported *record.Imported
}

// Only limits a comparison to names. An empty list is no limit.
type Only struct{ Variants, Workloads, Metrics []string }

func (o Only) includes(c *cell) bool {
	return emptyOrHas(o.Variants, c.variant.Name) && emptyOrHas(o.Workloads, c.workload.Name)
}

// decisive returns the metrics of a cell that a gate considers: the requested ones that it has, or by default the primary one.
func (o Only) decisive(c *cell) []string {
	switch {
	case c == nil:
		return nil
	case len(o.Metrics) > 0:
		return slices.DeleteFunc(c.metrics(), func(metric string) bool { return !slices.Contains(o.Metrics, metric) })
	}
	return []string{c.primary}
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
	// Missing are the cells that only one run has, and those without a ratio of a metric that decides, in words.
	Missing []string `json:"missing"`
	Gate    Gate     `json:"gate"`
}

// Change is a row of the second run; its Versus is the ratio to the first.
type Change struct {
	Row
	// Before is the row's mean in the first run.
	Before float64 `json:"before"`
	// Decides says that the row decides the gate: it is a primary one, or one of a metric that was asked for.
	Decides bool `json:"decides"`
}

// Gate is the verdict of a comparison, for a pipeline to act on.
type Gate string

// good: every row that decides is the same or faster. slower: at least one is slower. inconclusive: none is
// slower, but one is inconclusive or missing.
const (
	GateGood         Gate = "good"
	GateSlower       Gate = "slower"
	GateInconclusive Gate = "inconclusive"
)

// Compare judges how b differs from a. Cells are matched by name. Blocks of two runs have nothing in common,
// so they are not paired: the interval is Welch's on logs. It covers the scatter within each run, but not
// whatever else changed between the runs. P is adjusted by Holm's procedure, over all rows that decide the gate and,
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
		decisive := only.decisive(now)
		if was == nil {
			if len(decisive) > 0 {
				c.Missing = append(c.Missing, fmt.Sprintf("%s: not in %s", now, a.Name))
			}
			continue
		}
		// A metric that only the first run has decides, too: its loss must not pass.
		for _, metric := range only.decisive(was) {
			if !slices.Contains(decisive, metric) {
				decisive = append(decisive, metric)
			}
		}
		for _, metric := range now.metrics() {
			if change, ok := compareCell(before, after, was, now, metric); ok {
				change.Decides = slices.Contains(decisive, metric)
				change.Versus.Baseline = a.Name
				c.Changes = append(c.Changes, change)
				decisive = slices.DeleteFunc(decisive, func(other string) bool { return other == metric })
			}
		}
		for _, metric := range decisive {
			c.Missing = append(c.Missing, fmt.Sprintf("%s: %s", now, c.lacks(was, now, metric)))
		}
	}
	for _, was := range before.cells {
		if only.includes(was) && other[was.workload.Name] == "" && after.byKey[key{was.variant.Name, was.workload.Name, was.pairs}] == nil && len(only.decisive(was)) > 0 {
			c.Missing = append(c.Missing, fmt.Sprintf("%s: not in %s", was, b.Name))
		}
	}
	c.setGate(len(a.Trials) > 0 && reflect.DeepEqual(a.Trials, b.Trials))
	return c, nil
}

func compareCell(before, after *table, was, now *cell, metric string) (Change, bool) {
	if metrics.Get(metric).NotComparedBecause != "" {
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

// lacks says why a metric of a cell cannot be compared.
func (c *Comparison) lacks(was, now *cell, metric string) string {
	switch {
	case !was.has(metric):
		return fmt.Sprintf("no %s in %s", metric, c.Before.Name)
	case !now.has(metric):
		return fmt.Sprintf("no %s in %s", metric, c.After.Name)
	}
	return fmt.Sprintf("no ratio of %s, because a value is 0", metric)
}

// setGate judges all changes, and derives the gate from those that decide. A run that is compared with itself is the
// same in everything.
func (c *Comparison) setGate(itself bool) {
	families := make(map[bool][]*Row)
	for i := range c.Changes {
		families[c.Changes[i].Decides] = append(families[c.Changes[i].Decides], &c.Changes[i].Row)
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
