package cli

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"slipstream.dev/internal/place/topology"
	"slipstream.dev/internal/spec"
)

// TestParseHosts: hosts are named as for ssh and scp, and have the names and addresses that an experiment can have.
func TestParseHosts(t *testing.T) {
	for names, want := range map[string][]spec.Host{
		"a,me@b":                           {{Name: "a"}, {Name: "b", User: "me"}},
		"a,b:2222":                         {{Name: "a"}, {Name: "b", Port: 2222}},
		"me@[fd77::1],[fd77::2]:2222":      {{Name: "ip6-fd77--1", Address: "fd77::1", User: "me"}, {Name: "ip6-fd77--2", Address: "fd77::2", Port: 2222}},
		"fd77::1,fe80::1%eth0":             {{Name: "ip6-fd77--1", Address: "fd77::1"}, {Name: "ip6-fe80--1-eth0", Address: "fe80::1%eth0"}},
		"localhost:2201,me@localhost:2202": {{Name: "localhost", Port: 2201}, {Name: "localhost-2202", Address: "localhost", User: "me", Port: 2202}},
		"a,a":                              {{Name: "a"}, {Name: "a"}}, // a mistake, which what reads them reports
		"a:ssh":                            {{Name: "a:ssh"}},
		"10.0.0.1:22":                      {{Name: "10.0.0.1", Port: 22}},
	} {
		if diff := cmp.Diff(want, parseHosts(names)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", names, diff)
		}
	}
}

// TestNeedRoot: hosts without accelerators need no root, nor do hosts on a side without
// accelerators.
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
		exp, err := spec.Parse("hosts.yaml", []byte(`apiVersion: slipstream.dev/v1alpha1
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

// TestNeedSystem: a host that runs Windows supports the engine's threads, gRPC and latte.
func TestNeedSystem(t *testing.T) {
	type systems struct{ Linux, Windows map[string]string }
	both := func(what string) map[string]string { return map[string]string{"a": what, "b": what} }
	for workload, want := range map[string]systems{
		"stream: {duration: 1s}":                                                    {},
		"stream: {duration: 1s, protocol: udp, connections: 2}":                     {Linux: map[string]string{"b": "a server of 2 UDP flows of workload w"}},
		"pingpong: {duration: 1s, io: epoll}":                                       {Linux: both("io: epoll of workload w")},
		"pingpong: {duration: 1s, tool: latte}":                                     {Windows: both("latte of workload w")},
		"stream: {duration: 1s, tool: iperf3}":                                      {Linux: both("iperf3 of workload w")},
		"http: {duration: 1s}":                                                      {Linux: both("http of workload w")},
		"application: {tool: grpc, operation: unary, connections: 2, duration: 1s}": {},
		"application: {tool: redis, operation: get, connections: 2, duration: 1s}":  {Linux: both("redis of workload w")},
	} {
		exp, err := spec.Parse("hosts.yaml", []byte(`apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: system}
spec:
  target: {hosts: [{name: a}, {name: b}, {name: c}]}
  baseline: native
  variants:
  - {name: native}
  workloads:
  - {name: w, `+workload+`}
`), nil)
		if err != nil {
			t.Fatal(err)
		}
		var got systems
		got.Linux, got.Windows = needSystem(exp)
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", workload, diff)
		}
	}
}
