package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report"
	"slipstream.dev/internal/testenv/golden"
)

// TestShown: the line of a trial shows the main metric of its workload, if the tool reports it.
func TestShown(t *testing.T) {
	for want, metrics := range map[string]map[string]float64{
		metrics.Throughput:  {metrics.Throughput: 1, metrics.Rate: 1},
		metrics.LatencyP50:  {metrics.Rate: 1, metrics.LatencyMean: 1, metrics.LatencyP50: 1, metrics.LatencyP99: 1},
		metrics.LatencyMean: {metrics.Rate: 1, metrics.LatencyMean: 1},
		metrics.Rate:        {metrics.Rate: 1, metrics.Errors: 1},
	} {
		if got := report.ShownMetric(metrics); got != want {
			t.Errorf("of %v it shows %s, want %s", metrics, got, want)
		}
	}
}

// TestProgressFitsTerminal: a line that is wider than the terminal is cut, as the terminal would wrap it and not erase
// its first part.
func TestProgressFitsTerminal(t *testing.T) {
	var out bytes.Buffer
	width := 12
	p := &textProgress{w: &out, terminal: true, columns: func() int { return width }}
	p.status("1/144  block 1  vxlan")
	width = 80
	p.status("2/144  block 1  vxlan")
	if got, want := out.String(), "\r\x1b[K1/144  bloc…\r\x1b[K2/144  block 1  vxlan"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	out.Reset()
	width = 30
	failed := record.Trial{Variant: "rps", Workload: "stream", Pairs: 4, Block: 4, Status: record.StatusFailed, Error: "nothing arrived for 563ms of the window"}
	p.show(experiment.Event{Kind: experiment.Ends, Done: 8, Total: 9, Trial: failed})
	if got, want := out.String(), "\r\x1b[K8/9 block 4 rps stream at 4\n  pairs failed: nothing\n  arrived for 563ms of the\n  window\n\r\x1b[K2/144  block 1  vxlan"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestProgressJSON: each event is a line with the fields that the documentation names.
func TestProgressJSON(t *testing.T) {
	var out bytes.Buffer
	all := Process{Err: jsonProgress{&out, func() time.Time { return time.Date(2026, 1, 2, 16, 4, 5, 6000, time.FixedZone("", 3600)) }}}
	p := newProgress(all)
	fmt.Fprintln(all.Err, "removed lab x of a killed run") // for people
	trial := record.Trial{Block: 1, Order: 3, Variant: "rps", Workload: "stream", Pairs: 4, Attempt: 1, Status: record.StatusOK}
	ended, failed := trial, trial
	ended.Took, ended.Metrics = 3.5, map[string]float64{metrics.Throughput: 1.25e10}
	ended.PerPair, ended.Series = []record.Pair{{}}, map[string]string{"a": "x"} // which are on record only
	failed.Period, failed.Round, failed.Attempt, failed.Took, failed.Status, failed.Error = 5, 2, 2, 60, record.StatusFailed, "two\nlines"
	p.note("left out here: fastpath: this kernel lacks tcx")
	p.results("results/demo-20260102T150405Z")
	for _, e := range []experiment.Event{
		{Kind: experiment.Note, Text: "after 3 blocks: 8 are needed"},
		{Kind: experiment.Begins, Trial: trial, Done: 0, Total: 96, Left: 90*time.Second + 1},
		{Kind: experiment.Moves, Trial: trial, Done: 0, Total: 96, Left: 89 * time.Second, Bytes: 1 << 40, Messages: 16777216},
		{Kind: experiment.Ends, Trial: ended, Done: 1, Total: 96, Left: 88 * time.Second},
		{Kind: experiment.Ends, Trial: failed, Done: 2, Total: 96},
	} {
		p.show(e)
	}
	p.end()
	golden.Compare(t, "testdata/progress.jsonl", out.String())
}

// TestProgressDocumented: the documentation names each field and event.
func TestProgressDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/how-to/history.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "## Follow a run by a program")
	section, _, _ = strings.Cut(section, "\n## ")
	names := []string{eventNote, eventResults, eventBegins, eventMoves, eventEnds, eventError}
	for _, line := range []reflect.Type{reflect.TypeFor[progressLine](), reflect.TypeFor[trialLine]()} {
		for i := range line.NumField() {
			if name, _, _ := strings.Cut(line.Field(i).Tag.Get("json"), ","); name != "" {
				names = append(names, name)
			}
		}
	}
	if len(names) != 6+4+17 {
		t.Errorf("there are %d names", len(names))
	}
	for _, name := range names {
		if !strings.Contains(section, "`"+name+"`") {
			t.Errorf("the documentation lacks %s", name)
		}
	}
}

// TestProgressOfFailedRun: errors are JSON too, and the exit code stays.
func TestProgressOfFailedRun(t *testing.T) {
	for args, code := range map[string]int{"run nothing": exitUsage, "run": exitUsage, "run --resume /nowhere": exitUsage} {
		got, out, errs := slipstream(t, append(strings.Fields(args), "--progress", "json")...)
		if got != code || out != "" {
			t.Errorf("%s: exit %d, want %d; stdout %q", args, got, code, out)
		}
		for line := range strings.Lines(errs) {
			var l progressLine
			if err := json.Unmarshal([]byte(line), &l); err != nil || l.Event != eventError || l.Text == "" || strings.HasPrefix(l.Text, "slipstream:") {
				t.Errorf("%s: %q: %v, %+v", args, line, err, l)
			}
		}
		if errs == "" {
			t.Errorf("%s: no line", args)
		}
	}
	code, _, errs := slipstream(t, "run", "demo", "--progress", "yaml")
	if code != exitUsage || !strings.Contains(errs, "choose text or json") {
		t.Errorf("exit %d, %s", code, errs)
	}
}
