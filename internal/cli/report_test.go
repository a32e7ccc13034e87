package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"slipstream.dev/internal/report"
	"slipstream.dev/internal/spec"
)

// TestSeriesHowTo: the experiment of docs/how-to/series.md is valid, and its series are as the page says.
func TestSeriesHowTo(t *testing.T) {
	page, err := os.ReadFile("../../docs/how-to/series.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(page), "    # rate.yaml\n")
	text, _, found := strings.Cut(text, "\n\n")
	if !found {
		t.Fatal("the page has no rate.yaml")
	}
	exp, err := spec.Parse("rate.yaml", []byte(strings.ReplaceAll("\n"+text, "\n    ", "\n")), nil)
	if err != nil {
		t.Fatal(err)
	}
	if s := exp.Spec.Series; len(s) != 2 || s[1].Axis != spec.AxisRate || s[1].Versus != s[0].Name {
		t.Errorf("series %+v", s)
	}
}

// TestReportBeforeSeries: two old folders render in every format: one that was recorded before trials had time
// series (testdata/before-series, written by the program of that time), and one from before folders had a
// schemaVersion.
func TestReportBeforeSeries(t *testing.T) {
	const version = `"schemaVersion": 1,`
	copied := func(old bool) string {
		folder := t.TempDir()
		for _, name := range []string{"experiment.yaml", "environment.json", "trials.jsonl"} {
			data, err := os.ReadFile(filepath.Join("testdata/before-series", name))
			if err != nil {
				t.Fatal(err)
			}
			text := string(data)
			switch {
			case name == "trials.jsonl" && strings.Contains(text, `"series"`), name == "environment.json" && !strings.Contains(text, version):
				t.Fatalf("%s is not of that time", name)
			case old:
				text = strings.Replace(text, version, "", 1)
			}
			if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return folder
	}
	formats := []string{"svg", "png", "pdf"}
	if testing.Short() {
		formats = formats[:1] // pixels take minutes with the race detector
	}
	folders := map[string]string{"schemaVersion 1": copied(false), "no schemaVersion": copied(true)}
	for name, folder := range folders {
		for _, f := range report.Formats() {
			format := f.Name
			code, out, errs := slipstream(t, "report", folder, "--format", format)
			if code != exitGood || errs != "" || !strings.Contains(out, "native") {
				t.Errorf("%s as %s: exit code %d, %q, output %.200q", name, format, code, errs, out)
			}
		}
		for _, format := range formats {
			if code, _, errs := slipstream(t, "report", folder, "--figures", format); code != exitGood {
				t.Errorf("%s, figures as %s: exit code %d, %q", name, format, code, errs)
			}
		}
		code, out, errs := slipstream(t, "report", folder)
		if code != exitGood || !strings.Contains(out, "3.71") { // Gb/s of native
			t.Errorf("%s: exit code %d, %q, output %q", name, code, errs, out)
		}
		figures, err := filepath.Glob(filepath.Join(folder, "figures", "*"))
		if err != nil || len(figures) == 0 || strings.Contains(strings.Join(figures, " "), "course") {
			t.Errorf("%s: figures %q, %v, want some, and none of a course over time", name, figures, err)
		}
	}
	a, b := folders["schemaVersion 1"], folders["no schemaVersion"]
	for _, args := range [][]string{{"report", a, b}, {"compare", a, b}, {"compare", a, b, "--format", "html"}} {
		if code, out, errs := slipstream(t, args...); code != exitGood || out == "" {
			t.Errorf("%s: exit code %d, %q", args[0], code, errs)
		}
	}
}

// TestAgain: whatever command a folder contains, the suggested command is one of this program.
func TestAgain(t *testing.T) {
	for command, want := range map[string]string{
		"slipstream run demo --runs 4 --set a=b":         "bin/slipstream run demo --set a=b --runs 20",
		"slipstream run demo --runs '{auto: {max: 12}}'": "bin/slipstream run demo --runs 20",
		"slipstream run demo --runs 'x ;id|sh #'":        "bin/slipstream run demo --runs 20",
		"slipstream run demo '--runs=x ;id|sh #' -v":     "bin/slipstream run demo -v --runs 20",
		"slipstream run -":                               "",
		"/opt/slipstream run 'my file.yaml'":             "bin/slipstream run 'my file.yaml' --runs 20",
		"rm -rf / run":                                   "",
		"rm run":                                         "bin/slipstream run --runs 20",
		"slipstream run x; id $(id) `id` | sh > /a\n":    "bin/slipstream run 'x;' id '$(id)' '`id`' '|' sh '>' '/a\n' --runs 20",
		"slipstream run 'x":                              "",
		"slipstream import x":                            "",
		"":                                               "",
	} {
		if got := rerunCommand("bin/slipstream", command, 20); got != want {
			t.Errorf("%q: got %q, want %q", command, got, want)
		}
	}
}
