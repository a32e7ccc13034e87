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
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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

// comparedTrials are the trials of shortly: two blocks of four variants, with four workloads each.
const comparedTrials = 2 * 4 * 4

// shortly are the flags of a run of the preset cni with short trials.
func shortly(out string) []string {
	args := []string{"run", "cni", "--clusters", "vxlan,routed", "--out", out, "--runs", "2", "--duration", "300ms"}
	for _, workload := range []string{"stream", "pingpong", "connect", "http"} {
		args = append(args, "--set", fmt.Sprintf("spec.workloads.%s.%[1]s.warmup=200ms", workload))
	}
	return args
}

// testTwoClusters compares the networks of the shared cluster and of another one, whose nodes have the same names.
func testTwoClusters(t *testing.T, vxlan *Cluster) {
	routed := own(t, Config{CNI: Routed, Proxy: IPTables})
	kubeconfig := merged(t, map[string]*Cluster{"vxlan": vxlan, "routed": routed, "again": vxlan})
	before := [][]string{snapshotOf(t, vxlan), snapshotOf(t, routed)}
	t.Run("OneAndTheSame", func(t *testing.T) {
		v := invoke(t, kubeconfig, "run", "cni", "--clusters", "vxlan,again", "--out", t.TempDir())
		if code := v.exit(t, time.Minute); code != 1 || !strings.Contains(v.said(), "clusters vxlan and again are one and the same") {
			t.Errorf("exit %d:\n%s", code, v.said())
		}
	})
	t.Run("Compare", func(t *testing.T) { testCompareClusters(t, kubeconfig, routed) })
	unchanged(t, vxlan, before[0])
	unchanged(t, routed, before[1])
}

// testCompareClusters checks that blocks have trials of both clusters side by side, that each crosses the network of its cluster, and that
// the result names both networks. One of the clusters is lost on the way, so that a second run completes the first.
func testCompareClusters(t *testing.T, kubeconfig string, lost *Cluster) {
	d := loseAndResume(t, kubeconfig, lost)
	trials, err := d.Trials()
	if err != nil {
		t.Fatal(err)
	}
	checkInterleaved(t, trials)
	device := map[string]string{"vxlan": "flannel.1", "routed": "vxlan.calico"}
	for _, tr := range trials {
		if !good(tr) {
			continue // the cluster was lost
		}
		cluster, _, _ := strings.Cut(tr.Variant, "/")
		i := slices.IndexFunc(tr.Devices, func(dev record.Device) bool { return dev.Name == device[cluster] })
		if tr.Workload == "stream" && (i < 0 || tr.Devices[i].RxBytes+tr.Devices[i].TxBytes < 100_000) {
			t.Errorf("%s %s: devices %+v", tr.Variant, tr.Workload, tr.Devices)
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
func checkInterleaved(t *testing.T, trials []record.Trial) {
	t.Helper()
	first := slices.DeleteFunc(slices.Clone(trials), func(tr record.Trial) bool { return tr.Attempt > 1 })
	if len(first) != comparedTrials {
		t.Fatalf("%d trials, want %d", len(first), comparedTrials)
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

// loseAndResume kills the API server of a cluster early in a run. The run names the cluster and keeps what was measured; once the API
// server is back, cleanup finds what is left, and the resumed run completes the blocks. It returns the result.
func loseAndResume(t *testing.T, kubeconfig string, lost *Cluster) *record.Dir {
	t.Helper()
	out := t.TempDir()
	v := invoke(t, kubeconfig, shortly(out)...)
	v.await(t, fmt.Sprintf("2/%d  block 1", comparedTrials))
	kill(t, lost, "kube-apiserver")
	if code := v.exit(t, 4*time.Minute); code != 1 || !strings.Contains(v.said(), "cluster routed: the target is lost: the API server has not answered for") ||
		!strings.Contains(v.said(), "slipstream cleanup --context routed") {
		t.Errorf("exit %d:\n%s", code, v.said())
	}
	d, trials := resultsOf(t, out)
	if len(trials) < 2 || len(trials) >= comparedTrials || !slices.ContainsFunc(trials, good) {
		t.Errorf("%d trials on record", len(trials))
	}
	if err := lost.startAPIServer(func(error) {}); err != nil {
		t.Fatal(err)
	}
	awaitKubelets(t, lost)
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
	done := 0
	for _, tr := range all {
		if good(tr) {
			done++
		}
	}
	for _, tr := range measured(all[len(trials):]) {
		if !good(tr) {
			t.Errorf("resumed: %s %s: %s", tr.Variant, tr.Workload, tr.Error)
		}
	}
	if done != comparedTrials || !cmp.Equal(trials, all[:len(trials)]) {
		t.Errorf("%d good trials, want %d", done, comparedTrials)
	}
	return d
}

// awaitKubelets waits until the kubelets of all nodes have found the restarted API server. Before that, pods do not end, and a node that
// is still Ready may be taken for dead.
func awaitKubelets(t *testing.T, c *Cluster) {
	t.Helper()
	back := time.Now()
	for _, n := range c.nodes {
		testenv.Eventually(t, 5*time.Minute, "the kubelet of "+n.name, func() string {
			lease, err := c.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(t.Context(), n.name, metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			if renewed := lease.Spec.RenewTime; renewed == nil || renewed.Before(&metav1.MicroTime{Time: back}) {
				return fmt.Sprintf("it renewed its lease at %s, and the API server is back since %s", renewed, back)
			}
			return ""
		})
		if err := n.awaitReady(within(t, 2*time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
}
