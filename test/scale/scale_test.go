//go:build linux

package main

import (
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"slipstream.dev/internal/testenv"
)

// TestScale runs all scenarios with a few nodes, and checks the limits on the agents' requests and on the real
// agent's memory. It ignores times and CPU time, because other tests run meanwhile.
func TestScale(t *testing.T) {
	testenv.NeedRoot(t)
	appliedIn, backIn = 60, 180
	agent := filepath.Join(t.TempDir(), "slipstream")
	t.Chdir("../..")
	if out, err := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", agent, "./cmd/slipstream").CombinedOutput(); err != nil {
		t.Fatalf("build the agent: %v\n%s", err, out)
	}
	o := options{nodes: 20, pods: 200, policies: 20, blocks: 1, idle: 10 * time.Second, step: 10 * time.Second, agent: agent, dir: "/dev/shm"}
	r, err := run(t.Context(), o, t.Output())
	if err := r.print(t.Output()); err != nil {
		t.Error(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	r.Shares = nil
	if err := r.check(); err != nil {
		t.Error(err)
	}
}
