package result

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"slipstream.dev/internal/bundle"
	"slipstream.dev/internal/record"
)

const demo = "testdata/demo-20260901T083000Z"

func opened(t *testing.T, path string) *Result {
	t.Helper()
	r, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// sealed returns the bytes of the demo's bundle.
func sealed(t *testing.T) []byte {
	t.Helper()
	dir, err := record.Open(demo)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	var b bytes.Buffer
	if err := bundle.Seal(&b, dir, bundle.This("v0.1.0")); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestOpen(t *testing.T) {
	r := opened(t, demo)
	if r.Experiment != "demo" || r.Baseline != "vxlan" || r.Unfinished != "" || r.Environment.Version != "v0.1.0" || r.Environment.Nodes[1].Kernel != "6.18.44" {
		t.Errorf("read %s, %s, %q, %+v", r.Experiment, r.Baseline, r.Unfinished, r.Environment)
	}
	if len(r.Trials) != 37 || len(r.Rows) != 9 {
		t.Fatalf("%d trials and %d rows", len(r.Trials), len(r.Rows))
	}
	failed, warned := 0, 0
	for _, trial := range r.Trials {
		if trial.Error != "" {
			failed++
		}
		warned += len(trial.Warnings)
	}
	if failed != 1 || warned != 1 {
		t.Errorf("%d failed, %d warnings", failed, warned)
	}
	for _, row := range r.Rows {
		if (row.Versus == nil) != (row.Variant == "vxlan") || row.N != 6 || len(row.Blocks) != 6 || row.Primary != (row.Metric != "latency_p99") {
			t.Errorf("row %+v", row)
		}
	}
}

// TestBundle: a bundle gives the same as its folder, and one with a changed trial is refused.
func TestBundle(t *testing.T) {
	data := sealed(t)
	file := filepath.Join(t.TempDir(), "demo.zip")
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(opened(t, demo), opened(t, file), cmpopts.IgnoreUnexported(Trial{}, Environment{})); diff != "" {
		t.Errorf("the bundle differs from the folder (-folder +bundle):\n%s", diff)
	}
	at := bytes.Index(data, []byte(`"throughput":1`))
	data[at+len(`"throughput":`)] = '2'
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	if r, err := Open(file); err == nil {
		t.Errorf("a bundle with another throughput was read: %+v", r.Rows[0])
	}
}

// TestJSON: a trial and the environment marshal to what is in the folder.
func TestJSON(t *testing.T) {
	r := opened(t, demo)
	text, err := os.ReadFile(filepath.Join(demo, "trials.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for i, line := range strings.Split(strings.TrimSpace(string(text)), "\n") {
		sameJSON(t, r.Trials[i], []byte(line))
	}
	if text, err = os.ReadFile(filepath.Join(demo, "environment.json")); err != nil {
		t.Fatal(err)
	}
	sameJSON(t, &r.Environment, text)
}

func sameJSON(t *testing.T, v any, want []byte) {
	t.Helper()
	got, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	var x, y map[string]any
	if err := errors.Join(json.Unmarshal(got, &x), json.Unmarshal(want, &y)); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(y, x); diff != "" {
		t.Errorf("another JSON (-want +got):\n%s", diff)
	}
}

func TestOpenErrors(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "demo-20260901T083000Z")
	if err := os.CopyFS(empty, os.DirFS(demo)); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(empty, "trials.jsonl"), 0); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ path, want string }{
		{"testdata/none", "open result testdata/none: "},
		{"testdata", "environment.json is missing"},
		{filepath.Join(demo, "trials.jsonl"), "not a bundle"},
		{empty, "no trial has ended"},
	} {
		if _, err := Open(c.path); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.path, err, c.want)
		}
	}
	if _, err := Open("testdata/none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}
