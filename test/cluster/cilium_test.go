//go:build linux && peers

package cluster

import (
	"fmt"
	"net"
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
// them; and slipstream's agent and doctor report what the mode means for them, and leave Cilium unchanged.
func TestPeers(t *testing.T) {
	for _, mode := range []string{Cilium, CiliumVXLAN, CiliumProxied, CiliumChained} {
		t.Run(mode, func(t *testing.T) {
			c := own(t, Config{CNI: mode, Log: os.Stderr})
			runAll(t, c, clusterTest{"Mode", testCiliumMode}, clusterTest{"Pods", testPods}, clusterTest{"Doctor", testDoctorBesideCilium}, clusterTest{"Run", testRunBesideCilium}, clusterTest{"Agent", testAgentBesideCilium},
				clusterTest{"ComeAndGo", testComeAndGo})
		})
	}
}

// ciliumStatus is what the agents of each mode report.
var ciliumStatus = map[string][]string{
	Cilium:        {"KubeProxyReplacement: True", "Network: Native Host: BPF", "Masquerading: BPF", "Socket LB: Enabled"},
	CiliumVXLAN:   {"KubeProxyReplacement: True", "Network: Tunnel [vxlan] Host: BPF", "Masquerading: BPF", "Socket LB: Enabled"},
	CiliumProxied: {"KubeProxyReplacement: False", "Network: Native Host: Legacy", "Masquerading: IPTables", "Socket LB: Disabled"},
	CiliumChained: {"KubeProxyReplacement: False", "CNI Chaining: generic-veth", "Host: Legacy", "Masquerading: Disabled"},
}

// testCiliumMode checks that the agents have the mode that was asked for.
func testCiliumMode(t *testing.T, c *Cluster) {
	for _, n := range c.nodes {
		testenv.Eventually(t, time.Minute, "status of "+n.name, func() string {
			out, err := output(n.Command(t.Context(), filepath.Join(c.peers, "cilium-dbg"), "status", "--verbose"))
			if err != nil {
				return err.Error()
			}
			is := strings.Join(strings.Fields(out), " ")
			for _, want := range append(ciliumStatus[c.config.CNI], " Cilium: Ok ", "Attach Mode: TCX") {
				if !strings.Contains(is, want) {
					return fmt.Sprintf("no %q in\n%s", want, out)
				}
			}
			return ""
		})
	}
}

// testDoctorBesideCilium checks that doctor names Cilium with its mode, and finds what the mode costs; what only the nodes can tell, it
// finds with --probe. It changes nothing.
func testDoctorBesideCilium(t *testing.T, c *Cluster) {
	const (
		inPlace = "replaces kube-proxy; services translated when a socket connects; host routing by eBPF; masquerade by eBPF"
		leaves  = "leaves services to kube-proxy (kube-proxy-replacement: false)"
	)
	want := map[string]struct {
		is          string
		found, seen []string
	}{
		Cilium:        {is: "native routing; " + inPlace},
		CiliumVXLAN:   {is: "tunnel (vxlan); " + inPlace, seen: []string{"note cilium-tunnel"}},
		CiliumProxied: {is: "native routing; " + leaves + "; host routing by the node's stack (legacy)", found: []string{"note cilium-host-routing", "note cilium-kube-proxy"}},
		CiliumChained: {is: "chained (generic-veth) behind the plugin that connects the pods and routes their packets; " + leaves},
	}[c.config.CNI]
	before := snapshotOf(t, c)
	for _, args := range [][]string{nil, {"--probe"}, {"--probe", "--all-nodes"}} {
		code, d := diagnose(t, c, args...)
		var found, named []string
		for _, f := range d.Findings {
			found = append(found, f.Severity+" "+f.Rule)
		}
		for _, f := range d.Facts {
			if f.From == "Cilium" || f.From == "fast path" {
				named = append(named, f.Value)
			}
		}
		expected := want.found
		if args != nil {
			expected = slices.Concat(want.found, want.seen)
		}
		if code != 0 || !slices.Equal(found, expected) {
			t.Errorf("%q: exit code %d, found %q, want %q: %+v", args, code, found, expected, d.Findings)
		}
		const fastPath = "does nothing on nodes with Cilium, whose programs already handle the packets of pods"
		if !slices.Equal(named, []string{"version unknown, DaemonSet kube-system/cilium; " + want.is, fastPath}) {
			t.Errorf("%q: facts %q", args, named)
		}
	}
	unchanged(t, c, before)
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
// program. Everything else in the policy is applied, and later reverted.
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

// testComeAndGo installs, restarts and removes slipstream's agents beside Cilium's, and Cilium's beside slipstream's. A connection
// between pods of two nodes works all the time, and pods can open new ones.
func testComeAndGo(t *testing.T, c *Cluster) {
	kubectl(t, c, strings.NewReader(webManifest), "apply", "-f", "-")
	defer kubectl(t, c, strings.NewReader(webManifest), "delete", "-f", "-")
	kubectl(t, c, nil, "rollout", "status", "deployment/web", "--timeout=120s")
	near, far := webPodOn(t, c, "node0"), webPodOn(t, c, "node1")
	listener, to := listen(t, far, "4000"), net.JoinHostPort(far.ip, "4000")
	lasting := talk(t, near, listener, to)
	restart := func(namespace, name string) func(*testing.T) {
		return func(t *testing.T) {
			kubectl(t, c, nil, "rollout", "restart", "-n", namespace, "daemonset/"+name)
			kubectl(t, c, nil, "rollout", "status", "-n", namespace, "daemonset/"+name, "--timeout=180s")
		}
	}
	for _, step := range []struct {
		name string
		do   func(*testing.T)
	}{
		{"slipstream installed", func(*testing.T) {
			startAgent(t, c)
			kubectl(t, c, strings.NewReader(accelerationPolicy("fast", fastForAll)), "apply", "-f", "-")
		}},
		{"Cilium restarted", restart("kube-system", "cilium")},
		{"slipstream restarted", restart("agents", "agent")},
		{"Cilium removed", func(t *testing.T) {
			kubectl(t, c, nil, "delete", "-n", "kube-system", "daemonset/cilium", "--timeout=60s")
		}},
		{"Cilium installed", func(t *testing.T) {
			if err := c.createCilium(t.Context()); err != nil {
				t.Fatal(err)
			}
			kubectl(t, c, nil, "rollout", "status", "-n", "kube-system", "daemonset/cilium", "--timeout=180s")
		}},
		{"slipstream removed", func(t *testing.T) {
			kubectl(t, c, nil, "delete", "accelerationpolicy", "fast")
			kubectl(t, c, strings.NewReader(agentManifest), "delete", "-f", "-", "--timeout=120s")
		}},
	} {
		t.Run(step.name, func(t *testing.T) {
			quit, longest := make(chan struct{}), make(chan time.Duration)
			go func() {
				var most time.Duration
				defer func() { longest <- most }()
				for {
					select {
					case <-quit:
						return
					case <-time.After(50 * time.Millisecond):
						began := time.Now()
						lasting()
						most = max(most, time.Since(began))
					}
				}
			}()
			step.do(t)
			close(quit)
			t.Logf("the longest round trip took %s", (<-longest).Round(time.Millisecond))
			talk(t, near, listener, to)()
		})
	}
}
