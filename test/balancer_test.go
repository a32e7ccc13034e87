package test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/testenv"
)

// balancers replaces the variants and workloads of the quick experiment.
func balancers(t *testing.T) string {
	t.Helper()
	const nics = "nics: {client: {rate: 1Gbit}, proxy: {rate: 100Mbit, price: 0.1 USD}, backend: {rate: 60Mbit, price: 0.05 USD}}"
	return experiment(t,
		"baseline: vxlan", "baseline: one",
		"  - {name: vxlan}\n", "  - {name: one, path: {balancer: {backends: 1, "+nics+"}}}\n",
		"  - {name: native, path: {native: {}}}\n", "",
		"  - {name: rfs+, accelerate: [{rfs: {devices: [nic, overlay, host-veth, pod], cpus: all}}]}\n",
		"  - {name: four, path: {balancer: {backends: 4, "+nics+"}}}\n  - {name: built-in, path: {balancer: {backends: 2, proxy: builtin, "+nics+"}}}\n",
		"stream: {warmup: 50ms, duration: 200ms}}", "stream: {connections: 4, size: 8KiB, warmup: 1s, duration: 500ms}}",
		"{name: pingpong, pingpong: {warmup: 50ms, duration: 200ms}, pairs: [1]}", "{name: http, http: {size: 20k, connections: 8, warmup: 500ms, duration: 2s}, pairs: [2]}",
		"  pairs: [1, 2]\n  runs: 2\n", "  pairs: [1]\n  series: [{name: haproxy, axis: backends, of: [one, four]}]\n  runs: 1\n",
	)
}

// In a run with load balancers, the client measures the traffic of all backends
// together, and every node's load is recorded. The report names the limit, and the
// dominated variants.
func TestBalancer(t *testing.T) {
	testenv.NeedRoot(t)
	unchanged(t)
	d, stdout, _ := ran(t, balancers(t))
	all := trials(t, d)
	if len(cells(all)) != 2*3 {
		t.Fatalf("%d cells, want 6", len(cells(all)))
	}
	for _, tr := range all {
		if tr.Status != record.StatusOK {
			continue // it was repeated, as the number of cells shows
		}
		backends := map[string]int{"one": 1, "four": 4, "built-in": 2}[tr.Variant]
		if len(tr.Loads) != 2+backends {
			t.Fatalf("%s %s: loads %+v", tr.Variant, tr.Workload, tr.Loads)
		}
		for i, l := range tr.Loads {
			rate := map[string]float64{spec.RoleClient: 1e9, spec.RoleProxy: 100e6, spec.RoleBackend: 60e6}[l.Role]
			// A window includes a burst, and the edges of a trial.
			if l.Rate != rate || l.Role == spec.RoleClient != (i == 0) || l.Receive+l.Send == 0 || max(l.Receive, l.Send) > 1.15*rate {
				t.Errorf("%s %s: load %+v", tr.Variant, tr.Workload, l)
			}
		}
		for _, p := range tr.PerPair {
			var bytes uint64
			for _, b := range p.Backends {
				bytes += b.Bytes
				if b.Bytes == 0 {
					t.Errorf("%s %s: backend %s did nothing", tr.Variant, tr.Workload, b.Place)
				}
			}
			if len(p.Backends) != backends || bytes != p.Server.Bytes {
				t.Errorf("%s %s: %d backends with %d bytes, together %d", tr.Variant, tr.Workload, len(p.Backends), bytes, p.Server.Bytes)
			}
		}
	}
	var summary stats.Summary
	decode(t, filepath.Join(d.Path, "summary.json"), &summary)
	limit := make(map[string]string)
	for _, l := range summary.Limits {
		for _, r := range l.Resources { // On a busy machine, a core may precede the NIC.
			if l.Workload == "http" && l.Reached && r.Kind == stats.ResourceNIC {
				limit[l.Variant] = r.Roles[0]
			}
		}
	}
	if limit["one"] != spec.RoleBackend || limit["four"] != spec.RoleProxy {
		t.Errorf("limits are %v, of %+v", limit, summary.Limits)
	}
	if said := strings.Join(strings.Fields(stdout), " "); !strings.Contains(said, " on, the limit is the proxy: ") {
		t.Errorf("the limit is not told:\n%s", stdout)
	}
	page, err := os.ReadFile(filepath.Join(d.Path, "report.html"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`<section id="limit"`, `<section id="price"`, "<dt>Proxy</dt>", "builtin"} {
		if !strings.Contains(string(page), want) {
			t.Errorf("the report has no %q", want)
		}
	}
}

// A killed run with a balancer leaves its proxy running, and the next start ends the proxy.
func TestBalancerKilled(t *testing.T) {
	testenv.NeedRoot(t)
	unchanged(t)
	out := t.TempDir()
	p := start(t, nil, "run", balancers(t), "--out", out)
	p.await(t, "Gb/s", 1)
	_ = p.Process.Kill()
	<-p.ended
	code, _, stderr := finish(t, "run", experiment(t, "runs: 2", "runs: 1"), "--out", t.TempDir())
	if code != 0 || !strings.Contains(stderr, "removed lab run-") {
		t.Errorf("exit %d\n%s", code, stderr)
	}
	if left, _ := filepath.Glob("/run/netns/slip-run-*"); left != nil {
		t.Errorf("left: %v", left)
	}
}
