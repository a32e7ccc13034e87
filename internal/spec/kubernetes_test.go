package spec

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/testenv/golden"
)

// cluster is an experiment in a cluster that sets every field about it.
const cluster = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: cluster}
spec:
  target:
    kubernetes:
      clientNode: worker-1.example
      serverNode: worker-2.example
      nodeSelector: {kubernetes.io/arch: amd64, pool: ""}
      image: registry.example:5000/net/slipstream:v1@sha256:0123
      resources: {cpu: 500m, memory: 256Mi}
  baseline: base
  variants:
  - {name: base}
  - {name: service, path: {service: {}}}
  - {name: native, path: {native: {}}}
  - {name: rps, accelerate: [{rps: {devices: [nic, pod], cpus: all}}]}
  workloads:
  - {name: bulk, stream: {duration: 10s}}
  runs: 20
`

func TestKubernetes(t *testing.T) {
	e := parse(t, cluster)
	want := &Kubernetes{
		ClientNode: "worker-1.example", ServerNode: "worker-2.example",
		NodeSelector: map[string]string{"kubernetes.io/arch": "amd64", "pool": ""},
		Image:        "registry.example:5000/net/slipstream:v1@sha256:0123",
		Resources:    Resources{CPU: "500m", Memory: "256Mi"},
	}
	if diff := cmp.Diff(want, e.Spec.Target.Kubernetes); diff != "" {
		t.Errorf("target (-want +got):\n%s", diff)
	}
	if e.Spec.Target.Lab != nil || e.Nodes() != 2 {
		t.Errorf("lab %v, %d nodes", e.Spec.Target.Lab, e.Nodes())
	}
	var paths []string
	for _, v := range e.Spec.Variants {
		paths = append(paths, e.PathOf(v).String())
	}
	if diff := cmp.Diff([]string{"pod", "service", "native", "pod"}, paths); diff != "" {
		t.Errorf("paths (-want +got):\n%s", diff)
	}
	writtenAndRead(t, e.Metadata.Name, e)
	// The shortest description of a cluster, changed as by --set.
	least := parse(t, small, "spec.target={kubernetes: {}}", "spec.target.kubernetes.unprivileged=true")
	if diff := cmp.Diff(&Kubernetes{Unprivileged: true}, least.Spec.Target.Kubernetes); diff != "" {
		t.Errorf("least (-want +got):\n%s", diff)
	}
}

// TestKubernetesErrors compares the messages for one change each.
func TestKubernetesErrors(t *testing.T) {
	var got strings.Builder
	for _, c := range []struct {
		name     string
		old, new string
		set      []string
	}{
		{name: "two targets", set: []string{"spec.target.lab.nodes=2"}},
		{name: "overlay of a lab", old: "service, path: {service: {}}", new: "service, path: {vxlan: {}}"},
		{name: "lab with a cluster's paths", old: "  target:\n    kubernetes:\n      clientNode: worker-1.example\n      serverNode: worker-2.example\n      nodeSelector: {kubernetes.io/arch: amd64, pool: \"\"}\n      image: registry.example:5000/net/slipstream:v1@sha256:0123\n      resources: {cpu: 500m, memory: 256Mi}\n", new: "  path: {pod: {}}\n"},
		{name: "services of a lab", old: "{service: {}}", new: "{service: {mode: ebpf, backends: 10, services: 2}}"},
		{name: "nic", old: "{name: base}", new: "{name: base, nic: {mtu: 1500}}"},
		{name: "congestion control", old: "image:", new: "congestionControl: bbr\n      image:"},
		{name: "nodes", old: "clientNode: worker-1.example\n      serverNode: worker-2.example", new: "clientNode: Worker_1\n      serverNode: ''"},
		{name: "one node", old: "worker-1.example", new: "worker-2.example"},
		{name: "selector", old: `{kubernetes.io/arch: amd64, pool: ""}`, new: `{kubernetes.io/arch: "amd 64", "a b": c}`},
		{name: "selector, no mapping", old: `{kubernetes.io/arch: amd64, pool: ""}`, new: `pool=a`},
		{name: "image", old: "registry.example:5000/net/slipstream:v1@sha256:0123", new: "'Slipstream v1'"},
		{name: "resources", old: "cpu: 500m, memory: 256Mi", new: "cpu: half, memory: 256MB"},
		{name: "no resources", old: "cpu: 500m, memory: 256Mi", new: "cpu: 0.0, memory: 0"},
		{name: "base image", old: "image: registry.example:5000/net/slipstream:v1@sha256:0123", new: "baseImage: 'Busybox 1'"},
		{name: "image and base image", old: "image:", new: "baseImage: busybox\n      image:"},
		{name: "unprivileged", old: "image:", new: "unprivileged: true\n      image:"},
		{name: "observe", old: "image:", new: "observe: [cilium, kube-system/, kube-system/ds, Kube-System/ds, kube-system/ds]\n      image:"},
		{name: "observe unprivileged", set: []string{"spec.target.kubernetes={observe: [kube-system/ds], unprivileged: true}", "spec.variants=[{name: base}]"}},
		{name: "no boolean", old: "image:", new: "unprivileged: yes\n      image:"},
	} {
		text := cluster
		if c.old != "" {
			if text = strings.Replace(cluster, c.old, c.new, 1); text == cluster {
				t.Fatalf("%s: the experiment has no %q", c.name, c.old)
			}
		}
		_, err := Parse("experiment.yaml", []byte(text), c.set)
		if err == nil {
			t.Errorf("%s: no error", c.name)
			continue
		}
		got.WriteString("# " + c.name + "\n" + err.Error() + "\n")
	}
	golden.Compare(t, "testdata/kubernetes-errors.txt", got.String())
}

// TestPools checks which nodes variants choose by labels, and what such a choice cannot be combined with.
func TestPools(t *testing.T) {
	const text = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: pools}
spec:
  target: {kubernetes: {nodeSelector: {kubernetes.io/os: windows}}}
  path: {native: {}}
  baseline: old
  variants:
  - {name: old, hosts: {client: {pool: old}, server: {pool: old}}}
  - {name: new, hosts: {client: {pool: new}, server: {pool: new}}}
  - {name: old-again, hosts: {client: {pool: old}, server: {pool: old}}}
  - {name: any}
  workloads:
  - {name: stream, stream: {duration: 1s}}
`
	e := parse(t, text)
	old, fresh := map[string]string{"pool": "old"}, map[string]string{"pool": "new"}
	if diff := cmp.Diff([]Ends{{Client: old, Server: old}, {Client: fresh, Server: fresh}, {}}, e.Pools()); diff != "" {
		t.Errorf("pools (-want +got):\n%s", diff)
	}
	var of []int
	for _, v := range e.Spec.Variants {
		of = append(of, e.PoolOf(v))
	}
	if diff := cmp.Diff([]int{0, 1, 0, 2}, of); diff != "" || e.Nodes() != 6 {
		t.Errorf("%d nodes, pools of the variants (-want +got):\n%s", e.Nodes(), diff)
	}
	writtenAndRead(t, "pools", e)
	if one := parse(t, cluster); one.Pools() != nil {
		t.Errorf("no variant chooses, and there are pools: %v", one.Pools())
	}
	for set, want := range map[string]string{
		"spec.target.kubernetes.nodeNames=[a, b, c, d, e, f]":        "",
		"spec.target.kubernetes.nodeNames=[a, b]":                    "spec.target.kubernetes.nodeNames: must be 6, two for each selection of labels by variants, are 2",
		"spec.target.kubernetes.nodes=4":                             "spec.variants[0].hosts: cannot be combined with clientNode",
		"spec.target.kubernetes.clientNode=a":                        "spec.variants[0].hosts: cannot be combined with clientNode",
		"spec.target.kubernetes.serverSelector={zone: a}":            "spec.variants[0].hosts: cannot be combined with clientNode",
		"spec.variants.old.hosts.client={a b: c}":                    "must have the name of a node label as key",
		"spec.variants.old.hosts.client={kubernetes.io/arch: amd64}": "",
		"spec.target={lab: {}}":                                      "spec.variants[0].hosts: is for the targets hosts and kubernetes",
	} {
		_, err := Parse("test.yaml", []byte(text), []string{set})
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", set, err, want)
		}
	}
}
