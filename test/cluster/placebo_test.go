//go:build linux && placebo

package cluster

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"slipstream.dev/internal/stats"
)

// TestPlacebo compares two clusters that are alike, and counts the verdicts. Any but same and inconclusive is false, or shows that two clusters
// on one machine are less alike than they seem. It judges nothing: one run has too few comparisons for that.
func TestPlacebo(t *testing.T) {
	kubeconfig := merged(t, map[string]*Cluster{"a": own(t, Config{}), "b": own(t, Config{})})
	out := t.TempDir()
	v := invoke(t, kubeconfig, "run", "cni", "--clusters", "a,b", "--runs", "20", "--out", out)
	if code := v.exit(t, 50*time.Minute); code != 0 {
		t.Fatalf("exit %d:\n%s", code, v.said())
	}
	d, _ := resultsOf(t, out)
	data, err := os.ReadFile(filepath.Join(d.Path, "summary.json"))
	if err != nil {
		t.Fatal(err)
	}
	var summary stats.Summary
	if err := json.Unmarshal(data, &summary); err != nil {
		t.Fatal(err)
	}
	verdicts := map[stats.Verdict][]string{}
	for _, r := range summary.Rows {
		if r.Versus != nil {
			verdicts[r.Versus.Verdict] = append(verdicts[r.Versus.Verdict],
				fmt.Sprintf("%s %s %s: %.3f (%.3f–%.3f)", r.Variant, r.Workload, r.Metric, r.Versus.Ratio, r.Versus.CI95[0], r.Versus.CI95[1]))
		}
	}
	if len(verdicts) == 0 {
		t.Fatal("nothing was compared")
	}
	for _, verdict := range slices.Sorted(maps.Keys(verdicts)) {
		t.Logf("%s: %d", verdict, len(verdicts[verdict]))
		for _, row := range verdicts[verdict] {
			t.Log("  " + row)
		}
	}
}
