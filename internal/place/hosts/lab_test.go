//go:build linux

package hosts_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/hosts"
	"slipstream.dev/internal/place/lab"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/topology"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/worker"
)

// besideLab measures between the two nodes of a lab twice: with the lab's own workers, and with workers over SSH. Throughput
// varies by a sixth from block to block, so with fewer blocks the interval would be wider than the margin. These take a quarter
// of an hour.
const besideLab = `apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: beside-lab}
spec:
  target:
    hosts:
    - {name: node0, labels: {by: lab}}
    - {name: node1, labels: {by: lab}}
    - {name: a, address: 10.9.0.1, user: root, labels: {by: ssh}, addresses: {native: 198.18.0.1}}
    - {name: b, address: 10.9.0.2, user: root, labels: {by: ssh}, addresses: {native: 198.18.0.2}}
  baseline: lab
  margin: 0.03
  variants:
  - {name: lab, hosts: {client: {by: lab}, server: {by: lab}}}
  - {name: ssh, hosts: {client: {by: ssh}, server: {by: ssh}}}
  workloads:
  - {name: stream, stream: {warmup: 200ms, duration: 500ms}}
  - {name: pingpong, pingpong: {warmup: 200ms, duration: 500ms}}
  runs: 300
`

// twice is a lab with both kinds of workers.
type twice struct {
	*topology.Topology
	lab   *lab.Lab
	hosts *hosts.Hosts
}

func (b *twice) Network(_ context.Context, fabric int) (experiment.Network, error) {
	return &twiceNetwork{twice: b, Assignment: b.Assign(fabric, append(b.hosts.Places(), b.nodes()...))}, nil
}

// nodes returns the nodes of the lab. If they share CPUs, each gets one of its own, as the pods of a pair do: the scheduler
// would choose at random.
func (b *twice) nodes() []place.Place {
	nodes := b.lab.Places()
	for i, p := range nodes {
		if p.Shared {
			nodes[i].Affinity = fmt.Sprint(p.Cores[i%len(p.Cores)])
		}
	}
	return nodes
}

type twiceNetwork struct {
	*twice
	*topology.Assignment
}

func (n *twiceNetwork) Places() []place.Place { return n.Assignment.Places() }
func (n *twiceNetwork) Setup() place.Setup    { return place.Setup{Lead: n.hosts.Lead()} }
func (n *twiceNetwork) Await(ctx context.Context, patient bool) error {
	return n.hosts.Await(ctx, patient)
}
func (n *twiceNetwork) Close(context.Context) error { return nil } // both are the benchmark's

func (n *twiceNetwork) Worker(ctx context.Context, p place.Place, use place.Use) (experiment.Worker, error) {
	if strings.HasPrefix(p.Name, "node") {
		return worker.Spawn(ctx, n.lab.In(p), os.Stderr)
	}
	return n.hosts.Worker(ctx, p, use)
}

// kept keeps no trial: a run returns them.
type kept struct{}

func (kept) Append(record.Trial) error      { return nil }
func (kept) Switched(string) error          { return nil }
func (kept) Wanted() (record.Wanted, error) { return record.WantedOn, nil }

// BenchmarkBesideLab measures between two nodes of a lab, in every block once with workers over SSH and once with the lab's
// own. The results must agree.
func BenchmarkBesideLab(b *testing.B) {
	w := newController(b)
	exp, err := spec.Parse("beside-lab.yaml", []byte(besideLab), nil)
	must(b, err)
	l, err := lab.Up(b.Context(), lab.Config{
		Name: "beside-ssh", Nodes: 2, NIC: spec.NIC{Offload: spec.OffloadFull, MTU: 1500}, Shape: spec.ShapeFlannel,
	}, lab.Options{})
	must(b, err)
	b.Cleanup(func() { must(b, l.Down(context.Background())) })
	both := &twice{Topology: topology.Of(exp), lab: l}
	var nodes []*node
	for i, p := range both.nodes() {
		ns, err := netns.Open(network.Path("slip-beside-ssh-n" + p.Name[len("node"):]))
		must(b, err)
		b.Cleanup(func() { ns.Close() })
		nodes = append(nodes, w.join(b, i, "to-controller", ns, l.In(p), nodeOptions{}))
	}
	w.know(b, nodes...)
	both.hosts, err = hosts.Up(b.Context(), w.config(b, hosts.Config{
		Hosts: exp.Spec.Target.Hosts[2:], Paths: fromAToB(spec.AddressNative, tcp4),
	}))
	must(b, err)
	b.Cleanup(func() { must(b, both.hosts.Close(context.Background())) })
	plan := experiment.New(exp)
	for b.Loop() {
		run, err := experiment.Start(b.Context(), plan, both, nil, "benchmark", nil, func(experiment.Event) {})
		must(b, err)
		trials, err := run.Measure(b.Context(), kept{})
		must(b, errors.Join(err, run.Close()))
		summary, err := stats.Analyze(exp, trials)
		must(b, err)
		for _, row := range summary.Rows {
			if row.Versus == nil || !row.Primary {
				continue
			}
			v := row.Versus
			b.ReportMetric(v.Ratio, row.Workload+"-ratio")
			b.ReportMetric(v.CI95[0], row.Workload+"-from")
			b.ReportMetric(v.CI95[1], row.Workload+"-to")
			b.Logf("%s: %s %.4f (%.4f to %.4f), n %d, %s", row.Workload, row.Metric, v.Ratio, v.CI95[0], v.CI95[1], v.N, v.Verdict)
			if v.Verdict != stats.Same {
				b.Errorf("%s over SSH is %s", row.Workload, v.Verdict)
			}
		}
	}
}
