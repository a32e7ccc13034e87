//go:build linux && peers

package cluster

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
)

// TestPeers brings up a cluster with each mode of Cilium. Its pods reach each other, services and the API server; a run measures
// them; and slipstream's agent and doctor say what there is to say, and change nothing.
func TestPeers(t *testing.T) {
	for _, mode := range []string{Cilium, CiliumVXLAN} {
		t.Run(mode, func(t *testing.T) {
			c := own(t, Config{CNI: mode, Log: os.Stderr})
			runAll(t, c, clusterTest{"Pods", testPods}, clusterTest{"Run", testRunBesideCilium}, clusterTest{"Agent", testAgentBesideCilium})
		})
	}
}

// testRunBesideCilium measures pods by their addresses and by a service.
func testRunBesideCilium(t *testing.T, c *Cluster) {
	out := t.TempDir()
	v := invoke(t, c.Kubeconfig(), "run", experimentFile(t, "", "  - {name: service, path: {service: {}}}\n  - {name: native, path: {native: {}}}", brief), "--out", out)
	if code := v.exit(t, 3*time.Minute); code != 0 {
		t.Fatalf("exit %d:\n%s", code, v.said())
	}
	if _, trials := resultsOf(t, out); len(trials) == 0 || slices.ContainsFunc(trials, func(tr record.Trial) bool { return tr.Error != "" }) {
		t.Errorf("trials: %+v", trials)
	}
}

// testAgentBesideCilium asks for the fast path. The condition says in one sentence why there is none, and no device gets a
// program. What else the policy asks for is applied, and taken back.
func testAgentBesideCilium(t *testing.T, c *Cluster) {
	settings := nodeSettings(t, c)
	before := map[string][]string{}
	for _, n := range c.nodes {
		before[n.name] = programsOn(t, n)
	}
	startAgent(t, c)
	kubectl(t, c, strings.NewReader(accelerationPolicy("fast", fastForAll)), "apply", "-f", "-")
	for _, n := range c.nodes {
		const sentence = "fast path: the fast path supports no VXLAN device and no NIC of this node: all devices: Cilium's programs already handle the packets of pods (cil_"
		testenv.Eventually(t, agentPatience, "state of "+n.name, func() string {
			s := stateOf(t, c, n.name).Status
			if len(s.Observed) != 1 || s.Observed[0].State != "failed" || s.Observed[0].Reason != "Impossible" || !strings.HasPrefix(s.Observed[0].Message, sentence) {
				return fmt.Sprintf("%+v", s)
			}
			t.Logf("%s: %s", n.name, s.Observed[0].Message)
			return ""
		})
		if diff := cmp.Diff(before[n.name], programsOn(t, n)); diff != "" {
			t.Errorf("programs of %s (-before +after):\n%s", n.name, diff)
		}
	}
	kubectl(t, c, nil, "delete", "accelerationpolicy", "fast")
	if diff := cmp.Diff(settings, nodeSettings(t, c)); diff != "" {
		t.Errorf("settings (-before +after):\n%s", diff)
	}
}
