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
	verdicts := map[stats.Verdict][]string{}
	for _, r := range summaryOf(t, out).Rows {
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

// TestHalfRate compares two clusters of which one has NICs of half the rate. Each stream must be found to have half the throughput.
func TestHalfRate(t *testing.T) {
	clusters := map[string]*Cluster{"a": own(t, Config{}), "b": own(t, Config{})}
	for name, rate := range map[string]string{"a": "2gbit", "b": "1gbit"} {
		for _, n := range clusters[name].nodes {
			if _, err := output(n.Command(t.Context(), "tc", "qdisc", "replace", "dev", nicName, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "5ms")); err != nil {
				t.Fatal(err)
			}
		}
	}
	out := t.TempDir()
	v := invoke(t, merged(t, clusters), "run", "cni", "--clusters", "a,b", "--runs", "10", "--set", "spec.pairs=[1]", "--out", out)
	if code := v.exit(t, 30*time.Minute); code != 0 {
		t.Fatalf("exit %d:\n%s", code, v.said())
	}
	found := 0
	for _, r := range summaryOf(t, out).Rows {
		if r.Versus == nil {
			continue
		}
		t.Logf("%s %s %s: %s %.3f (%.3f–%.3f)", r.Variant, r.Workload, r.Metric, r.Versus.Verdict, r.Versus.Ratio, r.Versus.CI95[0], r.Versus.CI95[1])
		if r.Workload == "stream" && r.Metric == "throughput" {
			found++
			if r.Versus.Verdict != stats.Slower || r.Versus.Ratio < 0.4 || r.Versus.Ratio > 0.6 {
				t.Errorf("%s: %s, %.3f", r.Variant, r.Versus.Verdict, r.Versus.Ratio)
			}
		}
	}
	if found == 0 {
		t.Error("no stream was compared")
	}
}

func summaryOf(t *testing.T, out string) (summary stats.Summary) {
	t.Helper()
	d, _ := resultsOf(t, out)
	data, err := os.ReadFile(filepath.Join(d.Path, "summary.json"))
	if err == nil {
		err = json.Unmarshal(data, &summary)
	}
	if err != nil {
		t.Fatal(err)
	}
	return summary
}
