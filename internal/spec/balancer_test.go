package spec

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// balancers is an experiment with two balancers.
const balancers = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: balancers}
spec:
  baseline: one
  variants:
  - {name: one, path: {balancer: {backends: 1}}}
  - {name: four, path: {balancer: {backends: 4, proxy: builtin, nics: {client: {rate: 10Gbit}, backend: {rate: 400Mbit}}}}}
  workloads:
  - {name: new, connect: {duration: 1s}}
  - {name: bulk, stream: {connections: 8, duration: 1s}}
`

func TestBalancers(t *testing.T) {
	e := parse(t, balancers)
	one, four := e.PathOf(e.Spec.Variants[0]), e.PathOf(e.Spec.Variants[1])
	if diff := cmp.Diff(Balancer{
		Backends: 4, Proxy: ProxyBuiltin, NICs: RoleNICs{Client: RoleNIC{Rate: "10Gbit"}, Backend: RoleNIC{Rate: "400Mbit"}},
	}, *four.Balancer); diff != "" {
		t.Errorf("balancer (-want +got):\n%s", diff)
	}
	if got := one.String() + " " + four.String() + " " + one.Shape(); got != "balancer/1 balancer/builtin/4 " {
		t.Errorf("paths and shape are %q", got)
	}
	var roles []string
	for i := range 8 {
		roles = append(roles, four.Balancer.Role(i))
	}
	if diff := cmp.Diff([]string{"client", "proxy", "backend", "backend", "backend", "backend", "", ""}, roles); diff != "" {
		t.Errorf("roles (-want +got):\n%s", diff)
	}
	writtenAndRead(t, e.Metadata.Name, e)
}

func TestBalancerErrors(t *testing.T) {
	const four, connect, stream = "spec.variants[1].path.balancer", "spec.workloads[0].connect", "spec.workloads[1].stream"
	for _, c := range []struct{ old, new, want string }{
		{"{backends: 1}", "{}", "spec.variants[0].path.balancer.backends: is missing"},
		{"backends: 4", "backends: 0", four + ".backends: must be at least 1, is 0"},
		{"backends: 4", "backends: 15", four + ".backends: must be at most 14, is 15"},
		{"proxy: builtin", "proxy: nginx", four + `.proxy: must be haproxy or builtin, is "nginx"`},
		{"rate: 400Mbit", "rate: 400", four + `.nics.backend.rate: must be a rate such as 10Gbit or 500Mbit, is "400"`},
		{"client: {", "clients: {", four + `.nics.clients: unknown field; did you mean client?`},
		{"backend: {rate: 400Mbit}", "backend: {mtu: 1500}", four + ".nics.backend.mtu: unknown field"},
		{"connections: 8", "connections: 6", stream + ".connections: must be a multiple of 4, the backends of four, so that each has as many; is 6"},
		{"connections: 8", "connections: 8, protocol: udp", stream + ".protocol: must be tcp if a variant has the path balancer, which distributes connections"},
		{"connections: 8", "connections: 8, tool: iperf3", stream + ": iperf3 needs a single server, and the balancer of one has several; choose native or ab"},
		{"{name: one, ", "{name: one, accelerate: [{rps: {devices: [nic, overlay], cpus: all}}], ", "spec.variants[0].accelerate[0].rps.devices[1]: must be nic, is overlay, which the path balancer does not have"},
		{"  baseline", "  target: {kubernetes: {}}\n  baseline", "spec.variants[1].path.balancer: is for a lab; a cluster has a network of its own"},
	} {
		text := strings.Replace(balancers, c.old, c.new, 1)
		if text == balancers {
			t.Fatalf("the experiment has no %q", c.old)
		}
		_, err := Parse("experiment.yaml", []byte(text), nil)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.new, err, c.want)
		}
	}
	// Connections that come and go need not divide evenly among the backends.
	parse(t, strings.Replace(balancers, "connect: {", "connect: {connections: 3, ", 1))
}
