package experiment

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/topology"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

const balancerExperiment = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: x}
spec:
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
`

func balancers(t *testing.T) *spec.Experiment {
	t.Helper()
	exp, err := spec.Parse("x", []byte(balancerExperiment), nil)
	if err != nil {
		t.Fatal(err)
	}
	return exp
}

// balancerTarget is a fakeTarget whose nodes have the roles of a balancer. It records
// the traffic that the ends were asked for.
type balancerTarget struct {
	*fakeTarget
	asked []string
}

func (b *balancerTarget) Network(ctx context.Context, fabric int) (Network, error) {
	n, err := b.fakeTarget.Network(ctx, fabric)
	return &balancerNetwork{n.(*fakeNetwork), b}, err
}

type balancerNetwork struct {
	*fakeNetwork
	target *balancerTarget
}

func (n *balancerNetwork) assignment() *topology.Assignment {
	return n.topology.Assign(n.fabric, n.all())
}

func (n *balancerNetwork) Places() []place.Place { return n.assignment().Places() }

func (n *balancerNetwork) Pair(v spec.Variant, i, ip int) (place.Pair, error) {
	return n.assignment().Pair(v, i, ip)
}

func (n *balancerNetwork) balancer() spec.Balancer { return n.topology.Fabrics()[n.fabric].Balancer }

// all returns the places of the lab, including those that the experiment does not use.
func (n *balancerNetwork) all() (all []place.Place) {
	for i := range n.topology.Fabrics()[n.fabric].Nodes {
		ip := netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})
		p := place.Place{
			Name: fmt.Sprintf("node%d", i), Kind: place.Node, Node: fmt.Sprintf("node%d", i), IPv4: ip,
			Role: n.balancer().Role(i), NICRate: 1e9, Cores: []int{i % 2}, Shared: true,
		}
		if i == 1 {
			p.Service = place.Service{IPv4: ip, Port: 7000}
		}
		all = append(all, p)
	}
	return all
}

func (n *balancerNetwork) Worker(ctx context.Context, p place.Place, use place.Use) (Worker, error) {
	w, err := n.fakeNetwork.Worker(ctx, p, use)
	return &balancerWorker{w.(*fakeWorker), n}, err
}

type balancerWorker struct {
	*fakeWorker
	network *balancerNetwork
}

func (w *balancerWorker) note(what string, t place.Traffic) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.network.target.asked = append(w.network.target.asked,
		fmt.Sprintf("%d: %s %s %s, %d connections", w.network.balancer().Backends, w.place, what, t.Address, t.Workload.Traffic().Connections))
}

func (w *balancerWorker) Serve(ctx context.Context, t place.Traffic, ready place.Ready) (record.Endpoint, error) {
	w.note("serves "+t.Workload.Name+" at", t)
	return w.fakeWorker.Serve(ctx, t, func(uint16) (time.Time, error) { return ready(t.Address.Port()) })
}

func (w *balancerWorker) Drive(_ context.Context, t place.Traffic, ready place.Ready, _ func(uint64, uint64)) (record.Endpoint, error) {
	w.note("drives "+t.Workload.Name+" to", t)
	_, err := ready(0)
	return record.Endpoint{Place: t.Place, Seconds: 1, Messages: 10}, err
}

func (w *balancerWorker) Describe(context.Context, place.Place) (record.Node, error) {
	return record.Node{Name: w.place, Boot: "one", Links: []record.Link{{Name: "eth0", Class: v1alpha1.DeviceNIC}, {Name: "lo"}}}, nil
}

func (w *balancerWorker) Sample(_ context.Context, s place.Sampling, ready place.Ready) (record.Sample, error) {
	_, err := ready(0)
	var host *record.Host
	if s.CPUs {
		host = &record.Host{Boot: "one", Seconds: 2, CPUs: []record.CPU{{ID: 0, Busy: 0.5}, {ID: 1, Busy: 1.9}}}
	}
	devices := []record.Device{{Place: s.Place, Name: "eth0", RxBytes: 1e6, TxBytes: 2e6}, {Place: s.Place, Name: "lo", RxBytes: 1e9}}
	return record.Sample{Host: host, Devices: devices}, err
}

// Clients connect to the proxy, each pair at a port of its own. The backends of a pair
// listen at that port, each for its share of the long-lived connections. The record
// has every backend, their sum, and the load of every node.
func TestBalancerTrial(t *testing.T) {
	b := &balancerTarget{fakeTarget: newFake(0)}
	out := new(memory)
	r, err := Start(t.Context(), b.plan(balancers(t)), b, nil, "test", nil, func(Event) {})
	if err != nil {
		t.Fatal(err)
	}
	trials, err := r.Measure(t.Context(), out)
	if closeErr := r.Close(); err != nil || closeErr != nil {
		t.Fatal(err, closeErr)
	}
	slices.Sort(b.asked)
	if diff := cmp.Diff([]string{
		"1: node0 drives bulk to 192.0.2.1:7000, 4 connections",
		"1: node0 drives bulk to 192.0.2.1:7001, 4 connections",
		"1: node0 drives new to 192.0.2.1:7000, 3 connections",
		"1: node2 serves bulk at 192.0.2.2:7000, 4 connections",
		"1: node2 serves bulk at 192.0.2.2:7001, 4 connections",
		"1: node2 serves new at 192.0.2.2:7000, 3 connections",
		"2: node0 drives bulk to 192.0.2.1:7000, 4 connections",
		"2: node0 drives bulk to 192.0.2.1:7001, 4 connections",
		"2: node0 drives new to 192.0.2.1:7000, 3 connections",
		"2: node2 serves bulk at 192.0.2.2:7000, 2 connections",
		"2: node2 serves bulk at 192.0.2.2:7001, 2 connections",
		"2: node2 serves new at 192.0.2.2:7000, 3 connections",
		"2: node3 serves bulk at 192.0.2.3:7000, 2 connections",
		"2: node3 serves bulk at 192.0.2.3:7001, 2 connections",
		"2: node3 serves new at 192.0.2.3:7000, 3 connections",
	}, b.asked); diff != "" {
		t.Errorf("ends (-want +got):\n%s", diff)
	}
	for _, tr := range trials {
		if tr.Status != record.StatusOK {
			t.Fatalf("trial failed: %s", tr.Error)
		}
		backends := map[string]int{"one": 1, "two": 2}[tr.Variant]
		var loads []record.Load
		for i, role := range []string{"client", "proxy", "backend", "backend"}[:2+backends] {
			loads = append(loads, record.Load{
				Node: fmt.Sprintf("node%d", i), Role: role, Receive: 4e6, Send: 8e6, Rate: 1e9, Core: i % 2, Busy: []float64{0.25, 0.95}[i%2], Shared: true,
			})
		}
		if diff := cmp.Diff(loads, tr.Loads); diff != "" {
			t.Errorf("loads of %s (-want +got):\n%s", tr.Variant, diff)
		}
		if tr.Workload != "bulk" {
			continue
		}
		if got, want := tr.Metrics[metrics.Throughput], 8e9*2*float64(backends); got != want {
			t.Errorf("%s: throughput %g, want %g", tr.Variant, got, want)
		}
		for _, p := range tr.PerPair {
			if len(p.Backends) != backends || p.Server.Bytes != uint64(backends)*1e9 || p.Server.Seconds != 1 {
				t.Errorf("%s: %d backends, together %+v", tr.Variant, len(p.Backends), p.Server)
			}
		}
	}
}
