package experiment

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/target"
)

// Services of a lab are on networks of their own, in front of the servers of the pairs
// that go by way of them, and for what those have.
func TestServices(t *testing.T) {
	exp, err := v1alpha1.Parse("x", []byte(`apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: x}
spec:
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
`), nil)
	if err != nil {
		t.Fatal(err)
	}
	p := New(exp)
	got := make(map[string]target.Served)
	for _, f := range p.Fabrics {
		got[f.String()] = p.served(f)
	}
	served := target.Served{
		Seats:      []target.Seat{{Node: 1, Pod: 0}, {Node: 0, Pod: 1}, {Node: 2, Pod: 1}},
		Transports: []target.Transport{{IP: 4, Protocol: "tcp"}, {IP: 6, Protocol: "udp"}},
	}
	if diff := cmp.Diff(map[string]target.Served{
		"network flannel-full": {}, "network flannel-full-ebpf-1-1": served, "network flannel-full-ebpf-100-7": served,
	}, got); diff != "" {
		t.Errorf("servers (-want +got):\n%s", diff)
	}
}

// A server behind a service that leads to other addresses than its own listens at all.
func TestListen(t *testing.T) {
	own, service := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	cell := Cell{Workload: v1alpha1.Workload{Connect: &v1alpha1.Traffic{IP: 4}}}
	for _, c := range []struct {
		service, everywhere bool
		want                string
	}{{false, false, "192.0.2.1"}, {false, true, "192.0.2.1"}, {true, false, "192.0.2.1"}, {true, true, "0.0.0.0"}} {
		cell.Service = c.service
		place := target.Place{IPv4: own, Service: target.Service{IPv4: service, Port: 1, Everywhere: c.everywhere}}
		if got := listen(place, cell).String(); got != c.want {
			t.Errorf("service %t, everywhere %t: %s, want %s", c.service, c.everywhere, got, c.want)
		}
	}
}
