package history

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"time"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

// alpha is the probability that a trend without any change shows one.
const alpha = 0.05

// Selection selects the series that Trend reads.
type Selection struct {
	Experiment string // that of the newest result if empty
	Metric     string // the primary one of each workload if empty
	// Variant, Workload and Pairs select series; empty and 0 select all.
	Variant, Workload string
	Pairs             int
	// Ratio selects the ratio to the baseline of each run, in which changes of the machine cancel.
	Ratio bool
	// Last is the number of newest results to read.
	Last int
}

// Trend is the course of a metric over the results of one experiment.
type Trend struct {
	Experiment string   `json:"experiment"`
	Metric     string   `json:"metric,omitempty"` // as selected
	Ratio      bool     `json:"ratio"`
	Runs       []Run    `json:"runs"` // oldest first
	Marks      []Mark   `json:"marks"`
	Series     []Series `json:"series"`
	// LeftOut says which results are not in the trend, and why: they cannot be read, or are unfinished.
	LeftOut []string `json:"leftOut,omitempty"`
}

// Run is a result with a place on the axis of a trend.
type Run struct {
	Name    string    `json:"name"`
	Started time.Time `json:"started"`
}

// Mark is a fact that differs between a run and the one before it.
type Mark struct {
	Run  int    `json:"run"` // number of the run in Runs, from 0
	Fact string `json:"fact"`
	From string `json:"from"`
	To   string `json:"to"`
}

// Series is the course of one combination of variant, workload and pairs.
type Series struct {
	Variant  string  `json:"variant"`
	Workload string  `json:"workload"`
	Pairs    int     `json:"pairs"`
	Metric   string  `json:"metric"`
	Unit     string  `json:"unit"` // 1 for ratios
	Points   []Value `json:"points"`
	// Shifts are the changes of the level. Their At, From and To are numbers of runs in Runs.
	Shifts []stats.Shift `json:"shifts,omitempty"`
}

// Value is the value of a run, with its 95% interval.
type Value struct {
	Run  int        `json:"run"`
	N    int        `json:"n"`
	Mean float64    `json:"mean"`
	CI95 [2]float64 `json:"ci95"`
}

// Trend reads the course of a metric.
func (f *Folder) Trend(s Selection) (*Trend, error) {
	if s.Experiment == "" {
		all, err := f.Experiments()
		if err != nil {
			return nil, fmt.Errorf("read trend: %w", err)
		}
		if len(all) == 0 {
			return nil, fmt.Errorf("there is no result in %s yet", f.path)
		}
		s.Experiment = all[0]
	}
	names, err := f.names(Filter{Experiment: s.Experiment})
	if err != nil {
		return nil, fmt.Errorf("read trend: %w", err)
	}
	names = window(names, 0, s.Last)
	slices.Reverse(names)
	t := &Trend{Experiment: s.Experiment, Metric: s.Metric, Ratio: s.Ratio, Runs: []Run{}, Marks: []Mark{}, Series: []Series{}}
	at := make(map[series]int)
	var before rows
	last := make(map[string]map[string]string) // the newest traffic of each workload
	for _, one := range f.readRows(names, s) {
		if one.err != nil {
			t.LeftOut = append(t.LeftOut, fmt.Sprintf("%s: %v", one.name, one.err))
			continue
		}
		t.addRun(one)
		t.markFacts(before.facts, one.facts)
		t.markTraffic(last, one.traffic)
		before = one
		for _, row := range one.rows {
			t.addRow(at, row, s.Ratio)
		}
	}
	if len(t.Series) == 0 {
		return t, fmt.Errorf("no result of %s in %s has such a metric", s.Experiment, f.path)
	}
	for i := range t.Series {
		t.Series[i].findShifts(alpha / float64(len(t.Series)))
	}
	return t, nil
}

// rows are the selected rows of a result.
type rows struct {
	name    string
	facts   []Fact
	traffic map[string]map[string]string // stats.Traffic of each workload that has a row; nil if this version cannot read the experiment
	rows    []stats.Row
	err     error
}

// readRows reads the selected rows of results.
func (f *Folder) readRows(names []string, s Selection) []rows {
	all := make([]rows, len(names))
	each(len(names), func(i int) {
		all[i], all[i].err = f.rowsOf(names[i], s)
		all[i].name = names[i]
	})
	return all
}

func (f *Folder) rowsOf(name string, s Selection) (found rows, err error) {
	dir, err := f.Open(name)
	if err != nil {
		return found, err
	}
	defer dir.Close()
	env, err := dir.Environment()
	if err != nil {
		return found, err
	}
	summary, err := readSummary(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return found, errors.New("it has no report yet")
	case err != nil:
		return found, err
	case summary.Unfinished != "":
		return found, errors.New("it is unfinished: " + summary.Unfinished)
	}
	found.rows = summary.Rows
	if s.Metric == "" {
		found.rows = primary(found.rows)
	}
	found.rows = slices.DeleteFunc(found.rows, func(r stats.Row) bool { return !s.selects(r) })
	found.facts, found.traffic = facts(env), trafficOf(dir, env.Imported, found.rows)
	return found, nil
}

func trafficOf(dir *record.Dir, imported *record.Imported, rows []stats.Row) map[string]map[string]string {
	text, err := dir.Experiment()
	if err != nil {
		return nil
	}
	exp, err := spec.Parse(dir.Path, text, nil)
	if err != nil {
		return nil
	}
	all := make(map[string]map[string]string)
	for _, w := range exp.Spec.Workloads {
		if slices.ContainsFunc(rows, func(r stats.Row) bool { return r.Workload == w.Name }) {
			all[w.Name] = stats.Traffic(exp, imported, w)
		}
	}
	return all
}

func (s Selection) selects(r stats.Row) bool {
	return (s.Metric == "" || r.Metric == s.Metric) && (s.Variant == "" || r.Variant == s.Variant) && (s.Workload == "" || r.Workload == s.Workload) &&
		(s.Pairs == 0 || r.Pairs == s.Pairs) && r.N > 0 && (!s.Ratio || r.Versus != nil)
}

func (t *Trend) addRun(one rows) {
	_, started := split(one.name)
	t.Runs = append(t.Runs, Run{one.name, started})
}

// mark marks the last run with what differs from an earlier one.
func (t *Trend) mark(fact, from, to string) {
	if from != to && len(t.Runs) > 1 {
		t.Marks = append(t.Marks, Mark{len(t.Runs) - 1, fact, cmp.Or(from, "none"), cmp.Or(to, "none")})
	}
}

// markFacts marks the facts that differ from those of the run before.
func (t *Trend) markFacts(before, after []Fact) {
	was, is := Result{Facts: before}, Result{Facts: after}
	for _, name := range namesOf(before, after) {
		t.mark(name, was.Fact(name), is.Fact(name))
	}
}

// markTraffic marks the workloads whose traffic differs from what it last was, and updates that.
func (t *Trend) markTraffic(last, now map[string]map[string]string) {
	for _, workload := range slices.Sorted(maps.Keys(now)) {
		was, is := last[workload], now[workload]
		if was != nil {
			either := maps.Clone(was)
			maps.Copy(either, is)
			for _, field := range slices.Sorted(maps.Keys(either)) {
				t.mark(workload+": "+field, was[field], is[field])
			}
		}
		last[workload] = is
	}
}

// namesOf returns the names of all facts, each once.
func namesOf(before, after []Fact) (names []string) {
	for _, f := range slices.Concat(before, after) {
		if !slices.Contains(names, f.Name) {
			names = append(names, f.Name)
		}
	}
	return names
}

// series identifies a series.
type series struct {
	variant, workload, metric string
	pairs                     int
}

// addRow adds a row of the last run to its series.
func (t *Trend) addRow(at map[series]int, row stats.Row, ratio bool) {
	key := series{row.Variant, row.Workload, row.Metric, row.Pairs}
	v := Value{len(t.Runs) - 1, row.N, row.Mean, row.CI95}
	unit := metrics.Get(row.Metric).Unit
	if ratio {
		unit, v.N, v.Mean, v.CI95 = "1", row.Versus.N, row.Versus.Ratio, row.Versus.CI95
	}
	i, ok := at[key]
	if !ok {
		i = len(t.Series)
		at[key] = i
		t.Series = append(t.Series, Series{Variant: row.Variant, Workload: row.Workload, Pairs: row.Pairs, Metric: row.Metric, Unit: unit})
	}
	t.Series[i].Points = append(t.Series[i].Points, v)
}

// findShifts finds the runs at which the level of the series changed.
func (s *Series) findShifts(alpha float64) {
	var means []float64
	for _, p := range s.Points {
		means = append(means, p.Mean)
	}
	run := func(i int) int { return s.Points[i].Run }
	for _, shift := range stats.Shifts(means, alpha) {
		shift.At, shift.From, shift.To = run(shift.At), run(shift.From), run(shift.To)
		s.Shifts = append(s.Shifts, shift)
	}
}
