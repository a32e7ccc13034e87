package history

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"slipstream.dev/internal/metrics"
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
	// LeftOut says which results could not be read, and why.
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
	var before []Fact
	for _, one := range f.readRows(names, s) {
		if one.err != nil {
			t.LeftOut = append(t.LeftOut, fmt.Sprintf("%s: %v", one.name, one.err))
			continue
		}
		t.addRun(one, &before)
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
	name  string
	facts []Fact
	rows  []stats.Row
	err   error
}

// readRows reads the selected rows of results.
func (f *Folder) readRows(names []string, s Selection) []rows {
	all := make([]rows, len(names))
	each(len(names), func(i int) {
		all[i].name = names[i]
		all[i].facts, all[i].rows, all[i].err = f.rowsOf(names[i], s)
	})
	return all
}

func (f *Folder) rowsOf(name string, s Selection) ([]Fact, []stats.Row, error) {
	dir, err := f.Open(name)
	if err != nil {
		return nil, nil, err
	}
	defer dir.Close()
	env, err := dir.Environment()
	if err != nil {
		return nil, nil, err
	}
	summary, err := readSummary(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, errors.New("it has no report yet")
	}
	if err != nil {
		return nil, nil, err
	}
	found := summary.Rows
	if s.Metric == "" {
		found = primary(found)
	}
	return facts(env), slices.DeleteFunc(found, func(r stats.Row) bool { return !s.selects(r) }), nil
}

func (s Selection) selects(r stats.Row) bool {
	return (s.Metric == "" || r.Metric == s.Metric) && (s.Variant == "" || r.Variant == s.Variant) && (s.Workload == "" || r.Workload == s.Workload) &&
		(s.Pairs == 0 || r.Pairs == s.Pairs) && r.N > 0 && (!s.Ratio || r.Versus != nil)
}

// addRun adds a run, with marks for the facts that differ from those of the run before.
func (t *Trend) addRun(one rows, before *[]Fact) {
	_, started := split(one.name)
	t.Runs = append(t.Runs, Run{one.name, started})
	was, is := Result{Facts: *before}, Result{Facts: one.facts}
	for _, name := range namesOf(*before, one.facts) {
		if from, to := was.Fact(name), is.Fact(name); from != to && len(t.Runs) > 1 {
			t.Marks = append(t.Marks, Mark{len(t.Runs) - 1, name, cmp.Or(from, "none"), cmp.Or(to, "none")})
		}
	}
	*before = one.facts
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
