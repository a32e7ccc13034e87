package test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
)

// TestWatched runs a small version of the experiment that compares a run that somebody watches with one that nobody watches. On
// a machine with other work it proves nothing; here it only has to complete, and to leave neither browser nor server behind.
func TestWatched(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedProgram(t, "chromium", "apt install chromium")
	testenv.NeedProgram(t, "curl", "apt install curl")
	unchanged(t)
	out := t.TempDir()
	t.Chdir("watched")
	t.Setenv("OUT", out)
	t.Setenv("PATH", filepath.Dir(program)+":"+os.Getenv("PATH"))
	code, _, stderr := finish(t, "run", "watched.yaml", "--out", out, "--runs", "2", "--duration", "250ms", "--set", "spec.trialsPerPeriod=1", "--set", "spec.expect=[]", "--set", "metadata.name=quick")
	if code != 0 {
		t.Fatalf("exit %d\n%s", code, stderr)
	}
	good := make(map[string]int)
	for _, tr := range trials(t, results(t, out)) {
		if tr.Status == record.StatusOK {
			good[tr.Variant]++
		}
	}
	if good["watched"] != 4 || good["unwatched"] != 4 {
		t.Errorf("trials: %v, want 4 of each\n%s", good, stderr)
	}
	if entries, err := os.ReadDir(out); err != nil || len(entries) != 1 {
		t.Errorf("it left %v, %v", entries, err)
	}
	found, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil || len(found) == 0 {
		t.Fatal(found, err)
	}
	for _, path := range found {
		if text, _ := os.ReadFile(path); strings.Contains(string(text), out) { // it may have ended since
			t.Errorf("%s still runs: %q", path, text)
		}
	}
}
