// Package history reads folders of results: what a listing needs of each result, and the course of a metric over
// many. There is no store but the files: a Folder remembers what it has read for as long as it lives. Its neighbours
// are internal/record, which reads one results folder, and internal/report, which shows what is read here. A folder
// may be somebody else's, so whatever a result contains, the worst outcome is that it is listed as broken.
package history

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/stats"
)

// State of a result.
type State string

// Unfinished: the run has stopped before its end. Broken: the folder cannot be read, as Problem says.
const (
	Complete   State = "complete"
	Running    State = "running"
	Unfinished State = "unfinished"
	Broken     State = "broken"
)

// Result is a results folder in a listing.
type Result struct {
	Name       string    `json:"name"`       // of the folder
	Experiment string    `json:"experiment"` // the name of the folder without the time
	Started    time.Time `json:"started"`    // the time in the name of the folder
	State      State     `json:"state"`
	Problem    string    `json:"problem,omitempty"` // why a result is broken or unfinished
	Facts      []Fact    `json:"facts,omitempty"`
	// Verdicts counts the comparisons by their primary metrics.
	Verdicts map[stats.Verdict]int `json:"verdicts,omitempty"`
	// Best and Worst are the primary comparisons with the largest gain and the largest loss, absent if nothing is
	// proven faster or slower.
	Best  *stats.Row `json:"best,omitempty"`
	Worst *stats.Row `json:"worst,omitempty"`
}

// Fact is something that results depend on.
type Fact struct {
	Name string `json:"name"` // kernel, CPU, NIC, overlay, program
	Text string `json:"text"`
}

// Fact returns the text of a fact, or "".
func (r Result) Fact(name string) string {
	for _, f := range r.Facts {
		if f.Name == name {
			return f.Text
		}
	}
	return ""
}

// Filter selects results. The zero value selects all.
type Filter struct {
	Experiment string
	Since      time.Time
	// Words must all occur in a result, in upper or lower case: in its name, its state, its facts or its verdicts.
	Words []string
}

// Folder is a folder of results. Several goroutines can use it.
type Folder struct {
	path string

	mu    sync.Mutex
	known map[string]known // by name
}

// known is a result that was read before. It is valid while its summary has this size and modification time.
type known struct {
	size     int64
	modified time.Time
	result   Result
}

// Open opens a folder of results.
func Open(path string) (*Folder, error) {
	info, err := os.Stat(path)
	if err == nil && !info.IsDir() {
		err = fmt.Errorf("%s is not a folder", path)
	}
	if _, one := os.Lstat(filepath.Join(path, "experiment.yaml")); err == nil && one == nil {
		err = fmt.Errorf("%s is one result: name the folder that it is in", path)
	}
	if err != nil {
		return nil, fmt.Errorf("open folder of results: %w", err)
	}
	return &Folder{path: path, known: make(map[string]known)}, nil
}

const timeInName = "20060102T150405Z"

// cutName cuts the name of a results folder, NAME-TIMESTAMP. A regular expression would take most of the time of a listing.
func cutName(folder string) (experiment, timestamp string, ok bool) {
	at := len(folder) - len(timeInName)
	if at < len("x-") || folder[at-1] != '-' {
		return "", "", false
	}
	for i, c := range []byte(folder[at:]) {
		if pattern := timeInName[i]; '0' <= pattern && pattern <= '9' {
			if c < '0' || c > '9' {
				return "", "", false
			}
		} else if c != pattern {
			return "", "", false
		}
	}
	return folder[:at-1], folder[at:], true
}

// Names returns the names of the results folders in a folder, newest first.
func Names(folder string) ([]string, error) {
	f, err := os.Open(folder)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	entries, err := f.ReadDir(-1)
	if err != nil {
		return nil, err
	}
	var all []string
	for _, e := range entries {
		if _, _, ok := cutName(e.Name()); ok && e.IsDir() {
			all = append(all, e.Name())
		}
	}
	slices.SortFunc(all, func(a, b string) int {
		if c := strings.Compare(b[len(b)-len(timeInName):], a[len(a)-len(timeInName):]); c != 0 {
			return c
		}
		return strings.Compare(b, a) // any order, but the same one each time
	})
	return all, nil
}

// split returns the parts of a results folder's name.
func split(name string) (experiment string, started time.Time) {
	experiment, timestamp, _ := cutName(name)
	started, _ = time.Parse(timeInName, timestamp)
	return experiment, started
}

// Experiment returns the name of a result's experiment, from the name of its folder.
func Experiment(name string) string {
	experiment, _, _ := cutName(name)
	return experiment
}

// Started returns when the run of a result began, from the name of its folder.
func Started(name string) time.Time {
	_, started := split(name)
	return started
}

// Path returns the path of the folder.
func (f *Folder) Path() string { return f.path }

// Open opens one of the folder's results by its name.
func (f *Folder) Open(name string) (*record.Dir, error) {
	if _, _, ok := cutName(name); !ok || filepath.Base(name) != name {
		return nil, fmt.Errorf("%q is not the name of a results folder: %w", name, fs.ErrNotExist)
	}
	return record.Open(filepath.Join(f.path, name))
}

// List returns the results that the filter selects, newest first: at most limit after the first skip. total is how
// many it selects.
func (f *Folder) List(by Filter, skip, limit int) (page []Result, total int, err error) {
	names, err := f.names(by)
	if err != nil {
		return nil, 0, fmt.Errorf("list results: %w", err)
	}
	if len(by.Words) > 0 {
		all := slices.DeleteFunc(f.readAll(names), func(r Result) bool { return !r.has(by.Words) })
		return slices.Clone(window(all, skip, limit)), len(all), nil
	}
	return f.readAll(window(names, skip, limit)), len(names), nil
}

// window returns at most limit elements after the first skip.
func window[T any](all []T, skip, limit int) []T {
	skip = min(max(skip, 0), len(all))
	return all[skip:min(skip+limit, len(all))]
}

// names returns the names that a filter selects without reading the results.
func (f *Folder) names(by Filter) ([]string, error) {
	names, err := Names(f.path)
	since := by.Since.UTC().Format(timeInName) // which sorts like the time
	return slices.DeleteFunc(names, func(name string) bool {
		experiment, timestamp, _ := cutName(name)
		return by.Experiment != "" && experiment != by.Experiment || timestamp < since
	}), err
}

// Labelled returns the name of the newest complete result of an experiment that has a label with this value. It skips
// the result named other.
func (f *Folder) Labelled(experiment, value, other string) (string, error) {
	names, err := f.names(Filter{Experiment: experiment})
	if err != nil {
		return "", err
	}
	for _, name := range names {
		if name == other {
			continue
		}
		r := f.Read(name)
		if r.State == Complete && slices.ContainsFunc(r.Facts, func(l Fact) bool { return strings.HasPrefix(l.Name, LabelFact) && l.Text == value }) {
			return name, nil
		}
	}
	return "", fmt.Errorf("%s has no other complete result of %s with a label %s: slipstream run --label KEY=%[3]s makes one", f.path, experiment, value)
}

// Experiments returns the names of all experiments that have results, in the order of their newest one.
func (f *Folder) Experiments() ([]string, error) {
	names, err := Names(f.path)
	var all []string
	seen := make(map[string]bool)
	for _, name := range names {
		if experiment := Experiment(name); !seen[experiment] {
			seen[experiment] = true
			all = append(all, experiment)
		}
	}
	return all, err
}

// readAll reads results on all CPUs, and keeps their order.
func (f *Folder) readAll(names []string) []Result {
	all := make([]Result, len(names))
	each(len(names), func(i int) { all[i] = f.Read(names[i]) })
	return all
}

// each calls do for 0 to n-1, on all CPUs.
func each(n int, do func(int)) {
	next := make(chan int)
	var wg sync.WaitGroup
	for range min(n, runtime.GOMAXPROCS(0)) {
		wg.Go(func() {
			for i := range next {
				do(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
}

// summaryFile is the file that a listing reads of a finished run.
const summaryFile = "summary.json"

// Read reads one result. It reads a complete one again only if its summary has changed.
func (f *Folder) Read(name string) Result {
	info, err := os.Lstat(filepath.Join(f.path, name, summaryFile))
	if err != nil || !info.Mode().IsRegular() {
		return f.read(name)
	}
	f.mu.Lock()
	k, ok := f.known[name]
	f.mu.Unlock()
	if ok && k.size == info.Size() && k.modified.Equal(info.ModTime()) {
		return k.result
	}
	r := f.read(name)
	if r.State == Complete {
		f.mu.Lock()
		f.known[name] = known{info.Size(), info.ModTime(), r}
		f.mu.Unlock()
	}
	return r
}

// read reads a result from its files.
func (f *Folder) read(name string) Result {
	r := Result{Name: name, State: Complete}
	r.Experiment, r.Started = split(name)
	broken := func(err error) Result {
		r.State, r.Problem = Broken, err.Error()
		return r
	}
	dir, err := f.Open(name)
	if err != nil {
		return broken(err)
	}
	defer dir.Close()
	env, err := dir.Environment()
	if err != nil {
		return broken(err)
	}
	r.Facts = facts(env)
	s, err := readSummary(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		r.State, r.Problem = Unfinished, "it has no report yet"
	case err != nil:
		return broken(err)
	case s.Unfinished != "":
		r.State, r.Problem = Unfinished, s.Unfinished
	}
	if r.State == Unfinished && dir.Running() {
		r.State, r.Problem = Running, ""
	}
	r.judge(primary(s.Rows))
	return r
}

// summary is the part of summary.json that is read here.
type summary struct {
	Unfinished string      `json:"unfinished"`
	Rows       []stats.Row `json:"rows"`
}

// maxSummary bounds a summary, in bytes. That of a mesh of 100 nodes has about 4 MiB.
const maxSummary = 32 << 20

func readSummary(dir *record.Dir) (s summary, err error) {
	data, err := dir.ReadFile(summaryFile, maxSummary)
	if err == nil {
		err = record.Decode(data, &s)
	}
	if wrong := new(json.UnmarshalTypeError); errors.As(err, &wrong) {
		err = fmt.Errorf("%s is not a summary: %w", summaryFile, err)
	}
	return s, err
}

// primary returns the rows of each workload's primary metric.
func primary(rows []stats.Row) []stats.Row {
	if slices.ContainsFunc(rows, func(r stats.Row) bool { return r.Primary }) {
		return slices.DeleteFunc(slices.Clone(rows), func(r stats.Row) bool { return !r.Primary })
	}
	return guessedPrimary(rows)
}

// guessedPrimary is primary for a summary of an older version, which does not mark these rows: it takes the first of the
// candidates below that has the most rows.
func guessedPrimary(rows []stats.Row) []stats.Row {
	count := make(map[[2]string]int) // by workload and metric
	for _, r := range rows {
		count[[2]string{r.Workload, r.Metric}]++
	}
	of := func(workload string) string {
		best := ""
		for _, m := range []string{metrics.Throughput, metrics.LatencyP50, metrics.LatencyMean} {
			if count[[2]string{workload, m}] > count[[2]string{workload, best}] {
				best = m
			}
		}
		return best
	}
	return slices.DeleteFunc(slices.Clone(rows), func(r stats.Row) bool { return r.Metric != of(r.Workload) })
}

// native is the name that experiments give the host network. Pods cannot use it, so its gain only counts if there is no
// other comparison.
const native = "native"

// judge counts verdicts, and finds the largest gain and loss.
func (r *Result) judge(rows []stats.Row) {
	r.Verdicts = make(map[stats.Verdict]int)
	several := slices.ContainsFunc(rows, func(row stats.Row) bool { return row.Versus != nil && row.Variant != native })
	for i := range rows {
		row := &rows[i]
		if row.Versus == nil {
			continue
		}
		v := row.Versus.Verdict
		r.Verdicts[v]++
		if row.Variant == native && several {
			continue
		}
		if v == stats.Faster && (r.Best == nil || row.Gain() > r.Best.Gain()) {
			r.Best = alone(row)
		}
		if v == stats.Slower && (r.Worst == nil || row.Gain() < r.Worst.Gain()) {
			r.Worst = alone(row)
		}
	}
}

// alone returns a copy of a row that does not keep the other rows in memory.
func alone(row *stats.Row) *stats.Row {
	own := *row
	own.Warnings = []record.Warning{}
	return &own
}

// Names of facts.
const (
	FactKernel  = "kernel"
	FactSystem  = "system"
	FactCPU     = "CPU"
	FactNIC     = "NIC"
	FactOverlay = "overlay"
	FactProgram = "slipstream"
	LabelFact   = "label " // followed by the key of a label
)

// facts returns what results depend on: the values of all nodes, each once.
func facts(env record.Environment) []Fact {
	values := make(map[string]map[string]bool)
	add := func(name, value string) {
		if value == "" {
			return
		}
		if values[name] == nil {
			values[name] = make(map[string]bool)
		}
		values[name][value] = true
	}
	for _, n := range env.Nodes {
		add(FactKernel, n.Kernel)
		add(FactSystem, n.Distribution)
		add(FactCPU, n.CPUModel)
		for _, l := range n.Links {
			switch {
			case l.NIC != nil:
				add(FactNIC, strings.TrimSpace(l.NIC.Driver+" "+l.NIC.Firmware))
			case l.Class == "overlay":
				add(FactOverlay, l.Name)
			}
		}
	}
	add(FactProgram, env.Version)
	for key, value := range env.Labels {
		add(LabelFact+key, value)
	}
	names := []string{FactProgram, FactKernel, FactSystem, FactCPU, FactNIC, FactOverlay}
	labels := slices.DeleteFunc(slices.Sorted(maps.Keys(values)), func(name string) bool { return !strings.HasPrefix(name, LabelFact) })
	var all []Fact
	for _, name := range append(names, labels...) {
		if texts := slices.Sorted(maps.Keys(values[name])); len(texts) > 0 {
			all = append(all, Fact{name, strings.Join(texts, ", ")})
		}
	}
	return all
}

// has reports whether all words occur in the result.
func (r Result) has(words []string) bool {
	text := r.Text()
	return !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(text, strings.ToLower(w)) })
}

// Text returns what a search looks at, in lower case.
func (r Result) Text() string {
	parts := []string{r.Name, string(r.State)}
	for _, f := range r.Facts {
		parts = append(parts, f.Name, f.Text)
	}
	for _, v := range slices.Sorted(maps.Keys(r.Verdicts)) { // sorted, so that a page is the same each time
		parts = append(parts, string(v))
	}
	for _, row := range []*stats.Row{r.Best, r.Worst} {
		if row != nil {
			parts = append(parts, row.Variant, row.Workload)
		}
	}
	return strings.ToLower(strings.Join(parts, "\n"))
}
