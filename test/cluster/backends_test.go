//go:build linux

package cluster

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
)

const backendsFile = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: quick}
spec:
  target: {kubernetes: {unprivileged: true}}
  baseline: one
  variants:
  - {name: one, path: {service: {backends: 1}}}
  - {name: many, path: {service: {backends: 300}}}
  workloads:
  - {name: http, http: {connections: 8, size: 64, requests: 6000, duration: 60s}}
  runs: 2
`

// endpointRule matches what kube-proxy writes for an endpoint of the service of 300, in either mode.
var endpointRule = regexp.MustCompile(`(?m)^\s+chain endpoint-\S+-many/server-0-300-\w+/tcp/tcp__|^-A KUBE-SVC-.* "many/server-0-300-\w+:tcp -> `)

// testBackends checks that kube-proxy has every backend of a service, that each answers, and that nothing is left of
// them. Of 6,000 requests, each backend gets some.
func testBackends(t *testing.T, c *Cluster) {
	before := snapshotOf(t, c)
	kubectl(t, c, nil, "create", "namespace", "many")
	file := filepath.Join(t.TempDir(), "quick.yaml")
	if err := os.WriteFile(file, []byte(backendsFile), 0o644); err != nil {
		t.Fatal(err)
	}
	out := t.TempDir()
	v := invoke(t, c.Kubeconfig(), "run", file, "--out", out, "-n", "many")
	v.await(t, "block 1  ")
	for _, n := range []string{"node0", "node1"} {
		rules, err := output(c.Node(n).Command(t.Context(), "sh", "-c", "nft list table ip kube-proxy 2>/dev/null; iptables-save -t nat 2>/dev/null"))
		if err != nil {
			t.Fatal(err)
		}
		if got := len(endpointRule.FindAllString(rules, -1)); got != 300 {
			t.Errorf("%s has %d endpoints of the service, want 300", n, got)
		}
	}
	if code := v.exit(t, 5*time.Minute); code != 0 {
		t.Fatalf("exit %d:\n%s", code, v.said())
	}
	_, trials := resultsOf(t, out)
	if trials = measured(trials); len(trials) != 4 {
		t.Errorf("%d trials, want 4", len(trials))
	}
	for _, tr := range trials {
		if tr.Status != record.StatusOK || tr.Metrics[metrics.Completion] <= 0 || tr.Metrics[metrics.Errors] != 0 {
			t.Errorf("%s: %s %s, %v", tr.Variant, tr.Status, tr.Error, tr.Metrics)
		}
	}
	if left := kubectl(t, c, nil, "get", "pods,services,endpointslices,leases", "-n", "many", "-o", "name"); left != "" {
		t.Errorf("left in the user's namespace: %s", left)
	}
	kubectl(t, c, nil, "delete", "namespace", "many")
	unchanged(t, c, before)
}
