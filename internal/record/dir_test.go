package record

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/metrics"
)

var started = time.Date(2026, 3, 1, 12, 30, 5, 0, time.UTC)

func create(t *testing.T, parent string) *Dir {
	t.Helper()
	d, err := Create(parent, "demo", started, []byte("kind: Experiment\n"), Environment{Version: "1.2.3", Started: started})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func trial(order int) Trial {
	return Trial{
		Block: 1, Order: order, Variant: "rps+", Workload: "stream", Pairs: 4, Attempt: 1, Started: started,
		Status: StatusOK, Metrics: map[string]float64{metrics.Throughput: 9.5e9},
	}
}

func appendTrials(t *testing.T, d *Dir, orders ...int) {
	t.Helper()
	for _, order := range orders {
		if err := d.Append(trial(order)); err != nil {
			t.Fatal(err)
		}
	}
}

func wantTrials(t *testing.T, d *Dir, orders ...int) {
	t.Helper()
	got, err := d.Trials()
	if err != nil {
		t.Fatal(err)
	}
	var want []Trial
	for _, order := range orders {
		want = append(want, trial(order))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("trials (-want +got):\n%s", diff)
	}
}

func TestCreateAppendOpen(t *testing.T) {
	d := create(t, filepath.Join(t.TempDir(), "results"))
	if got, want := filepath.Base(d.Path), "demo-20260301T123005Z"; got != want {
		t.Errorf("folder %s, want %s", got, want)
	}
	appendTrials(t, d, 1, 2)
	wantTrials(t, d, 1, 2)

	read, err := Open(d.Path)
	if err != nil {
		t.Fatal(err)
	}
	wantTrials(t, read, 1, 2)
	if text, err := read.Experiment(); err != nil || string(text) != "kind: Experiment\n" {
		t.Errorf("experiment %q, %v", text, err)
	}
	if env, err := read.Environment(); err != nil || env.Version != "1.2.3" || !env.Started.Equal(started) {
		t.Errorf("environment %+v, %v", env, err)
	}
	if err := read.Append(trial(3)); err == nil {
		t.Error("a folder that is open for reading takes a trial")
	}
	if _, err := Create(filepath.Dir(d.Path), "demo", started, nil, Environment{}); !errors.Is(err, os.ErrExist) {
		t.Errorf("a second folder of one name: %v, want that it exists", err)
	}
	wantTrials(t, d, 1, 2)
}

func TestResume(t *testing.T) {
	d := create(t, t.TempDir())
	appendTrials(t, d, 1)
	if _, err := Resume(d.Path); !errors.Is(err, ErrLocked) {
		t.Fatalf("Resume beside a run: %v, want ErrLocked", err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}

	// A crash in the middle of a write.
	torn, err := os.OpenFile(filepath.Join(d.Path, trialsFile), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := torn.WriteString(`{"block":1,"order":2,"variant":"rps+","workload":"stream"`); err != nil {
		t.Fatal(err)
	}
	torn.Close()

	d, err = Resume(d.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	wantTrials(t, d, 1)
	appendTrials(t, d, 2, 3)
	wantTrials(t, d, 1, 2, 3)
}

func TestOpenIncomplete(t *testing.T) {
	for _, name := range []string{environmentFile, trialsFile, experimentFile} {
		d := create(t, t.TempDir())
		if err := os.Remove(filepath.Join(d.Path, name)); err != nil {
			t.Fatal(err)
		}
		for verb, open := range map[string]func(string) (*Dir, error){"Open": Open, "Resume": Resume} {
			if _, err := open(d.Path); err == nil || !strings.Contains(err.Error(), name+" is missing") {
				t.Errorf("%s without %s: %v, want that it is missing", verb, name, err)
			}
		}
	}
	if _, err := Open(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Open of no folder: %v, want that it does not exist", err)
	}
}

func TestTrialsBadLine(t *testing.T) {
	good, err := json.Marshal(trial(1))
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"{", "", "null", "{}", "[]", string(good) + string(good), "\x00\x00"} {
		d := create(t, t.TempDir())
		text := string(good) + "\n" + bad + "\n" + string(good) + "\n"
		if err := os.WriteFile(filepath.Join(d.Path, trialsFile), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Trials(); err == nil || !strings.Contains(err.Error(), trialsFile+":2: this line is damaged (") || !strings.Contains(err.Error(), "remove line 2, and measure it again: slipstream run --resume "+d.Path) {
			t.Errorf("line 2 is %q: %v, want an error that names the line", bad, err)
		}
		d.Close()
		if r, err := Resume(d.Path); err == nil {
			r.Close()
			t.Errorf("line 2 is %q: Resume takes it", bad)
		} else if !strings.Contains(err.Error(), "remove line 2") {
			t.Errorf("line 2 is %q: Resume says %v, want what to do", bad, err)
		}
		if left, err := os.ReadFile(filepath.Join(d.Path, trialsFile)); err != nil || string(left) != text {
			t.Errorf("line 2 is %q: Resume changed the file to %q, %v", bad, left, err)
		}
	}
}

// TestRemoved: a run whose results are removed or replaced fails at its next trial, not only at its end.
func TestRemoved(t *testing.T) {
	for name, spoil := range map[string]func(d *Dir) error{
		"removed": func(d *Dir) error { return os.RemoveAll(d.Path) },
		"replaced": func(d *Dir) error { // as sed -i does
			file := filepath.Join(d.Path, trialsFile)
			return errors.Join(os.WriteFile(file+".new", nil, 0o600), os.Rename(file+".new", file))
		},
	} {
		d := create(t, t.TempDir())
		if err := d.Append(trial(1)); err != nil {
			t.Fatal(err)
		}
		if err := spoil(d); err != nil {
			t.Skip(err) // this system does not let open files be removed
		}
		if err := d.Append(trial(2)); !errors.Is(err, ErrRemoved) {
			t.Errorf("%s: %v, want %v", name, err, ErrRemoved)
		}
	}
}

func TestWriteFile(t *testing.T) {
	d := create(t, t.TempDir())
	write := func(name, text string, fail error) error {
		return d.WriteFile(name, func(w io.Writer) error {
			_, err := io.WriteString(w, text)
			return errors.Join(err, fail)
		})
	}
	if err := write("figures/cpu.svg", "<svg/>", nil); err != nil {
		t.Fatal(err)
	}
	if err := write("report.html", "old", nil); err != nil {
		t.Fatal(err)
	}
	broken := errors.New("template broken")
	if err := write("report.html", "half of the n", broken); !errors.Is(err, broken) {
		t.Errorf("got %v, want the writer's error", err)
	}
	var names []string
	err := filepath.WalkDir(d.Path, func(path string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			names = append(names, strings.TrimPrefix(filepath.ToSlash(path), filepath.ToSlash(d.Path)+"/"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{environmentFile, experimentFile, "figures/cpu.svg", "report.html", trialsFile}, names); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	if got, err := os.ReadFile(filepath.Join(d.Path, "report.html")); err != nil || string(got) != "old" {
		t.Errorf("report.html is %q, %v, want the old one", got, err)
	}
}

func FuzzReadTrials(f *testing.F) {
	good, err := json.Marshal(trial(1))
	if err != nil {
		f.Fatal(err)
	}
	line := string(good) + "\n"
	f.Add([]byte(line + line[:40]))
	f.Add([]byte(line + "\n" + line))
	f.Add([]byte(`{"block":1,"variant":"a","workload":"b","metrics":{"throughput":1e999}}` + "\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		trials, whole, err := readTrials(bytes.NewReader(data))
		if err != nil {
			return
		}
		if want := int64(bytes.LastIndexByte(data, '\n') + 1); whole != want {
			t.Fatalf("%d bytes are whole lines, want %d", whole, want)
		}
		var again bytes.Buffer
		for _, trial := range trials {
			line, err := json.Marshal(trial)
			if err != nil {
				t.Fatal(err)
			}
			again.Write(append(line, '\n'))
		}
		again.WriteString(`{"block":1,`)
		got, _, err := readTrials(&again)
		if err != nil || len(got) != len(trials) {
			t.Fatalf("%d trials came back as %d, %v", len(trials), len(got), err)
		}
	})
}

// TestSchemaVersion: a new folder has the version of its format. A folder with a later
// version is not read; a folder without one, from before there were versions, is.
func TestSchemaVersion(t *testing.T) {
	dir, err := Create(t.TempDir(), "made", time.Unix(0, 0), []byte("{}"), Environment{Version: "v9"})
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	env, err := dir.Environment()
	if err != nil || env.SchemaVersion != SchemaVersion {
		t.Errorf("schemaVersion %d, %v", env.SchemaVersion, err)
	}
	for text, want := range map[string]string{
		`{"slipstream": "v1"}`:                      "",
		`{"slipstream": "v9", "schemaVersion": 99}`: "it has schemaVersion 99 and this program reads up to 1: read it with slipstream v9,",
	} {
		if err := os.WriteFile(filepath.Join(dir.Path, environmentFile), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		switch _, err := Open(dir.Path); {
		case want == "" && err != nil:
			t.Errorf("%s: %v", text, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}

// TestSwitched: the folder records a switch until it is undone, and both its readers and
// those of its parent folder see it.
func TestSwitched(t *testing.T) {
	parent := t.TempDir()
	dir, err := Create(parent, "made", time.Unix(0, 0), []byte("{}"), Environment{})
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	for _, want := range []string{"", "large", "huge", "", ""} {
		if err := dir.Switched(want); err != nil {
			t.Fatal(err)
		}
		got, err := dir.SwitchedVariant()
		if got != want || err != nil {
			t.Errorf("noted %q, read %q, %v", want, got, err)
		}
		if left, err := LeftSwitched(parent); err != nil || (len(left) == 1 && left[0] == dir.Path) != (want != "") {
			t.Errorf("noted %q, found in %v, %v", want, left, err)
		}
	}
	for _, text := range []string{"", "{}", "[]", `{"variant": ""}`} {
		if err := os.WriteFile(filepath.Join(dir.Path, switchedFile), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if got, err := dir.SwitchedVariant(); err == nil {
			t.Errorf("%s was read as %q", text, got)
		}
	}
}
