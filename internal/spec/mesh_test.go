package spec

import (
	"strings"
	"testing"
)

const meshFile = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: mesh}
spec:
  target: {lab: {nodes: 5}}
  baseline: pods
  mesh: {}
  variants: [{name: pods}]
  workloads: [{name: bulk, stream: {duration: 1s}}]
`

func TestMesh(t *testing.T) {
	e, err := Parse("mesh.yaml", []byte(meshFile), nil)
	if err != nil {
		t.Fatal(err)
	}
	if pairs := e.PairsOf(e.Spec.Workloads[0]); e.Rounds() != 10 || len(pairs) != 1 || pairs[0] != 2 || e.Spec.Mesh.Margin != 0.1 || e.Spec.Pairs != nil {
		t.Errorf("%d rounds of %v pairs, margin %g, pairs %v", e.Rounds(), pairs, e.Spec.Mesh.Margin, e.Spec.Pairs)
	}
	for set, want := range map[string]string{
		"spec.pairs=[1]":                                        "spec.pairs: cannot be combined with spec.mesh",
		"spec.workloads[0].pairs=[1]":                           "spec.workloads[0].pairs: cannot be combined with spec.mesh",
		"spec.mesh.margin=0.5":                                  "spec.mesh.margin: must be above 0 and below 0.5",
		"spec.path={bridge: {}}":                                "variant pods has the path bridge",
		"spec.path={routed: {}, local: true}":                   "variant pods has the path routed",
		"spec.path={service: {mode: ebpf}}":                     "variant pods has the path service",
		"spec.series=[{name: s, axis: pairs, of: [pods]}]":      "spec.series: cannot be combined with spec.mesh",
		"spec.variants=[{name: pods, hosts: {client: {a: b}}}]": "spec.variants[0].hosts: cannot be combined with spec.mesh",
	} {
		if _, err := Parse("mesh.yaml", []byte(meshFile), []string{set}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", set, err, want)
		}
	}
	// A mesh includes all hosts, so each must have the address of the path.
	hosts := []string{"spec.target={hosts: [{name: a, addresses: {x: 192.0.2.1}}, {name: b, addresses: {x: 192.0.2.2}}, {name: c}]}", "spec.path={address: x}"}
	if _, err := Parse("mesh.yaml", []byte(meshFile), hosts); err == nil || !strings.Contains(err.Error(), `host c must have "x" among its addresses`) {
		t.Errorf("a host without the address: %v", err)
	}
}

func TestKubernetesNodes(t *testing.T) {
	for set, want := range map[string]string{
		"spec.target={kubernetes: {nodes: 1}}":                                "spec.target.kubernetes.nodes: must be at least 2",
		"spec.target={kubernetes: {nodes: 4, clientNode: a}}":                 "spec.target.kubernetes.nodes: must be 2 with clientNode",
		"spec.target={kubernetes: {nodeNames: [a]}}":                          "spec.target.kubernetes.nodeNames: must be 2 to 128 nodes, are 1",
		"spec.target={kubernetes: {nodeNames: [a, a]}}":                       "spec.target.kubernetes.nodeNames[1]: must be unique",
		"spec.target={kubernetes: {nodeNames: [a, b], serverNode: b}}":        "spec.target.kubernetes.nodeNames: cannot be combined with clientNode",
		"spec.target={kubernetes: {nodeNames: [a, b], nodes: 3}}":             "spec.target.kubernetes.nodes: must be 2, as many as nodeNames",
		"spec.target={kubernetes: {clientSelector: {zone: \"not a label\"}}}": "spec.target.kubernetes.clientSelector.zone: must be the value of a label",
		"spec.target={kubernetes: {nodeNames: [a, b, c, d, e], nodes: 5}}":    "",
	} {
		e, err := Parse("mesh.yaml", []byte(meshFile), []string{set})
		switch {
		case want == "" && (err != nil || e.Nodes() != 5 || e.Rounds() != 10):
			t.Errorf("%s: %v", set, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%s: %v, want %s", set, err, want)
		}
	}
}
