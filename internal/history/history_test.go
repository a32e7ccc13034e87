//go:build unix

package history

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/stats"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// made says what a result in a test has.
type made struct {
	at         time.Time
	experiment string
	kernel     string
	throughput float64
	verdict    stats.Verdict
	unfinished string
	noSummary  bool
	labels     map[string]string
	file       string // of the experiment
}

// add makes a results folder, and returns it open for appending if keep is set.
func add(tb testing.TB, parent string, m made) *record.Dir {
	tb.Helper()
	if m.file == "" {
		m.file = "kind: Experiment\n"
	}
	dir, err := record.Create(parent, m.experiment, m.at, []byte(m.file), record.Environment{
		Version: "v1", Started: m.at, Labels: m.labels, Nodes: []record.Node{
			{Name: "a", Kernel: m.kernel, CPUModel: "EPYC", Links: []record.Link{{Name: "flannel.1", Class: "overlay"}, {Name: "eth0", NIC: &record.NIC{Driver: "mlx5_core"}}}},
			{Name: "b", Kernel: m.kernel, CPUModel: "EPYC"},
		},
	})
	if err != nil {
		tb.Fatal(err)
	}
	if !m.noSummary {
		if err := dir.WriteFile("summary.json", func(w io.Writer) error { return json.NewEncoder(w).Encode(m.summary()) }); err != nil {
			tb.Fatal(err)
		}
	}
	return dir
}

// summary has eight variants, two workloads, three numbers of pairs and five metrics, like that of the demo.
func (m made) summary() stats.Summary {
	s := stats.Summary{Experiment: m.experiment, Baseline: "v0", Unfinished: m.unfinished}
	for v := range 8 {
		for _, w := range []string{"stream", "pingpong"} {
			all := []string{metrics.Throughput, metrics.CPUPerGB, metrics.SoftirqPerGB}
			if w == "pingpong" {
				all = []string{metrics.Rate, metrics.LatencyP50, metrics.LatencyP99}
			}
			for p := 1; p <= 3; p++ {
				for _, metric := range all {
					x := m.throughput * float64(v+1)
					row := stats.Row{Variant: fmt.Sprintf("v%d", v), Workload: w, Pairs: p, Metric: metric, N: 6, Mean: x, CI95: [2]float64{0.99 * x, 1.01 * x}, Warnings: []record.Warning{}}
					if v > 0 {
						row.Versus = &stats.Versus{Baseline: "v0", N: 6, Ratio: 1 + float64(v)/10, CI95: [2]float64{1, 2}, Verdict: m.verdict}
					}
					s.Rows = append(s.Rows, row)
				}
			}
		}
	}
	return s
}

func closeAll(tb testing.TB, all ...*record.Dir) {
	for _, d := range all {
		if err := d.Close(); err != nil {
			tb.Fatal(err)
		}
	}
}

func open(tb testing.TB, path string) *Folder {
	f, err := Open(path)
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

func TestList(t *testing.T) {
	parent := t.TempDir()
	day := func(n int) time.Time { return start.AddDate(0, 0, n) }
	running := add(t, parent, made{at: day(4), experiment: "demo", kernel: "6.12", noSummary: true})
	defer running.Close()
	closeAll(t,
		add(t, parent, made{at: day(0), experiment: "zones", kernel: "6.1", throughput: 1, verdict: stats.Slower}),
		add(t, parent, made{at: day(1), experiment: "demo", kernel: "6.1", throughput: 1, verdict: stats.Same, unfinished: "3 of 9 trials are done"}),
		add(t, parent, made{at: day(2), experiment: "demo", kernel: "6.12", throughput: 1, verdict: stats.Faster}),
		add(t, parent, made{at: day(3), experiment: "demo", kernel: "6.12", noSummary: true}))
	f := open(t, parent)
	page, total, err := f.List(Filter{}, 0, 10)
	if err != nil || total != 5 {
		t.Fatalf("%d results, %v", total, err)
	}
	var got []string
	for _, r := range page {
		got = append(got, fmt.Sprint(r.Started.Day(), " ", r.Experiment, " ", r.State, " ", r.Problem))
	}
	want := []string{"6 demo running ", "5 demo unfinished it has no report yet", "4 demo complete ", "3 demo unfinished 3 of 9 trials are done", "2 zones complete "}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	faster, slower := page[2], page[4]
	if faster.Verdicts[stats.Faster] != 42 || faster.Best == nil || faster.Best.Variant != "v7" || faster.Worst != nil || slower.Worst == nil {
		t.Errorf("%+v and %+v", faster, slower)
	}
	if diff := cmp.Diff([]Fact{{"slipstream", "v1"}, {"kernel", "6.12"}, {"CPU", "EPYC"}, {"NIC", "mlx5_core"}, {"overlay", "flannel.1"}}, faster.Facts); diff != "" {
		t.Error(diff)
	}
	for _, c := range []struct {
		by          Filter
		skip, limit int
		days        []int
		total       int
	}{
		{Filter{}, 1, 2, []int{5, 4}, 5},
		{Filter{}, 4, 9, []int{2}, 5},
		{Filter{}, 9, 9, nil, 5},
		{Filter{Experiment: "zones"}, 0, 9, []int{2}, 1},
		{Filter{Since: day(3)}, 0, 9, []int{6, 5}, 2},
		{Filter{Words: []string{"6.1"}}, 0, 9, []int{6, 5, 4, 3, 2}, 5},
		{Filter{Words: []string{"FASTER", "flannel"}}, 0, 9, []int{4}, 1},
		{Filter{Words: []string{"unfinished"}}, 1, 9, []int{3}, 2},
		{Filter{Words: []string{"nothing"}}, 0, 9, nil, 0},
	} {
		page, total, err := f.List(c.by, c.skip, c.limit)
		var days []int
		for _, r := range page {
			days = append(days, r.Started.Day())
		}
		if err != nil || total != c.total || !slices.Equal(days, c.days) {
			t.Errorf("%+v: days %v of %d, %v, want %v of %d", c.by, days, total, err, c.days, c.total)
		}
	}
}

// TestReadAgain: a folder that was read is read again once its report has changed.
func TestReadAgain(t *testing.T) {
	parent := t.TempDir()
	m := made{at: start, experiment: "demo", kernel: "6.1", throughput: 1, verdict: stats.Faster}
	dir := add(t, parent, m)
	defer dir.Close()
	f := open(t, parent)
	name := filepath.Base(dir.Path)
	if r := f.Read(name); r.Verdicts[stats.Faster] == 0 {
		t.Fatalf("%+v", r)
	}
	m.verdict = stats.Slower
	if err := dir.WriteFile("summary.json", func(w io.Writer) error { return json.NewEncoder(w).Encode(m.summary()) }); err != nil {
		t.Fatal(err)
	}
	if r := f.Read(name); r.Verdicts[stats.Slower] == 0 {
		t.Errorf("still %+v", r)
	}
}

// TestHostileFolder: whatever a folder contains, it is listed, and nothing outside it is read.
func TestHostileFolder(t *testing.T) {
	outside, parent := t.TempDir(), t.TempDir()
	closeAll(t, add(t, outside, made{at: start, experiment: "secret", throughput: 1, verdict: stats.Faster}))
	secret := filepath.Join(outside, "secret-20260102T030405Z")
	name := func(s string) string { return filepath.Join(parent, s+"-20260102T030405Z") }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Symlink(secret, name("link")))
	must(os.Mkdir(name("empty"), 0o755))
	must(os.Mkdir(name("half"), 0o755))
	must(os.WriteFile(filepath.Join(name("half"), "environment.json"), []byte(`{`), 0o600))
	for _, file := range []string{"summary.json", "environment.json", "experiment.yaml", "trials.jsonl"} {
		to := "linked-" + file
		closeAll(t, add(t, parent, made{at: start, experiment: to, throughput: 1}))
		must(os.Remove(filepath.Join(name(to), file)))
		must(os.Symlink(filepath.Join(secret, file), filepath.Join(name(to), file)))
	}
	closeAll(t, add(t, parent, made{at: start, experiment: "pipe", throughput: 1}))
	must(os.Remove(filepath.Join(name("pipe"), "summary.json")))
	must(syscall.Mkfifo(filepath.Join(name("pipe"), "summary.json"), 0o600))
	closeAll(t, add(t, parent, made{at: start, experiment: "list", throughput: 1}))
	must(os.WriteFile(filepath.Join(name("list"), "summary.json"), []byte(`[]`), 0o600))
	closeAll(t, add(t, parent, made{at: start, experiment: "objects", throughput: 1}))
	must(os.WriteFile(filepath.Join(name("objects"), "summary.json"), []byte(`{"rows":[`+strings.Repeat("{},", 2<<20)+`{}]}`), 0o600))
	closeAll(t, add(t, parent, made{at: start, experiment: "huge", throughput: 1}))
	must(os.Truncate(filepath.Join(name("huge"), "trials.jsonl"), 2<<30)) // a hole: it takes no space
	closeAll(t, add(t, parent, made{at: start, experiment: "huge-summary", throughput: 1}))
	must(os.Truncate(filepath.Join(name("huge-summary"), "summary.json"), 2<<30))
	script := "<script>alert(1)<"
	closeAll(t, add(t, parent, made{at: start, experiment: strings.ReplaceAll(script, "/", ""), throughput: 1, verdict: stats.Same}))

	f := open(t, parent)
	page, total, err := f.List(Filter{Words: []string{"20260102"}}, 0, 100)
	if err != nil || total != 12 {
		t.Errorf("%d results, %v, want 12", total, err)
	}
	for _, r := range page {
		want := Broken
		if r.Experiment == "huge" || r.Experiment == script {
			want = Complete
		}
		if r.State != want || strings.Contains(fmt.Sprint(r), "EPYC") && r.State == Complete && r.Verdicts[stats.Faster] > 0 {
			t.Errorf("%s is %s (%s), want %s", r.Name, r.State, r.Problem, want)
		}
	}
	for _, name := range []string{"..", "../" + filepath.Base(outside) + "/" + filepath.Base(secret), secret, ".", "", "link-20260102T030405Z", "../x-20260102T030405Z", "a/b-20260102T030405Z", "half"} {
		if dir, err := f.Open(name); err == nil {
			t.Errorf("%q was opened: %s", name, dir.Path)
		}
	}
}

func TestTrend(t *testing.T) {
	parent := t.TempDir()
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range 20 {
		m := made{at: start.AddDate(0, 0, i), experiment: "demo", kernel: "6.1", throughput: 1e9 * (1 + 0.01*rng.NormFloat64()), verdict: stats.Faster}
		if i >= 12 {
			m.kernel = "6.12"
			m.throughput *= 0.8
		}
		closeAll(t, add(t, parent, m))
	}
	closeAll(t,
		add(t, parent, made{at: start.AddDate(1, 0, 0), experiment: "other", throughput: 1}),
		add(t, parent, made{at: start.AddDate(0, 0, 30), experiment: "demo", noSummary: true}))
	f := open(t, parent)
	trend, err := f.Trend(Selection{Experiment: "demo", Metric: metrics.Throughput, Variant: "v3", Pairs: 2, Last: 100})
	if err != nil {
		t.Fatal(err)
	}
	if len(trend.Runs) != 20 || len(trend.Series) != 1 || len(trend.LeftOut) != 1 {
		t.Fatalf("%+v", trend)
	}
	s := trend.Series[0]
	if len(s.Points) != 20 || len(s.Shifts) != 1 || s.Shifts[0].At != 12 || s.Shifts[0].Ratio > 0.85 || s.Unit != "bit/s" {
		t.Errorf("%+v", s)
	}
	if diff := cmp.Diff([]Mark{{12, "kernel", "6.1", "6.12"}}, trend.Marks); diff != "" {
		t.Error(diff)
	}
	all, err := f.Trend(Selection{Experiment: "demo", Ratio: true, Last: 5})
	if err != nil || len(all.Runs) != 4 || len(all.Series) != 42 || all.Series[0].Unit != "1" || all.Series[0].Points[0].Mean != 1.1 {
		t.Errorf("%+v, %v", all, err)
	}
	if newest, err := f.Trend(Selection{Last: 5}); err != nil || newest.Experiment != "other" {
		t.Errorf("%+v, %v, want the experiment of the newest result", newest, err)
	}
	if _, err := f.Trend(Selection{Experiment: "demo", Metric: "loss", Last: 5}); err == nil {
		t.Error("a metric that no result has is no error")
	}
}

// TestTrendMarksTraffic: a run whose traffic differs from that of the run before is marked with what differs, and an unfinished
// one is left out.
func TestTrendMarksTraffic(t *testing.T) {
	parent := t.TempDir()
	file := func(size string) string {
		return `
apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: demo}
spec:
  target: {lab: {nodes: 2}}
  baseline: v0
  variants: [{name: v0}, {name: v1}]
  workloads: [{name: stream, stream: {size: ` + size + `, duration: 1s}}]
`
	}
	for i, m := range []made{{file: file("64")}, {file: strings.Replace(file("64"), "1s", "2s", 1)}, {file: file("1M")}, {file: file("64"), unfinished: "1 of 2 trials are done"}} {
		m.experiment, m.at, m.throughput = "demo", start.AddDate(0, 0, i), 1e9
		closeAll(t, add(t, parent, m))
	}
	trend, err := open(t, parent).Trend(Selection{Metric: metrics.Throughput, Workload: "stream", Last: 10})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Mark{{2, "stream: size", "64", "1M"}}, trend.Marks); diff != "" {
		t.Error(diff)
	}
	if len(trend.Runs) != 3 || len(trend.LeftOut) != 1 || !strings.Contains(trend.LeftOut[0], "it is unfinished: 1 of 2 trials are done") {
		t.Errorf("runs %v, left out %v", trend.Runs, trend.LeftOut)
	}
}

// TestLabelled: a label is found by its whole value, in the newest complete result of the experiment.
func TestLabelled(t *testing.T) {
	parent := t.TempDir()
	for day, m := range []made{
		{experiment: "demo", labels: map[string]string{"branch": "main", "commit": "a"}},
		{experiment: "demo", labels: map[string]string{"branch": "main", "commit": "b"}},
		{experiment: "demo", labels: map[string]string{"branch": "mainline", "commit": "c"}},
		{experiment: "demo", labels: map[string]string{"branch": "main"}, unfinished: "1 of 2 trials are done"},
		{experiment: "other", labels: map[string]string{"branch": "main"}},
	} {
		m.at, m.throughput = start.AddDate(0, 0, day), 1
		closeAll(t, add(t, parent, m))
	}
	f := open(t, parent)
	for _, c := range []struct{ value, other, want string }{
		{"main", "", "demo-20260103T030405Z"},
		{"main", "demo-20260103T030405Z", "demo-20260102T030405Z"},
		{"c", "", "demo-20260104T030405Z"},
		{"mai", "", ""}, {"v1", "", ""}, // v1 is the version, and no label
	} {
		if got, err := f.Labelled("demo", c.value, c.other); got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%q: %q, %v, want %q", c.value, got, err, c.want)
		}
	}
	trend, err := f.Trend(Selection{Experiment: "demo", Last: 10})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Mark{{1, "label commit", "a", "b"}, {2, "label branch", "main", "mainline"}, {2, "label commit", "b", "c"}}, trend.Marks[:3]); diff != "" {
		t.Error(diff)
	}
}

// FuzzCutName: the names of results folders are those that a regular expression would find.
func FuzzCutName(f *testing.F) {
	for _, name := range []string{"demo-20260102T030405Z", "-20260102T030405Z", "a-b-20260102T030405Z", "demo-20260102t030405Z", "demo-20260102T03040５Z", "demo 20260102T030405Z", "20260102T030405Z", "demo-2026010:T030405Z", ""} {
		f.Add(name)
	}
	pattern := regexp.MustCompile(`(?s)^(.+)-(\d{8}T\d{6}Z)$`)
	f.Fuzz(func(t *testing.T, name string) {
		var want [2]string
		m := pattern.FindStringSubmatch(name)
		if m != nil {
			want = [2]string{m[1], m[2]}
		}
		experiment, timestamp, ok := cutName(name)
		if got := [2]string{experiment, timestamp}; got != want || ok != (m != nil) {
			t.Errorf("%q: %q, %v, want %q", name, got, ok, want)
		}
	})
}
