//go:build linux

package cluster

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"
)

// diagnosis is the output of doctor, as far as tests read it.
type diagnosis struct {
	Facts    []fact
	Findings []finding
}

type fact struct{ Where, From, Value string }

type finding struct{ Where, Rule, Severity, What string }

// diagnose runs doctor kubernetes, and returns its exit code and its output. It leaves out findings about the whole machine, which
// other programs share.
func diagnose(t *testing.T, c *Cluster, args ...string) (code int, d diagnosis) {
	t.Helper()
	v := invoke(t, c.Kubeconfig(), append([]string{"doctor", "kubernetes", "--for", "100ms", "--format", "json"}, args...)...)
	code = v.exit(t, 2*time.Minute)
	if err := json.Unmarshal(v.stdout.Bytes(), &d); err != nil {
		t.Fatalf("exit code %d: %v\n%s", code, err, v.said())
	}
	d.Findings = slices.DeleteFunc(d.Findings, func(f finding) bool {
		return slices.Contains([]string{"backlog-full", "flow-limit", "squeezed", "throttled"}, f.Rule)
	})
	return code, d
}

// doctorSays runs doctor kubernetes, and returns its exit code and one line for each finding.
func doctorSays(t *testing.T, c *Cluster, args ...string) (code int, found []string) {
	t.Helper()
	code, d := diagnose(t, c, args...)
	for _, f := range d.Findings {
		found = append(found, f.Severity+" "+f.Rule+" "+f.Where+": "+f.What)
	}
	return code, found
}

// testDoctor checks that doctor finds nothing in a healthy cluster, its nodes and pods, and leaves nothing behind.
// It finds what would make a run fail, and a blocked overlay.
func testDoctor(t *testing.T, c *Cluster) {
	before := snapshotOf(t, c)
	importBase(t, c)
	if code, found := doctorSays(t, c, "--probe", "--base-image", baseImage); code != 0 || len(found) > 0 {
		t.Errorf("a healthy cluster: exit code %d, found %q", code, found)
	}
	if code, found := doctorSays(t, c, "--probe", "--all-nodes"); code != 0 || len(found) > 0 {
		t.Errorf("every node of a healthy cluster: exit code %d, found %q", code, found)
	}
	if code, found := doctorSays(t, c, "--selector", "pool=none"); code != 3 || len(found) != 1 || !strings.HasPrefix(found[0], "serious run-lacks : ") {
		t.Errorf("no nodes: exit code %d, found %q", code, found)
	}
	node := c.Node("node1")
	rule := func(how string) {
		t.Helper()
		if _, err := output(node.Command(t.Context(), "iptables", how, "INPUT", "-p", "udp", "--dport", "8472", "-j", "DROP")); err != nil {
			t.Fatal(err)
		}
	}
	rule("-I")
	defer rule("-D")
	code, found := doctorSays(t, c, "--probe")
	blocked := func(line string) bool {
		return strings.HasPrefix(line, "serious vxlan-blocked node0 to node1: UDP port 8472")
	}
	if code != 3 || !slices.ContainsFunc(found, blocked) {
		t.Errorf("a blocked overlay: exit code %d, found %q", code, found)
	}
	unchanged(t, c, before)
}
