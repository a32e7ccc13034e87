package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"slipstream.dev/internal/history"
)

// madeOn makes a folder with results of the given days of January, with reports.
func madeOn(t testing.TB, days ...int) string {
	t.Helper()
	parent := t.TempDir()
	for _, day := range days {
		started := time.Date(2026, 1, day, 15, 4, 5, 0, time.UTC)
		dir := result(t, resultYAML, 6, uint64(day))
		succeed(t, "report", dir)
		if err := os.Rename(dir, filepath.Join(parent, "made-"+started.Format("20060102T150405Z"))); err != nil {
			t.Fatal(err)
		}
	}
	return parent
}

func TestHistory(t *testing.T) {
	parent := madeOn(t, 3, 4)
	_, text, _ := slipstream(t, "history", parent)
	lines := strings.Split(text, "\n")
	has(t, "the list", lines[0], "STARTED", "VERDICTS")
	has(t, "the list", lines[1], "2026-01-04 15:04:05  made", "complete", "fastpath: stream throughput +", "6.12.1", "▼")
	has(t, "the list", lines[2], "2026-01-03")
	code, _, errs := slipstream(t, "history", filepath.Join(parent, "made-20260103T150405Z"))
	if code != exitUsage {
		t.Errorf("one result: exit %d", code)
	}
	has(t, "the error", errs, "is one result: name the folder that it is in")
	for args, want := range map[string]string{
		"--match 6.12 --match same":  "2026-01-04",
		"--since 2026-01-04 -o json": `"total": 1,`,
		"--limit 1":                  "The newest 1 of 2 results",
		"--experiment other":         "no results\n",
		"--since 1h -o json":         `"results": []`,
	} {
		code, text, _ := slipstream(t, append([]string{"history", parent}, strings.Fields(args)...)...)
		if code != exitGood {
			t.Errorf("%s: exit %d", args, code)
		}
		has(t, args, text, want)
	}
}

func TestTrend(t *testing.T) {
	parent := madeOn(t, 3, 4, 5)
	text, _ := succeed(t, "trend", "throughput", parent, "--variant", "fastpath")
	has(t, "the trend", text, "made: throughput of fastpath, stream, 1 pair, Gb/s\n  2026-01-03 15:04  1.", "  n 6\n  2026-01-04")
	if strings.Contains(text, "rfs") || strings.Contains(text, "level") {
		t.Errorf("the trend has more than was asked for:\n%s", text)
	}
	_, text, _ = slipstream(t, "trend", "primary", parent, "--ratio", "-o", "json")
	var trend history.Trend
	if err := json.Unmarshal([]byte(text), &trend); err != nil || len(trend.Runs) != 3 || len(trend.Series) != 8 || !trend.Ratio {
		t.Errorf("%v, %.300s", err, text)
	}
	for args, want := range map[string]string{
		"thruput":               `there is no metric "thruput"`,
		"loss --ratio":          "--ratio: there is none for loss",
		"loss":                  "no result of made in",
		"primary --last 0":      "--last 0: must be at least 1",
		"primary --variant nix": "no result of made in",
	} {
		code, _, errs := slipstream(t, append(append([]string{"trend"}, strings.Fields(args)...), parent)...)
		if code != exitUsage {
			t.Errorf("%s: exit %d", args, code)
		}
		has(t, args, errs, want)
	}
}

func TestParseSince(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for text, want := range map[string]string{"": "0001-01-01T00:00:00Z", "2026-01-31": "2026-01-31T00:00:00Z", "30d": "2026-01-30T12:00:00Z", "12h": "2026-03-01T00:00:00Z"} {
		if got, err := parseSince(text, now); err != nil || got.Format(time.RFC3339) != want {
			t.Errorf("%q: %v, %v, want %s", text, got, err, want)
		}
	}
	for _, text := range []string{"yesterday", "-3d", "3dd", "0d", "-1h", "2026-02-31"} {
		if got, err := parseSince(text, now); err == nil {
			t.Errorf("%q is %v, want an error", text, got)
		}
	}
}
