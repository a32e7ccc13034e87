package test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/testenv"
)

// switching is an experiment with a switch command that halves the rate of the client's NIC.
func switching(t testing.TB) string {
	t.Helper()
	const tbf = "tc, qdisc, replace, dev, eth0, root, handle, \"1:\", tbf, burst, 128k, latency, 20ms, rate"
	in := program + ", lab, exec, run-1, node0, --, "
	text := fmt.Sprintf(`apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: quick}
spec:
  target: {lab: {nic: {rate: 400Mbit}}}
  path: {native: {}}
  baseline: fast
  variants:
  - {name: fast}
  - name: slow
    switch:
      to: [%[1]s%[2]s, 200mbit]
      back: [%[1]s%[2]s, 400mbit]
      verify: [sh, -c, '%[3]s lab exec run-1 node0 -- tc qdisc show dev eth0 | grep -q "rate 200Mbit"']
  workloads:
  - {name: stream, stream: {warmup: 200ms, duration: 300ms}}
  runs: 4
  trialsPerPeriod: 2
`, in, tbf, program)
	path := filepath.Join(t.TempDir(), "quick.yaml")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestSwitch kills a run while something is switched, undoes the switch, and resumes the run. The interval in the summary
// contains the true ratio.
func TestSwitch(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedProgram(t, "tc", "apt-get install iproute2")
	unchanged(t)
	out := t.TempDir()
	file := switching(t)

	p := start(t, nil, "run", file, "--out", out)
	if !p.await(t, "  slow  stream", 1) {
		t.Fatalf("the run came to its end:\n%s", p.stderr())
	}
	_ = p.Process.Kill()
	<-p.ended
	left, err := record.LeftSwitched(out)
	if err != nil || len(left) != 1 {
		t.Fatalf("left switched: %v, %v\n%s", left, err, p.stderr())
	}

	if code, _, stderr := finish(t, "run", file, "--out", out); code != 1 || !strings.Contains(stderr, "undo the switch with slipstream cleanup "+left[0]) {
		t.Errorf("another run: exit code %d\n%s", code, stderr)
	}
	if code, stdout, stderr := finish(t, "cleanup", left[0]); code != 0 || !strings.Contains(stdout, "\nundone: ") {
		t.Errorf("cleanup: exit code %d\n%s%s", code, stdout, stderr)
	}
	code, stdout, stderr := finish(t, "run", "--resume", left[0])
	if code != 0 {
		t.Fatalf("resume: exit code %d\n%s", code, stderr)
	}
	if want := "Switch-back design: 8 periods, in each of which a variant has 2 trials per workload and number of pairs."; !strings.Contains(strings.Join(strings.Fields(stdout), " "), want) {
		t.Errorf("the report does not say %s\n%s", want, stdout)
	}

	// A stalled machine makes a trial slower, never faster.
	all := trials(t, results(t, out))
	fastest, held := 0.0, 0
	for _, tr := range all {
		fastest = max(fastest, tr.Metrics[metrics.Throughput])
	}
	for _, tr := range all {
		switch isFast := tr.Metrics[metrics.Throughput] > 0.6*fastest; {
		case isFast && tr.Variant == "slow":
			t.Errorf("a trial of the slow state has %g of %g bits/s", tr.Metrics[metrics.Throughput], fastest)
		case !isFast && tr.Variant == "fast" && tr.Status == record.StatusOK:
			held++
		}
	}
	if held > 1 {
		t.Errorf("%d trials of the fast state are slow", held)
	}

	data, err := os.ReadFile(filepath.Join(left[0], "summary.json"))
	if err != nil {
		t.Fatal(err)
	}
	var s stats.Summary
	if err := json.Unmarshal(data, &s); err != nil {
		t.Fatal(err)
	}
	for _, r := range s.Rows {
		if r.Metric != metrics.Throughput || r.Versus == nil {
			continue
		}
		v := r.Versus
		t.Logf("ratio %.4f (%.4f–%.4f)", v.Ratio, v.CI95[0], v.CI95[1])
		// The interval may be off by 1%: the two token buckets have the same size, which lasts for a different time at each rate.
		// The ratio may be off by more, because the machine may stall during a trial.
		if v.N != 4 || v.Verdict != stats.Slower || v.CI95[0] > 0.505 || v.CI95[1] < 0.495 || v.Ratio < 0.45 || v.Ratio > 0.55 {
			t.Errorf("%+v, want half", v)
		}
	}
}
