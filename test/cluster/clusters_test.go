//go:build linux

package cluster

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
)

// merged returns a kubeconfig with a context for each cluster.
func merged(t *testing.T, clusters map[string]*Cluster) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := WriteKubeconfig(file, clusters); err != nil {
		t.Fatal(err)
	}
	return file
}

// shortly are the flags of a run of the preset cni with short trials.
func shortly(out string, runs int) []string {
	args := []string{"run", "cni", "--clusters", "vxlan,routed", "--out", out, "--runs", fmt.Sprint(runs), "--duration", "300ms"}
	for _, workload := range []string{"stream", "pingpong", "connect", "http"} {
		args = append(args, "--set", fmt.Sprintf("spec.workloads.%s.%[1]s.warmup=200ms", workload))
	}
	return args
}

// TestTwoClusters compares the networks of two clusters, whose nodes have the same names. It has no other test at its side: with those that have
// clusters too, this machine would have more than own permits.
func TestTwoClusters(t *testing.T) {
	vxlan, routed := shared(t), own(t, Config{CNI: Routed, Proxy: IPTables})
	kubeconfig := merged(t, map[string]*Cluster{"vxlan": vxlan, "routed": routed, "again": vxlan})
	before := [][]string{snapshotOf(t, vxlan), snapshotOf(t, routed)}
	t.Run("Compare", func(t *testing.T) { testCompareClusters(t, kubeconfig) })
	t.Run("OneAndTheSame", func(t *testing.T) {
		v := invoke(t, kubeconfig, "run", "cni", "--clusters", "vxlan,again", "--out", t.TempDir())
		if code := v.exit(t, time.Minute); code != 1 || !strings.Contains(v.said(), "clusters vxlan and again are one and the same") {
			t.Errorf("exit %d:\n%s", code, v.said())
		}
	})
	t.Run("Lost", func(t *testing.T) { testClusterLost(t, kubeconfig, routed) })
	unchanged(t, vxlan, before[0])
	unchanged(t, routed, before[1])
}

// testCompareClusters checks that blocks have trials of both clusters side by side, that each crosses the network of its cluster, and that
// the result names both networks.
func testCompareClusters(t *testing.T, kubeconfig string) {
	out := t.TempDir()
	v := invoke(t, kubeconfig, shortly(out, 2)...)
	if code := v.exit(t, 5*time.Minute); code != 0 {
		t.Fatalf("exit %d:\n%s", code, v.said())
	}
	d, trials := resultsOf(t, out)
	checkInterleaved(t, trials, 2)
	device := map[string]string{"vxlan": "flannel.1", "routed": "vxlan.calico"}
	for _, tr := range measured(trials) {
		cluster, _, _ := strings.Cut(tr.Variant, "/")
		i := slices.IndexFunc(tr.Devices, func(dev record.Device) bool { return dev.Name == device[cluster] })
		if tr.Status != record.StatusOK || tr.Workload == "stream" && (i < 0 || tr.Devices[i].RxBytes+tr.Devices[i].TxBytes < 100_000) {
			t.Errorf("%s %s: %s %s, devices %+v", tr.Variant, tr.Workload, tr.Status, tr.Error, tr.Devices)
		}
	}
	env, err := d.Environment()
	if err != nil {
		t.Fatal(err)
	}
	want := []record.Cluster{
		{Name: "vxlan", Context: "vxlan", Plugin: "flannel", PluginMode: "vxlan", KubeProxy: NFTables},
		{Name: "routed", Context: "routed", Plugin: "calico", PluginMode: "vxlan", KubeProxy: IPTables},
	}
	if diff := cmp.Diff(want, env.Clusters, cmpopts.IgnoreFields(record.Cluster{}, "Kubernetes")); diff != "" || !strings.HasPrefix(env.Clusters[0].Kubernetes, "v1.") {
		t.Errorf("Kubernetes %s, clusters (-want +got):\n%s", env.Clusters[0].Kubernetes, diff)
	}
	var nodes []string
	for _, n := range env.Nodes {
		nodes = append(nodes, n.Name)
	}
	if diff := cmp.Diff([]string{"vxlan/node0", "vxlan/node1", "routed/node0", "routed/node1"}, nodes); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
	page := invoke(t, kubeconfig, "report", d.Path, "--format", "md")
	if code := page.exit(t, time.Minute); code != 0 {
		t.Fatalf("report: exit %d: %s", code, page.said())
	}
	for _, want := range []string{"vxlan/pod (flannel vxlan, kube-proxy nftables)", "routed/pod (calico vxlan, kube-proxy iptables)", "The clusters: vxlan is flannel vxlan, kube-proxy nftables; routed is calico vxlan, kube-proxy iptables."} {
		if !strings.Contains(page.stdout.String(), want) {
			t.Errorf("the report does not say %q:\n%s", want, page.stdout.String())
		}
	}
}

// checkInterleaved checks that in each block, the variants of a workload stand side by side, one trial each. Trials that were repeated are at
// the end of their block.
func checkInterleaved(t *testing.T, trials []record.Trial, blocks int) {
	t.Helper()
	first := slices.DeleteFunc(slices.Clone(trials), func(tr record.Trial) bool { return tr.Attempt > 1 })
	if len(first) != blocks*16 {
		t.Fatalf("%d trials, want %d", len(first), blocks*16)
	}
	for group := range slices.Chunk(first, 4) {
		var variants []string
		for _, tr := range group {
			variants = append(variants, tr.Variant)
			if tr.Workload != group[0].Workload || tr.Block != group[0].Block {
				t.Errorf("block %d: %s of %s is beside %s of %s", tr.Block, tr.Workload, tr.Variant, group[0].Workload, group[0].Variant)
			}
		}
		if slices.Sort(variants); !slices.Equal(variants, []string{"routed/pod", "routed/service", "vxlan/pod", "vxlan/service"}) {
			t.Errorf("block %d, %s: %v", group[0].Block, group[0].Workload, variants)
		}
	}
}

// testClusterLost kills the API server of a cluster in mid-block. The run names the cluster and keeps what was measured; once the API server is
// back, cleanup finds what is left, and the resumed run completes the blocks.
func testClusterLost(t *testing.T, kubeconfig string, lost *Cluster) {
	out := t.TempDir()
	v := invoke(t, kubeconfig, shortly(out, 3)...)
	v.await(t, "block 2  ")
	kill(t, lost, "kube-apiserver")
	if code := v.exit(t, 4*time.Minute); code != 1 || !strings.Contains(v.said(), "cluster routed: the target is lost: the API server has not answered for") ||
		!strings.Contains(v.said(), "slipstream cleanup --context routed") {
		t.Errorf("exit %d:\n%s", code, v.said())
	}
	d, trials := resultsOf(t, out)
	if len(trials) < 16 || len(trials) >= 48 || !slices.ContainsFunc(trials, good) {
		t.Errorf("%d trials on record", len(trials))
	}
	if err := lost.startAPIServer(func(error) {}); err != nil {
		t.Fatal(err)
	}
	for _, n := range lost.nodes {
		if err := n.awaitReady(within(t, 2*time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
	// Until the kubelets have found the API server again, pods do not end.
	testenv.Eventually(t, 5*time.Minute, "cleanup", func() string {
		v := invoke(t, kubeconfig, "cleanup", "--clusters", "vxlan,routed", "--all")
		if code := v.exit(t, 2*time.Minute); code != 0 || !strings.Contains(v.stdout.String(), "cluster routed: removed: run ") || !strings.Contains(v.stdout.String(), "cluster vxlan: no runs found") {
			return fmt.Sprintf("exit %d: %s%s", code, v.stdout.String(), v.said())
		}
		return ""
	})
	v = invoke(t, kubeconfig, "run", "--resume", d.Path)
	if code := v.exit(t, 5*time.Minute); code != 0 {
		t.Errorf("resume: exit %d:\n%s", code, v.said())
	}
	_, all := resultsOf(t, out)
	var done int
	for _, tr := range all {
		if tr.Status == record.StatusOK {
			done++
		}
	}
	if done != 48 || !cmp.Equal(trials, all[:len(trials)]) {
		t.Errorf("%d good trials, want 48", done)
	}
}
