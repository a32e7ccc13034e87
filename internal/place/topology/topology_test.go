package topology

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/spec"
)

// Services of a lab are on networks of their own. They are in front of the servers of
// the pairs that use them, and only for the transports of these pairs.
func TestServices(t *testing.T) {
	exp := parse(t, `
  target: {lab: {nodes: 3}}
  baseline: direct
  variants:
  - {name: direct}
  - {name: few, path: {service: {mode: ebpf}}}
  - {name: many, path: {service: {mode: ebpf, backends: 100, services: 7}}}
  workloads:
  - {name: new, connect: {duration: 1s}}
  - {name: more, connect: {duration: 1s}, pairs: [1, 3]}
  - {name: datagrams, pingpong: {protocol: udp, ip: 6, duration: 1s}}
`)
	topology := Of(exp)
	got := make(map[string]place.Served)
	for i, f := range topology.Fabrics() {
		got[f.Name()] = topology.Served(i)
	}
	served := place.Served{
		Positions:  []place.Position{{Node: 1, Pod: 0}, {Node: 0, Pod: 1}, {Node: 2, Pod: 1}},
		Transports: []place.Transport{{IP: 4, Protocol: "tcp"}, {IP: 6, Protocol: "udp"}},
	}
	if diff := cmp.Diff(map[string]place.Served{
		"flannel-full": {}, "flannel-full-ebpf-1-1": served, "flannel-full-ebpf-100-7": served,
	}, got); diff != "" {
		t.Errorf("servers (-want +got):\n%s", diff)
	}
}

// TestPools checks that each variant that chooses nodes of a cluster has two of its own, with the pods of its pairs, and that
// variants with the same labels share them.
func TestPools(t *testing.T) {
	exp := parse(t, `
  target: {kubernetes: {nodeNames: [a, b, c, d]}}
  baseline: old
  variants:
  - {name: old, hosts: {client: {pool: old}, server: {pool: old}}}
  - {name: new, path: {service: {}}, hosts: {client: {pool: new}, server: {pool: new}}}
  - {name: old-service, path: {service: {}}, hosts: {client: {pool: old}, server: {pool: old}}}
  - {name: new-native, path: {native: {}}, hosts: {client: {pool: new}, server: {pool: new}}}
  workloads:
  - {name: stream, stream: {duration: 1s}, pairs: [1, 3]}
`)
	topology := Of(exp)
	places := []place.Place{}
	for _, node := range []string{"a", "b", "c", "d"} {
		places = append(places, place.Place{Name: node, Node: node, Kind: place.Node, IPv4: netip.MustParseAddr("192.0.2.1")})
	}
	for _, node := range []string{"a", "b", "c", "d"} {
		for pod := range topology.Pods(0) {
			places = append(places, place.Place{Name: fmt.Sprint(node, pod), Node: node, Kind: place.Pod, IPv4: netip.MustParseAddr("192.0.2.2"),
				Service: place.Service{IPv4: netip.MustParseAddr("192.0.2.3"), Port: 1}})
		}
	}
	assigned := topology.Assign(0, places)
	var got []string
	for _, v := range exp.Spec.Variants {
		for pair := range 3 {
			p, err := assigned.Pair(v, pair, 4)
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, fmt.Sprintf("%s %s→%s", v.Name, p.Client.Name, p.Servers[0].Name))
		}
	}
	if diff := cmp.Diff([]string{
		"old a0→b0", "old a1→b1", "old a2→b2", "new c0→d0", "new c1→d1", "new c2→d2",
		"old-service a0→b0", "old-service a1→b1", "old-service a2→b2", "new-native c→d", "new-native c→d", "new-native c→d",
	}, got); diff != "" {
		t.Errorf("ends (-want +got):\n%s", diff)
	}
	if served := topology.Served(0).Positions; len(served) != 6 || served[0] != (place.Position{Node: 3}) || served[3] != (place.Position{Node: 1}) {
		t.Errorf("services in front of %v", served)
	}
}

// A server listens at all addresses if the service in front of it leads to other
// addresses than the server's own.
func TestListen(t *testing.T) {
	service := netip.MustParseAddr("192.0.2.2")
	exp := parse(t, `
  target: {lab: {nodes: 2}}
  baseline: direct
  variants:
  - {name: direct}
  - {name: service, path: {service: {mode: ebpf}}}
  workloads:
  - {name: new, connect: {duration: 1s}}
`)
	topology := Of(exp)
	for _, c := range []struct {
		variant    int
		everywhere bool
		want       string
	}{{0, false, "192.0.2.1:0"}, {0, true, "192.0.2.1:0"}, {1, false, "192.0.2.1:1"}, {1, true, "0.0.0.0:1"}} {
		v := exp.Spec.Variants[c.variant]
		var places []place.Place
		for _, node := range []string{"node0", "node1"} {
			places = append(places, place.Place{Name: node, Node: node, Kind: place.Node})
		}
		for _, node := range []string{"node0", "node1"} {
			places = append(places, place.Place{Name: node + "/pod0", Node: node, Kind: place.Pod, IPv4: own,
				Service: place.Service{IPv4: service, Port: 1, Everywhere: c.everywhere}})
		}
		p, err := topology.Assign(topology.FabricOf(v), places).Pair(v, 0, 4)
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Listen(p.Servers[0], 4).String(); got != c.want {
			t.Errorf("%s, everywhere %t: %s, want %s", v.Name, c.everywhere, got, c.want)
		}
	}
}

func TestSeats(t *testing.T) {
	for _, path := range []spec.Path{{}, {Bridge: &spec.Plain{}}, {EBPF: &spec.Plain{}, Local: true}} {
		testSeats(t, path)
	}
}

func testSeats(t *testing.T, path spec.Path) {
	for nodes := 2; nodes <= 16; nodes++ {
		taken := make(map[place.Position]bool)
		for i := range 64 {
			client, server := positions(path, i, nodes)
			if (client.Node == server.Node) != path.OneNode() {
				t.Errorf("%d nodes: pair %d is on nodes %d and %d", nodes, i, client.Node, server.Node)
			}
			if path.OneNode() && server.Pod != client.Pod+1 {
				t.Errorf("%d nodes: pair %d is in pods %d and %d, which may have one CPU", nodes, i, client.Pod, server.Pod)
			}
			if taken[client] || taken[server] {
				t.Errorf("%d nodes: pair %d shares a pod", nodes, i)
			}
			taken[client], taken[server] = true, true
		}
	}
}

// Networks with a balancer have no pods. Each has as many nodes as the largest of
// them, so that a node has the same number of CPUs in all.
func TestBalancer(t *testing.T) {
	topology := Of(parse(t, `
  target: {lab: {nodes: 3, nic: {rate: 1Gbit}}}
  baseline: one
  variants:
  - {name: one, path: {balancer: {backends: 1, nics: {backend: {rate: 400Mbit}}}}}
  - {name: two, path: {balancer: {backends: 2, proxy: builtin}}}
  workloads:
  - {name: bulk, stream: {connections: 4, warmup: 1ms, duration: 1s}}
  - {name: new, connect: {connections: 3, duration: 1s}, pairs: [1]}
  pairs: [2]
  runs: 1
  seed: 1
`))
	var got []string
	for i, f := range topology.Fabrics() {
		got = append(got, fmt.Sprintf("{%s %s} %d %d", f.Name(), topology.Describe(i), f.Pairs, topology.Pods(i)))
	}
	if diff := cmp.Diff([]string{
		"{balancer-1-full-client-1Gbit-proxy-1Gbit-backend-400Mbit 4 nodes, client → proxy → 1 backend, NIC offload full, MTU 1500, client 1Gbit, proxy 1Gbit, backend 400Mbit} 2 0",
		"{balancer-builtin-2-full-client-1Gbit-proxy-1Gbit-backend-1Gbit 4 nodes, client → builtin → 2 backends, NIC offload full, MTU 1500, client 1Gbit, proxy 1Gbit, backend 1Gbit} 2 0",
	}, got); diff != "" {
		t.Errorf("networks (-want +got):\n%s", diff)
	}
}

// parse parses the spec of an experiment.
func parse(t *testing.T, text string) *spec.Experiment {
	t.Helper()
	exp, err := spec.Parse("x", []byte("apiVersion: slipstream.dev/v1alpha1\nkind: Experiment\nmetadata: {name: x}\nspec:\n"+text), nil)
	if err != nil {
		t.Fatal(err)
	}
	return exp
}

// Native traffic runs on the nodes, on the CPUs of the pods that it stands in for.
func TestNative(t *testing.T) {
	exp := parse(t, `
  target: {lab: {nodes: 2}}
  baseline: pods
  variants:
  - {name: pods}
  - {name: native, path: {native: {}}}
  workloads:
  - {name: bulk, stream: {duration: 1s}}
`)
	topology := Of(exp)
	ip := netip.MustParseAddr("192.0.2.1")
	assignment := topology.Assign(0, []place.Place{
		{Name: "node0", Node: "node0", Kind: place.Node, IPv4: ip}, {Name: "node1", Node: "node1", Kind: place.Node, IPv4: ip},
		{Name: "node0/pod0", Node: "node0", Kind: place.Pod, Affinity: "0", IPv4: ip}, {Name: "node1/pod0", Node: "node1", Kind: place.Pod, Affinity: "1", IPv4: ip},
	})
	var got []string
	for _, v := range exp.Spec.Variants {
		p, err := assignment.Pair(v, 0, 4)
		if err != nil {
			t.Fatal(err)
		}
		for _, place := range append([]place.Place{p.Client}, p.Servers...) {
			got = append(got, fmt.Sprintf("%s, as %q, on %s", place.Name, place.StandsFor, place.Affinity))
		}
	}
	if diff := cmp.Diff([]string{
		`node0/pod0, as "", on 0`, `node1/pod0, as "", on 1`, `node0, as "node0/pod0", on 0`, `node1, as "node1/pod0", on 1`,
	}, got); diff != "" {
		t.Errorf("ends (-want +got):\n%s", diff)
	}
}

// A cluster has one network, whatever the paths.
func TestCluster(t *testing.T) {
	exp := parse(t, `
  target: {kubernetes: {}}
  baseline: pods
  variants:
  - {name: pods}
  - {name: native, path: {native: {}}}
  workloads:
  - {name: bulk, stream: {duration: 1s}, pairs: [3]}
`)
	topology := Of(exp)
	if got := topology.Fabrics(); len(got) != 1 || got[0].Name() != "" || topology.Describe(0) != "2 nodes of a cluster, 3 pods each" {
		t.Errorf("networks: %+v", got)
	}
}

// In a cluster, a path to several backends has a service of its own, and its server as many ports.
func TestBackends(t *testing.T) {
	exp := parse(t, `
  target: {kubernetes: {}}
  baseline: pods
  variants:
  - {name: pods}
  - {name: one, path: {service: {backends: 1}}}
  - {name: many, path: {service: {backends: 300}}}
  workloads:
  - {name: requests, http: {duration: 1s}}
`)
	at := func(last byte, port uint16, ports int) place.Service {
		return place.Service{IPv4: netip.AddrFrom4([4]byte{192, 0, 2, last}), Port: port, Ports: ports}
	}
	pod := place.Place{Kind: place.Pod, IPv4: own, Service: at(2, 1, 0), Services: map[int]place.Service{300: at(3, 10000, 300)}}
	var places []place.Place
	for _, node := range []string{"node0", "node1"} {
		places = append(places, place.Place{Name: node, Node: node, Kind: place.Node})
	}
	for _, node := range []string{"node0", "node1"} {
		pod.Name, pod.Node = node+"/pod0", node
		places = append(places, pod)
	}
	topology := Of(exp)
	for i, want := range []string{"192.0.2.1:0 192.0.2.1:0 0", "192.0.2.2:1 192.0.2.1:1 0", "192.0.2.3:10000 192.0.2.1:10000 300"} {
		p, err := topology.Assign(0, places).Pair(exp.Spec.Variants[i], 0, 4)
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(p.To, p.Listen(p.Servers[0], 4), p.Ports); got != want {
			t.Errorf("%s: %s, want %s", exp.Spec.Variants[i].Name, got, want)
		}
	}
}

// The pairs of a variant are on the hosts that it selects, and use the addresses of
// its path.
func TestHosts(t *testing.T) {
	exp := parse(t, `
  target:
    hosts:
    - {name: spare}
    - {name: a, labels: {zone: east}, addresses: {weave: 10.32.0.1}}
    - {name: b, labels: {zone: west}, addresses: {weave: "fd00::2"}}
  baseline: native
  variants:
  - {name: native, hosts: {client: {zone: east}, server: {zone: west}}}
  - {name: weave, path: {address: weave}, hosts: {client: {zone: west}, server: {zone: east}}}
  - {name: six, path: {address: weave}, hosts: {client: {zone: east}, server: {zone: west}}}
  workloads:
  - {name: new, connect: {duration: 1s}}
`)
	topology := Of(exp)
	if got := topology.Fabrics(); len(got) != 1 || topology.Describe(0) != "hosts a, b" {
		t.Errorf("networks: %+v", got)
	}
	weave := func(text string) map[string]netip.Addr {
		return map[string]netip.Addr{"weave": netip.MustParseAddr(text)}
	}
	assignment := topology.Assign(0, []place.Place{
		{Name: "a", Kind: place.Node, Node: "a", IPv4: netip.MustParseAddr("192.0.2.1"), Addresses: weave("10.32.0.1")},
		{Name: "b", Kind: place.Node, Node: "b", IPv4: netip.MustParseAddr("192.0.2.2"), Addresses: weave("fd00::2")},
	})
	got := make(map[string]string)
	for i, v := range exp.Spec.Variants {
		ip := []int{4, 4, 6}[i]
		p, err := assignment.Pair(v, 5, ip)
		if err != nil {
			t.Fatal(err)
		}
		got[v.Name] = fmt.Sprintf("%s to %s at %s, %s", p.Client.Name, p.Servers[0].Name, p.To.Addr(), p.Listen(p.Servers[0], ip).Addr())
	}
	if diff := cmp.Diff(map[string]string{
		"native": "a to b at 192.0.2.2, 192.0.2.2", "weave": "b to a at 10.32.0.1, 10.32.0.1", "six": "a to b at fd00::2, fd00::2",
	}, got); diff != "" {
		t.Errorf("pairs (-want +got):\n%s", diff)
	}
	if _, err := assignment.Pair(exp.Spec.Variants[2], 0, 4); err == nil || err.Error() != "b has no IPv4 address on the path weave: choose the other version (ip: 6)" {
		t.Errorf("IPv4 of a host with an IPv6 address: %v", err)
	}
}
