package report

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

// TestClusters: each variant is shown with the network of its cluster, and without it if there is a single cluster.
func TestClusters(t *testing.T) {
	exp := &spec.Experiment{Spec: spec.Spec{
		Target: spec.Target{Kubernetes: &spec.Kubernetes{}}, Path: spec.Path{Pod: &spec.Plain{}}, Baseline: "a/pod", Margin: 0.02, Pairs: []int{1},
		Variants:  []spec.Variant{{Name: "a/pod", Cluster: "a"}, {Name: "b/pod", Cluster: "b"}},
		Workloads: []spec.Workload{{Name: "bulk", Stream: &spec.Traffic{Protocol: "tcp", Tool: "native"}}},
	}}
	row := stats.Row{Variant: "a/pod", Workload: "bulk", Pairs: 1, Metric: metrics.Throughput, Unit: "bit/s", Primary: true, N: 12, Mean: 1e9, CI95: [2]float64{1e9, 1e9}}
	other := row
	other.Variant, other.Versus = "b/pod", &stats.Versus{Baseline: "a/pod", N: 12, Ratio: 1.5, CI95: [2]float64{1.4, 1.6}, P: 0.001, Verdict: stats.Faster}
	env := record.Environment{Clusters: []record.Cluster{
		{Name: "a", Context: "prod", Kubernetes: "v1.35.1", Plugin: "flannel", PluginVersion: "v0.27", PluginMode: "vxlan", KubeProxy: "nftables"},
		{Name: "b", Plugin: "cilium"},
	}}
	m := New(exp, &stats.Summary{Rows: []stats.Row{row, other}}, nil, env)
	var rows []string
	for _, r := range m.Tables[0].Rows {
		rows = append(rows, r.Variant+": "+r.Network)
	}
	if diff := cmp.Diff([]string{"a/pod: flannel vxlan, kube-proxy nftables", "b/pod: cilium"}, rows); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]Definition{{"Cluster a", "flannel v0.27 vxlan, kube-proxy nftables, Kubernetes v1.35.1, context prod"}, {"Cluster b", "cilium"}}, m.Clusters); diff != "" {
		t.Errorf("setup (-want +got):\n%s", diff)
	}
	if want := "The clusters: a is flannel vxlan, kube-proxy nftables; b is cilium."; !strings.Contains(m.Headline, "b/pod") || m.More[0] != want {
		t.Errorf("%s %q, want %s", m.Headline, m.More, want)
	}
	var md, html strings.Builder
	if err := errors.Join(Markdown(&md, m), HTML(&html, m)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"a/pod (flannel vxlan, kube-proxy nftables)", "- **Cluster b**: cilium"} {
		if !strings.Contains(md.String(), want) {
			t.Errorf("no %q in\n%s", want, md.String())
		}
	}
	if want := `a/pod <span class="quiet">flannel vxlan, kube-proxy nftables</span>`; !strings.Contains(html.String(), want) {
		t.Errorf("no %q in the page", want)
	}
	exp.Spec.Variants[0].Cluster, exp.Spec.Variants[1].Cluster, env.Clusters = "", "", []record.Cluster{{Plugin: "flannel"}}
	m = New(exp, &stats.Summary{Rows: []stats.Row{row, other}}, nil, env)
	if len(m.More) > 0 || m.Tables[0].Rows[0].Network != "" || len(m.Clusters) != 1 || m.Clusters[0] != (Definition{"Cluster", "flannel"}) {
		t.Errorf("one cluster: %q, %+v, %+v", m.More, m.Tables[0].Rows[0], m.Clusters)
	}
}
