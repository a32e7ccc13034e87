package cli

import (
	"encoding/csv"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"slipstream.dev/internal/history"
)

// published are the bit rates of the published logs.
const published = "../stats/testdata/published"

// importPublished imports the published logs and returns the results folder and the output.
func importPublished(t *testing.T, flags ...string) (dir, stdout, stderr string) {
	t.Helper()
	out := t.TempDir()
	args := append([]string{"import", "--pattern", "{variant}-{pairs}.txt", "--baseline", "baseline", "--duration", "30s", "--out", out, "--name", "rps-rfs"}, flags...)
	stdout, stderr = succeed(t, append(args, published)...)
	found, err := os.ReadDir(out)
	if err != nil || len(found) != 1 || !strings.HasPrefix(found[0].Name(), "rps-rfs-") {
		t.Fatalf("%v in the folder of results: %v", found, err)
	}
	return filepath.Join(out, found[0].Name()), stdout, stderr
}

// TestImportPublished: the logs of the published experiment give the means, intervals and ratios
// of docs/results/published.md, and a report that says what the logs do not contain.
func TestImportPublished(t *testing.T) {
	dir, stdout, stderr := importPublished(t)
	has(t, "standard error", stderr, "finalized_bitrate.csv: its name does not match the pattern", "imported 400 trials from 20 files to "+dir)
	has(t, "the terminal", strings.Join(strings.Fields(stdout), " "),
		"! not-interleaved (serious): each variant was measured by itself, and throughput of this one moved by +18%", "rfs-plus gains the most")

	page, err := os.ReadFile("../../docs/results/published.md")
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(filepath.Join(dir, "summary.csv"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rows, err := csv.NewReader(f).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	column := map[string]int{}
	for i, name := range rows[0] {
		column[name] = i
	}
	headings := map[string]string{"baseline": "Baseline", "rps": "RPS", "rfs": "RFS", "rps-plus": "RPS+", "rfs-plus": "RFS+"}
	compared := 0
	for _, row := range rows[1:] {
		number := func(name string) (x float64) {
			_, _ = fmt.Sscan(row[column[name]], &x)
			return x
		}
		mean := number("mean") / 1e6
		begins := fmt.Sprintf("| %s | %s | %.0f ± %.0f | ", row[column["pairs"]], headings[row[column["variant"]]], mean, number("ci95_hi")/1e6-mean)
		ends := ""
		if row[column["versus"]] != "" {
			compared++
			ends = fmt.Sprintf(" | %.3f (%.3f–%.3f) |", number("ratio"), number("ratio_ci95_lo"), number("ratio_ci95_hi"))
		}
		_, rest, ok := strings.Cut(string(page), begins)
		line, _, _ := strings.Cut(rest, "\n")
		if !ok || !strings.HasSuffix(line, ends) {
			t.Errorf("docs/results/published.md has no line %s…%s", begins, ends)
		}
	}
	if len(rows) != 21 || compared != 16 {
		t.Errorf("%d rows, of which %d are compared", len(rows)-1, compared)
	}

	html, err := os.ReadFile(filepath.Join(dir, "report.html"))
	if err != nil {
		t.Fatal(err)
	}
	has(t, "the report", string(html), "Not measured by slipstream: imported from 20 files of run log. Where and on what it ran is not known.",
		"slipstream import --pattern", "A difference may come from the time at which a variant was measured")
}

// TestImportedResult: an imported result is like any other, but cannot be run.
func TestImportedResult(t *testing.T) {
	dir, _, _ := importPublished(t)
	again, _, _ := importPublished(t)
	code, stdout, stderr := slipstream(t, "compare", dir, again, "--gate=strict")
	if code != 0 {
		t.Errorf("compare: exit %d\n%s%s", code, stdout, stderr)
	}
	if code, stdout, stderr = slipstream(t, "report", dir, again); code != 0 {
		t.Errorf("report of two: exit %d\n%s%s", code, stdout, stderr)
	}
	if code, stdout, stderr = slipstream(t, "report", dir, "--format", "md"); code != 0 {
		t.Errorf("report: exit %d\n%s", code, stderr)
	}
	has(t, "the report", stdout, "unknown path", "Not measured by slipstream")
	for _, lacks := range []string{"VXLAN", "IPv4", "Virtual machine", "128KiB"} {
		if strings.Contains(stdout, lacks) {
			t.Errorf("the report speaks of %s, which nobody knows", lacks)
		}
	}
	for _, args := range [][]string{{"run", "--resume", dir}, {"run", filepath.Join(dir, "experiment.yaml")}} {
		code, _, stderr = slipstream(t, args...)
		if code != 2 {
			t.Errorf("%v: exit %d", args, code)
		}
		has(t, strings.Join(args, " "), stderr, "was imported: other programs have measured it")
	}
	if code, _, _ = slipstream(t, "policy", dir, "rfs-plus"); code == 0 {
		t.Error("a policy of a variant of which nobody knows what it is")
	}
}

// TestImportMissing: a variant with fewer runs is compared by the runs that it has, and the report
// says so.
func TestImportMissing(t *testing.T) {
	dir := t.TempDir()
	for name, runs := range map[string]int{"base": 6, "tuned": 5} {
		var log strings.Builder
		for i := range runs {
			fmt.Fprintf(&log, "Running experiment %d...\nExperiment %d completed.\n%d\n", i+1, i+1, 700+i)
		}
		if err := os.WriteFile(filepath.Join(dir, name+".txt"), []byte(log.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	out := t.TempDir()
	stdout, _ := succeed(t, "import", "--pattern", "{variant}.txt", "--baseline", "base", "--duration", "30s", "--out", out, dir)
	has(t, "the terminal", strings.Join(strings.Fields(stdout), " "), "! Some results are missing: 11 of 12 trials are present, 5 of 6 blocks are complete.")
	found, err := filepath.Glob(filepath.Join(out, "*"))
	if err != nil || len(found) != 1 {
		t.Fatal(found, err)
	}
	if _, stdout, _ = slipstream(t, "report", found[0]); strings.Contains(stdout, "--resume") {
		t.Errorf("there is nothing to resume:\n%s", stdout)
	}
}

// TestImportsInOneSecond: imports within a second each get a folder of their own, with the name of a result.
func TestImportsInOneSecond(t *testing.T) {
	out := t.TempDir()
	const imports = 4 // they take less than a second each
	for range imports {
		succeed(t, "import", "--pattern", "{variant}-{pairs}.txt", "--baseline", "baseline", "--duration", "30s", "--out", out, published)
	}
	if found, err := history.Names(out); err != nil || len(found) != imports {
		t.Errorf("%d results of %d imports: %v, %v", len(found), imports, found, err)
	}
}

// TestImportNothing: if a file cannot be read, nothing is written, and the error names each such
// file.
func TestImportNothing(t *testing.T) {
	dir, out := t.TempDir(), filepath.Join(t.TempDir(), "results")
	for name, text := range map[string]string{"base-1.txt": "Running experiment 1...\n700\n", "base-2.txt": "torn", "tuned-1.txt": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	code, stdout, stderr := slipstream(t, "import", "--pattern", "{variant}-{run}.txt", "--baseline", "base", "--duration", "30s", "--out", out, dir)
	if code != 2 || stdout != "" {
		t.Errorf("exit %d, standard output %q", code, stdout)
	}
	has(t, "the error", stderr, "base-2.txt: it is not the output of a known tool", "tuned-1.txt: it is empty")
	if _, err := os.Stat(out); err == nil {
		t.Error("there is a folder of results")
	}
}
