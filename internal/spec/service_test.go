package spec

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// services is an experiment with the services of a lab.
const services = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: services}
spec:
  baseline: one
  variants:
  - {name: one, path: {service: {mode: iptables}}}
  - {name: many, path: {service: {mode: ebpf, backends: 16000, services: 100}}}
  workloads:
  - {name: new, connect: {duration: 1s}}
  - {name: datagrams, pingpong: {protocol: udp, ip: 6, duration: 1s}}
`

func TestServices(t *testing.T) {
	e := parse(t, services)
	var got []Service
	var paths, shapes []string
	for _, v := range e.Spec.Variants {
		p := e.PathOf(v)
		got, paths, shapes = append(got, *p.Service), append(paths, p.String()), append(shapes, p.Shape())
	}
	if diff := cmp.Diff([]Service{
		{Mode: ServiceIPTables, Backends: 1, Services: 1, OtherBackends: 1}, {Mode: ServiceEBPF, Backends: 16000, Services: 100, OtherBackends: 1},
	}, got); diff != "" {
		t.Errorf("services (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"service/iptables/1", "service/ebpf/16000 of 100"}, paths); diff != "" {
		t.Errorf("paths (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{ShapeFlannel, ShapeFlannel}, shapes); diff != "" {
		t.Errorf("shapes (-want +got):\n%s", diff)
	}
	writtenAndRead(t, e.Metadata.Name, e)
}

func TestServiceErrors(t *testing.T) {
	for _, c := range []struct{ old, new, want string }{
		{"{mode: iptables}", "{}", "spec.variants[0].path.service.mode: is missing"},
		{"mode: iptables", "mode: ipvs", `spec.variants[0].path.service.mode: must be iptables, nftables or ebpf, is "ipvs"`},
		{"16000", "16001", "spec.variants[1].path.service.backends: must be at most 16000, is 16001"},
		{"16000", "0", "spec.variants[1].path.service.backends: must be at least 1, is 0"},
		{"services: 100}", "services: 0}", "spec.variants[1].path.service.services: must be at least 1, is 0"},
		{"services: 100}", "services: 10001}", "spec.variants[1].path.service.services: must be at most 10000, is 10001"},
		{"services: 100}", "services: 100, otherBackends: 251}", "spec.variants[1].path.service.otherBackends: must be at most 250, is 251"},
		{"services: 100}", "services: 100, endpointChanges: 101}", "spec.variants[1].path.service.endpointChanges: must be at most 100, is 101"},
		{"udp, ip: 6", "udp, tool: qperf", "spec.variants[0]: qperf opens a second port on its server"},
		{"udp, ip: 6", "udp, port: 4000", "spec.variants[0]: the port 4000 of the traffic cannot be had: a service or balancer has ports of its own; leave port out"},
		{"connect: {", "stream: {protocol: udp, tool: iperf3, ", "spec.variants[0]: iperf3 answers datagrams from its pod's first address"},
		{
			"services: 100}}", "services: 100}}, tools: {datagrams: sockperf}",
			"spec.variants[1].tools.datagrams: sockperf answers datagrams from its pod's first address, not from that of the service's backend that was asked; choose native",
		},
		{"  baseline", "  target: {kubernetes: {}}\n  baseline", "spec.variants[1].path.service.services: is for a lab; in a cluster, only backends can be set"},
	} {
		text := strings.Replace(services, c.old, c.new, 1)
		if text == services {
			t.Fatalf("the experiment has no %q", c.old)
		}
		if _, err := Parse("experiment.yaml", []byte(text), nil); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.new, err, c.want)
		}
	}
}

// TestServiceOfCluster: in a cluster, a service has a number of backends and nothing else, and only servers that listen on as
// many ports can be behind it.
func TestServiceOfCluster(t *testing.T) {
	const text = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: services}
spec:
  target: {kubernetes: {}}
  baseline: few
  variants:
  - {name: few,  path: {service: {backends: 1}}}
  - {name: many, path: {service: {backends: 16000}}}
  - {name: same, path: {service: {backends: 16000}}}
  workloads:
  - {name: ab, http: {duration: 1s, tool: ab}}
  - {name: engine, http: {duration: 1s}}
  pairs: [1, 2]
`
	e := parse(t, text)
	var paths []string
	for _, v := range e.Spec.Variants {
		paths = append(paths, e.PathOf(v).String())
	}
	if diff := cmp.Diff([]string{"service/1", "service/16000", "service/16000"}, paths); diff != "" {
		t.Errorf("paths (-want +got):\n%s", diff)
	}
	writtenAndRead(t, e.Metadata.Name, e)
	for _, c := range []struct{ old, new, want string }{
		{"16000", "16001", "spec.variants[1].path.service.backends: must be at most 16000, is 16001"},
		{"backends: 1}", "backends: 0}", "spec.variants[0].path.service.backends: must be at least 1, is 0"},
		{"backends: 1}", "otherBackends: 1}", "spec.variants[0].path.service.otherBackends: is for a lab"},
		{"[1, 2]", "[1, 3]", "spec.variants: the services of 3 pairs have 48000 backends in all, and a run creates at most 32000"},
		{"{kubernetes: {}}", "{kubernetes: {nodes: 4}}", "spec.variants[1]: services with 16000 backends are for two nodes, and the experiment has 4"},
		{"pairs: [1, 2]", "mesh: {}", "spec.variants[1]: the services of a mesh have one backend each, not 16000"},
		{"engine, http: {", "engine, http: {io: blocking, ", "spec.variants[1]: a service with 16000 backends in a cluster is for http"},
		{"engine, http: {", "engine, connect: {", "spec.variants[1]: a service with 16000 backends in a cluster is for http"},
		{"engine, http: {", "engine, stream: {", "spec.variants[1]: a service with 16000 backends in a cluster is for http"},
	} {
		changed := strings.Replace(text, c.old, c.new, 1)
		if changed == text {
			t.Fatalf("the experiment has no %q", c.old)
		}
		if _, err := Parse("experiment.yaml", []byte(changed), nil); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.new, err, c.want)
		}
	}
}

// TestPolicies: only paths whose packets pass through network policies can have them.
func TestPolicies(t *testing.T) {
	with := func(path string) error {
		_, err := Parse("experiment.yaml", []byte(strings.Replace(services, "{service: {mode: iptables}}", path, 1)), nil)
		return err
	}
	for _, path := range []string{
		"{vxlan: {}, policies: {count: 2000, mode: ipset}}", "{routed: {}, policies: {count: 1, mode: iptables}}",
		"{ebpf: {}, policies: {count: 1, mode: ebpf}}", "{bridge: {}, policies: {count: 1, mode: iptables}}", "{service: {mode: nftables}, policies: {count: 10000, mode: nftables}}",
		"{vxlan: {shape: calico}, local: true}", "{routed: {}, local: true}", "{ebpf: {}, local: true}", "{service: {mode: nftables}, local: true}",
	} {
		if err := with(path); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
	for path, want := range map[string]string{
		"{policies: {count: 1, mode: ipset}}":                "spec.variants[0].path: must have one of native",
		"{vxlan: {}, policies: {count: 0, mode: ipset}}":     "path.policies.count: must be at least 1, is 0",
		"{vxlan: {}, policies: {mode: ipset}}":               "path.policies.count: is missing",
		"{vxlan: {}, policies: {count: 10001, mode: ipset}}": "path.policies.count: must be at most 10000, is 10001",
		"{vxlan: {}, policies: {count: 1, mode: ipvs}}":      `path.policies.mode: must be iptables, ipset, nftables or ebpf, is "ipvs"`,
		"{vxlan: {}, policies: {count: 1}}":                  "path.policies.mode: is missing",
		"{native: {}, policies: {count: 1, mode: ipset}}":    "path.policies: are for pods of a lab on the paths vxlan, routed, ebpf, bridge and service",
		"{ebpf: {}, policies: {count: 1, mode: ipset}}":      "path.policies.mode: must be ebpf on the path ebpf, whose packets bypass netfilter",
		"{native: {}, local: true}":                          "path.local: is for the paths vxlan, routed, ebpf and service of a lab",
		"{bridge: {}, local: true}":                          "on the path bridge both pods are on one node anyway",
	} {
		if err := with(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
}
