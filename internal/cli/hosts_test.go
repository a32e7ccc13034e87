package cli

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/target/topology"
)

// TestNeedRoot: hosts without accelerators need no root, those of the side that has none among them.
func TestNeedRoot(t *testing.T) {
	const all = "RPS on nic over CPUs all of variant rps"
	for variants, want := range map[string]map[string]string{
		"": {},
		"- {name: rps, accelerate: [{rps: {devices: [nic], cpus: all}}]}":                                                                                 {"a": all, "b": all, "c": all},
		"- {name: rps, on: server, accelerate: [{rps: {devices: [nic], cpus: all}}]}":                                                                     {"b": all},
		"- {name: rps, on: client, accelerate: [{rps: {devices: [nic], cpus: all}}]}":                                                                     {"a": all},
		"- {name: rps, on: server, hosts: {server: {zone: far}}, accelerate: [{rps: {devices: [nic], cpus: all}}]}":                                       {"c": all},
		"- {name: rps, on: client, accelerate: [{rps: {devices: [nic], cpus: all}}]}\n  - {name: rfs, on: server, accelerate: [{rfs: {devices: [nic]}}]}": {"a": all, "b": "RFS on nic of variant rfs"},
	} {
		exp, err := v1alpha1.Parse("hosts.yaml", []byte(`apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: root}
spec:
  target: {hosts: [{name: a, labels: {zone: near}}, {name: b, labels: {zone: near}}, {name: c, labels: {zone: far}}]}
  baseline: native
  variants:
  - {name: native}
  - {name: other, hosts: {server: {zone: far}}}
  `+variants+`
  workloads:
  - {name: stream, stream: {duration: 1s}}
`), nil)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, needRoot(exp, topology.Of(exp).Hosts())); diff != "" {
			t.Errorf("%s (-want +got):\n%s", variants, diff)
		}
	}
}
