package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestFindResult: a result is found by its folder, one of its files, its name and its age, and a wrong name gets the
// nearest right one.
func TestFindResult(t *testing.T) {
	t.Chdir(t.TempDir())
	older, newer := "results/zones-20260102T150405Z", "results/demo-20260109T150405Z"
	for _, dir := range []string{older, newer, "results/notes", "bench/demo-20260101T000000Z", "mine"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "report.html"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for in, want := range map[string]string{
		older: older, newer + "/": newer + "/", "mine": "mine",
		older + "/report.html":  older,
		"latest":                newer,
		"results/latest":        newer,
		"bench/latest":          "bench/demo-20260101T000000Z",
		"demo-20260109T150405Z": newer,
	} {
		if got, err := findResult(in); err != nil || got != want {
			t.Errorf("%s: got %q, %v, want %q", in, got, err, want)
		}
	}
	for in, want := range map[string]string{
		"results/demo-20260109T150450Z": "there is no results folder results/demo-20260109T150450Z; did you mean demo-20260109T150405Z?",
		"deno-20260109T150405Z":         "there is no results folder deno-20260109T150405Z; did you mean demo-20260109T150405Z?",
		"xyz":                           "there is no results folder xyz",
		"none/latest":                   "none/latest: there is no result in none yet",
		"reslts/latest":                 "reslts/latest: there is no result in reslts yet; did you mean results?",
		"reslts/demo":                   "there is no results folder reslts/demo; did you mean results?",
		"mine/latest":                   "mine/latest: there is no result in mine yet",
		"latset":                        "there is no results folder latset; did you mean latest?",
	} {
		if got, err := findResult(in); err == nil || err.Error() != want {
			t.Errorf("%s: got %q, %v, want %s", in, got, err, want)
		}
	}
}

// TestOpenFolderOfResults: a folder that only holds results is named as such.
func TestOpenFolderOfResults(t *testing.T) {
	parent := filepath.Dir(result(t, resultYAML, 1, 1))
	want := parent + " has 1 result: name one of them, such as " + filepath.Join(parent, "latest")
	if _, err := openResult(parent); err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

// TestNoteFuture: a run says which result counts as newer because the clock was set back, and says nothing otherwise.
func TestNoteFuture(t *testing.T) {
	parent := t.TempDir()
	for _, name := range []string{"zones-20360102T150405Z", "demo-20260109T150405Z", "other-20260109T150405Z"} {
		if err := os.Mkdir(filepath.Join(parent, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	noted := func(name string) (text string) {
		noteFuture(filepath.Join(parent, name), func(said string) { text += said })
		return text
	}
	if got := noted("demo-20260109T150405Z"); !strings.HasPrefix(got, "the name of zones-20360102T150405Z has a time in the future: ") {
		t.Errorf("a run after the clock was set back notes %q", got)
	}
	if err := os.Remove(filepath.Join(parent, "zones-20360102T150405Z")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"demo-20260109T150405Z", "other-20260109T150405Z"} { // of the same second
		if got := noted(name); got != "" {
			t.Errorf("%s notes %q", name, got)
		}
	}
}

// TestLatest: commands that read a result take the newest one, and a file of it.
func TestLatest(t *testing.T) {
	dir := result(t, resultYAML, 6, 1)
	name := filepath.Join(filepath.Dir(dir), "made-29990102T150405Z")
	if err := os.Rename(dir, name); err != nil {
		t.Fatal(err)
	}
	latest := filepath.Join(filepath.Dir(dir), "latest")
	for _, args := range [][]string{
		{"report", latest}, {"report", filepath.Join(name, "report.html")}, {"compare", latest, name},
		{"policy", latest, "fastpath", "--host", "--anyway"}, {"cleanup", latest},
	} {
		if code, out, stderr := slipstream(t, args...); code != exitGood {
			t.Errorf("%v: exit %d\n%s%s", args, code, out, stderr)
		}
	}
}
