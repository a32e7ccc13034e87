package spec

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// inTwo is an experiment over two clusters that sets every field about them.
const inTwo = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: two}
spec:
  target:
    kubernetes:
      clusters:
      - {name: old, context: admin@old, nodeNames: [n1, n2]}
      - {name: new, kubeconfig: /etc/new config, nodeNames: [n2, n3], observe: [kube-system/cilium]}
      nodeSelector: {pool: net}
      observe: [kube-system/kube-proxy]
  baseline: pod/old
  variants:
  - {name: pod/old, cluster: old}
  - {name: pod/new, cluster: new}
  - {name: service/new, cluster: new, path: {service: {}}, versus: pod/new}
  workloads:
  - {name: bulk, stream: {duration: 10s}}
  runs: 20
`

// TestClusters reads an experiment over two clusters, and its part in each.
func TestClusters(t *testing.T) {
	e := parse(t, inTwo)
	want := []Cluster{
		{Name: "old", Context: "admin@old", NodeNames: []string{"n1", "n2"}},
		{Name: "new", Context: "new", Kubeconfig: "/etc/new config", NodeNames: []string{"n2", "n3"}, Observe: []string{"kube-system/cilium"}},
	}
	if diff := cmp.Diff(want, e.Spec.Target.Kubernetes.Clusters); diff != "" {
		t.Errorf("clusters (-want +got):\n%s", diff)
	}
	writtenAndRead(t, "two", e)
	part := e.InCluster("new")
	wantPart := &Kubernetes{ClientNode: "n2", ServerNode: "n3", NodeSelector: map[string]string{"pool": "net"}, Observe: []string{"kube-system/kube-proxy", "kube-system/cilium"}}
	if diff := cmp.Diff(wantPart, part.Spec.Target.Kubernetes); diff != "" {
		t.Errorf("the part in new (-want +got):\n%s", diff)
	}
	var names []string
	for _, v := range part.Spec.Variants {
		names = append(names, v.Name+v.Cluster)
	}
	if diff := cmp.Diff([]string{"pod/new", "service/new"}, names); diff != "" || len(e.Spec.Variants) != 3 || len(e.Spec.Target.Kubernetes.Clusters) != 2 {
		t.Errorf("variants in new (-want +got):\n%s", diff)
	}
	if e.MeasuredAlike(e.Spec.Variants[0], e.Spec.Variants[1]) || !e.MeasuredAlike(e.Spec.Variants[1], e.Spec.Variants[2]) {
		t.Error("variants are measured alike if they are in one cluster")
	}
}

// TestClustersOfVariants: what variants name are contexts, unless the target has clusters.
func TestClustersOfVariants(t *testing.T) {
	e := parse(t, small, "spec.target={kubernetes: {nodes: 4}}", "spec.baseline=a", "spec.variants=[{name: a, cluster: kind-a}, {name: b, cluster: kind-b}, {name: c, cluster: kind-a}]")
	want := []Cluster{{Name: "kind-a", Context: "kind-a"}, {Name: "kind-b", Context: "kind-b"}}
	if diff := cmp.Diff(want, e.Spec.Target.Kubernetes.Clusters); diff != "" || e.Nodes() != 4 {
		t.Errorf("%d nodes, clusters (-want +got):\n%s", e.Nodes(), diff)
	}
	writtenAndRead(t, "small", e)
}

// TestAcrossClusters: every variant is in each cluster, and is compared with the same one of the first.
func TestAcrossClusters(t *testing.T) {
	e := parse(t, small, "spec.target={kubernetes: {}}", "spec.baseline=pod", "spec.variants=[{name: pod}, {name: service, path: {service: {}}}, {name: more, path: {service: {}}, versus: service}]")
	got := map[string]string{}
	for _, v := range e.AcrossClusters([]string{"a", "b", "c"}) {
		got[v.Name+" in "+v.Cluster+" "+e.PathOf(v).String()] = v.Versus
	}
	want := map[string]string{
		"a/pod in a pod": "", "b/pod in b pod": "a/pod", "c/pod in c pod": "a/pod",
		"a/service in a service": "", "b/service in b service": "a/service", "c/service in c service": "a/service",
		"a/more in a service": "", "b/more in b service": "a/more", "c/more in c service": "a/more",
	}
	if diff := cmp.Diff(want, got); diff != "" || e.BaselineAcross([]string{"a", "b"}) != "a/pod" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestClustersErrors(t *testing.T) {
	const k = "spec.target.kubernetes."
	for set, want := range map[string]string{
		k + "nodes=2":                                                     "",
		k + "clusters.new.nodeNames=":                                     "",
		k + "clusters.new.name=old":                                       k + "clusters[1].name: must be unique",
		k + "clusters.new.name=n w":                                       k + "clusters[1].name: must be of A-Z",
		k + "clusters.new.name=":                                          k + "clusters[1].name: is missing",
		k + "clusters.new.context=-x":                                     k + "clusters[1].context: must be without spaces or a leading -",
		k + "clusters=[]":                                                 k + "clusters: must have at least one cluster",
		k + "clusters.new.nodeNames=[a]":                                  k + "clusters[1].nodeNames: must be 2 to 128 nodes, and as many in each cluster; new has 1, expected are 2",
		k + "clusters.new.nodeNames=[a, a]":                               k + "clusters[1].nodeNames[1]: must be unique",
		k + "clusters.new.observe=[cilium]":                               k + "clusters[1].observe[0]: must be the namespace and the name of a DaemonSet",
		k + "clusters.new.observe=[kube-system/kube-proxy]":               k + "clusters[1].observe[0]: must be unique, \"kube-system/kube-proxy\" is spec.target.kubernetes.observe[0] too",
		k + "clusters.new.nodeNames=[a, B]":                               k + "clusters[1].nodeNames[1]: must be the name of a node",
		k + "clusters=[{name: old, context: c}, {name: new, context: c}]": k + "clusters[1].context: must be another one than that of cluster old, is \"c\" too",
		k + "clusters=[{name: old}, {name: new}, {name: third}]":          k + "clusters[2]: no variant runs in cluster third: give one cluster: third",
		k + "clientNode=a":                                                k + "clientNode: cannot be combined with clusters, each of which has nodeNames of its own",
		k + "nodeNames=[a, b]":                                            k + "nodeNames: cannot be combined with clusters",
		"spec.mesh={}":                                                    "spec.mesh: is for one cluster, and the experiment has old and new",
		"spec.target={lab: {}}":                                           "spec.variants[0].cluster: is for the target kubernetes",
		"spec.variants.pod/new.cluster=":                                  "spec.variants[1].cluster: is missing: the experiment compares the clusters old and new",
		"spec.variants.pod/new.cluster=nwe":                               "spec.variants[1].cluster: there is no cluster \"nwe\"; did you mean",
		"spec.variants.pod/new.hosts={client: {zone: a}}":                 "spec.variants[1].cluster: cannot be combined with hosts",
	} {
		_, err := Parse("test.yaml", []byte(inTwo), []string{set})
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", set, err, want)
		}
	}
	// A context whose name no cluster can have.
	_, err := Parse("test.yaml", []byte(small), []string{"spec.target={kubernetes: {}}", "spec.baseline=a", "spec.variants=[{name: a, cluster: admin@a}, {name: b, cluster: b}]"})
	if want := "give a cluster of spec.target.kubernetes.clusters another name than its context"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %q", err, want)
	}
}
