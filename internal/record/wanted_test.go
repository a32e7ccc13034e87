package record

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestWanted: a request to a run is gone when the run has ended in whatever way, and a file that somebody else made is read only if
// it can be such a request.
func TestWanted(t *testing.T) {
	d := create(t, t.TempDir())
	reader, err := Open(d.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	is := func(want Wanted) {
		t.Helper()
		if got, err := reader.Wanted(); got != want || err != nil {
			t.Errorf("%q is wanted, %v, want %q", got, err, want)
		}
	}
	want := func(w Wanted) {
		t.Helper()
		if err := reader.Want(w); err != nil {
			t.Fatal(err)
		}
		is(w)
	}
	is(WantedOn)
	want(WantedPause)
	want(WantedStop)
	want(WantedOn)
	want(WantedOn)
	want(WantedStop)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	is(WantedOn)
	want(WantedStop) // too late, or the run was killed
	resumed, err := Resume(d.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer resumed.Close()
	is(WantedOn)

	file := filepath.Join(d.Path, wantedFile)
	for text, problem := range map[string]string{
		"{}": "neither pause nor stop", `{"run":"delete"}`: "neither pause nor stop", "": "unexpected end", strings.Repeat(" ", 2<<10): "more than",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := reader.Wanted(); got != WantedOn || err == nil || !strings.Contains(err.Error(), problem) {
			t.Errorf("%.20q: %q, %v, want %q", text, got, err, problem)
		}
	}
	outside := filepath.Join(t.TempDir(), "mine")
	if err := os.WriteFile(outside, []byte(`{"run":"stop"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, file); err != nil {
		t.Fatal(err)
	}
	if got, err := reader.Wanted(); got != WantedOn || err == nil {
		t.Errorf("through a link: %q, %v", got, err)
	}
	if err := reader.Want(WantedPause); err == nil {
		t.Error("the link was written to")
	}
	if text, err := os.ReadFile(outside); err != nil || string(text) != `{"run":"stop"}` {
		t.Errorf("the link's file is %q, %v", text, err)
	}
}
