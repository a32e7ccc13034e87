//go:build linux && peers

package cluster

import (
	"fmt"
	"os"
	"path/filepath"
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
			runAll(t, c, clusterTest{"Mode", testCiliumMode}, clusterTest{"Pods", testPods}, clusterTest{"Run", testRunBesideCilium}, clusterTest{"Agent", testAgentBesideCilium})
		})
	}
}

// testCiliumMode checks that the agents have the mode that was asked for, and did not fall back to the node's stack.
func testCiliumMode(t *testing.T, c *Cluster) {
	routing := map[string]string{Cilium: "Network: Native Host: BPF", CiliumVXLAN: "Network: Tunnel [vxlan] Host: BPF"}[c.config.CNI]
	for _, n := range c.nodes {
		testenv.Eventually(t, time.Minute, "status of "+n.name, func() string {
			out, err := output(n.Command(t.Context(), filepath.Join(c.peers, "cilium-dbg"), "status", "--verbose"))
			if err != nil {
				return err.Error()
			}
			is := strings.Join(strings.Fields(out), " ")
			for _, want := range []string{"KubeProxyReplacement: True", " Cilium: Ok ", routing, "Attach Mode: TCX", "Masquerading: BPF", "Socket LB: Enabled"} {
				if !strings.Contains(is, want) {
					return fmt.Sprintf("no %q in\n%s", want, out)
				}
			}
			return ""
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
