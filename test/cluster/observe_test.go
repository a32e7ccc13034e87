//go:build linux

package cluster

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
)

// testObserve measures what slipstream's own agent uses while traffic runs, like any other DaemonSet.
func testObserve(t *testing.T, c *Cluster) {
	startAgent(t, c)
	out := t.TempDir()
	v := invoke(t, c.Kubeconfig(), "run", experimentFile(t, "observe: [agents/agent]", "", settled), "--out", out)
	if code := v.exit(t, 5*time.Minute); code != 0 {
		t.Fatalf("exit %d:\n%s", code, v.said())
	}
	_, trials := resultsOf(t, out)
	trials = measured(trials)
	if len(trials) != 2 {
		t.Errorf("%d trials, want 2", len(trials))
	}
	for _, tr := range trials {
		if !good(tr) || len(tr.DaemonSets) != 2 {
			t.Fatalf("%s %s: DaemonSets %+v", tr.Status, tr.Error, tr.DaemonSets)
		}
		var memory, cpus float64
		for i, d := range tr.DaemonSets {
			if node := c.nodes[i].name; d.Name != "agents/agent" || d.Node != node || d.Error != "" {
				t.Errorf("%+v, want agents/agent on %s", d, node)
			}
			if mib := d.Memory / (1 << 20); mib < 4 || mib > 200 || d.CPUs < 0 || d.CPUs > 2 {
				t.Errorf("%+v", d)
			}
			t.Logf("%s: %.1f millicores, %.1f MiB", d.Node, 1000*d.CPUs, d.Memory/(1<<20))
			memory, cpus = memory+d.Memory/2, cpus+d.CPUs/2
		}
		if tr.Metrics[metrics.OfDaemonSet(metrics.DaemonSetMemory, "agents/agent")] != memory || tr.Metrics[metrics.OfDaemonSet(metrics.DaemonSetCPU, "agents/agent")] != cpus {
			t.Errorf("metrics %v, want the means %g and %g", tr.Metrics, memory, cpus)
		}
		if warned(tr, record.WarnNotObserved) {
			t.Errorf("warnings %v", tr.Warnings)
		}
	}
	v = invoke(t, c.Kubeconfig(), "run", experimentFile(t, "observe: [agents/agnt]", "", brief), "--dry-run")
	const want = "spec.target.kubernetes.observe: DaemonSet agents/agnt has no running pod on node node0; the DaemonSets of its namespace that have one there: agent"
	if code := v.exit(t, time.Minute); code == 0 || !strings.Contains(v.said(), want) {
		t.Errorf("exit %d, want %q:\n%s", code, want, v.said())
	}
	testObserveRestart(t, c)
}

// testObserveRestart kills the agent of a node, and each that follows, from the second trial of a run on: the run has no values for that
// node, and says why.
func testObserveRestart(t *testing.T, c *Cluster) {
	out := t.TempDir()
	v := invoke(t, c.Kubeconfig(), "run", experimentFile(t, "observe: [agents/agent]", "", "warmup: 100ms, duration: 8s"), "--out", out)
	v.await(t, "block 1  baseline")
	if err := poll(within(t, 5*time.Minute), 100*time.Millisecond, func() (ended bool, err error) {
		select {
		case <-v.ended:
			return true, nil
		default:
		}
		pid, err := agentOn(c.nodes[1])
		if err == nil && pid != 0 {
			_ = syscall.Kill(pid, syscall.SIGKILL) // an error means that it has ended
		}
		return false, err
	}); err != nil {
		t.Fatal(err)
	}
	_, trials := resultsOf(t, out)
	last := trials[len(trials)-1]
	if !good(last) || len(last.DaemonSets) != 2 || last.DaemonSets[0].Error != "" || last.DaemonSets[1].Error == "" || last.DaemonSets[1].Memory != 0 {
		t.Fatalf("%s %s: DaemonSets %+v", last.Status, last.Error, last.DaemonSets)
	}
	t.Log(last.DaemonSets[1].Error)
	if _, ok := last.Metrics[metrics.OfDaemonSet(metrics.DaemonSetCPU, "agents/agent")]; ok || !warned(last, record.WarnNotObserved) {
		t.Errorf("metrics %v, warnings %v", last.Metrics, last.Warnings)
	}
}
