package report

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/testenv/golden"
)

// meshResult is a mesh of six nodes. node2 receives slowly, its virtual function is idle, and its NIC lacks
// an offload. The link node3 → node4 loses packets and is slow, node4 → node1 loses some, and node5 is dead.
func meshResult(t *testing.T) *Model {
	t.Helper()
	const nodes = 6
	exp := &spec.Experiment{
		APIVersion: v1alpha1.APIVersion, Kind: spec.KindExperiment, Metadata: spec.Metadata{Name: "mesh"},
		Spec: spec.Spec{
			Target: spec.Target{Lab: &spec.Lab{Nodes: nodes}}, Path: spec.Path{Native: &spec.Plain{}}, Baseline: "nodes", Margin: 0.02,
			Runs: spec.Runs{N: 5}, Mesh: &spec.Mesh{Margin: 0.1}, Variants: []spec.Variant{{Name: "nodes"}},
			Workloads: []spec.Workload{{Name: "stream", Stream: &spec.Traffic{Protocol: "tcp", Tool: spec.ToolNative, Connections: 1, Duration: spec.Duration(time.Second)}}},
		},
	}
	env := record.Environment{Version: "v1"}
	for i := range nodes {
		link := record.Link{Name: "eth0", Kind: "device", Class: v1alpha1.DeviceNIC, MTU: 1500, Offloads: []string{"rx-gro", "tx-tcp-segmentation"}}
		if i == 2 {
			link.Offloads = link.Offloads[1:]
		}
		env.Nodes = append(env.Nodes, record.Node{Name: fmt.Sprintf("node%d", i), Boot: fmt.Sprint(i), Links: []record.Link{link}})
	}
	r := rand.New(rand.NewPCG(3, 4))
	var trials []record.Trial
	for block := range 5 {
		for round := range 2 * (nodes - 1) { // two for each distance from client to server
			tr := record.Trial{Block: block + 1, Round: round + 1, Order: len(trials) + 1, Attempt: 1, Variant: "nodes", Workload: "stream", Pairs: nodes / 2, Window: 1, Status: record.StatusOK, Metrics: map[string]float64{metrics.Throughput: 1e9}}
			for i := range nodes / 2 {
				from := round%2*nodes/2 + i
				to := (from + round/2 + 1) % nodes
				p := record.Pair{Client: record.Endpoint{Place: fmt.Sprintf("node%d", from), Bytes: 12e7}, Server: record.Endpoint{Place: fmt.Sprintf("node%d", to)}}
				p.Server.BitsPerSecond = 1e9 * (1 + 0.01*r.NormFloat64())
				switch {
				case from == 5 || to == 5:
					p.Server.BitsPerSecond, p.Error = 0, "node5 (sample) was not ready after 10s"
				case to == 2:
					p.Server.BitsPerSecond *= 0.62
				case from == 0 && to == 1 && block == 0:
					p.Server.BitsPerSecond, p.Error = 0, "connection reset"
				case from == 3 && to == 4:
					p.Server.BitsPerSecond *= 0.4
					p.Client.Retransmits = 1000
				case from == 4 && to == 1:
					p.Client.Retransmits = 500
				}
				tr.PerPair = append(tr.PerPair, p)
			}
			for i := range nodes {
				u := record.VFUse{Place: fmt.Sprintf("node%d", i), NIC: "eth0", VF: "eth1", Up: true, RxPackets: 1000, TxPackets: 1000, VFRxPackets: 1000, VFTxPackets: 1000}
				if i == 2 {
					u.VFRxPackets, u.VFTxPackets = 0, 0
				}
				tr.VFs = append(tr.VFs, u)
			}
			trials = append(trials, tr)
		}
	}
	summary, err := stats.Analyze(exp, trials)
	if err != nil {
		t.Fatal(err)
	}
	return New(exp, summary, trials, env)
}

func TestMesh(t *testing.T) {
	m := meshResult(t)
	said := strings.Join(m.conclusion, "\n")
	for _, want := range []string{
		"node2 receives at 0.6", ") of the others; its VF is idle; its eth0 lacks rx-gro, which others have.",
		"node3 → node4 has 0.4", "TCP retransmits 1.19% of its segments, elsewhere 0.02",
		"TCP retransmits 0.600% of the segments from node4 to node1, elsewhere 0.04",
		"node5 failed in every block: node5 (sample) was not ready after 10s.",
		"node0 → node1 failed in 1 of 5 blocks.",
	} {
		if !strings.Contains(said, want) {
			t.Errorf("the report does not say %q:\n%s", want, said)
		}
	}
	if m.Headline != m.Meshes[0].Sentences[0] {
		t.Errorf("the headline is %q", m.Headline)
	}
	for ending, write := range writers() {
		if ending == "html" || ending == "json" {
			continue // as in the other golden files
		}
		t.Run(ending, func(t *testing.T) { golden.Compare(t, "testdata/mesh."+ending, render(t, write, m)) })
	}
	page := render(t, HTML, m)
	for _, want := range []string{`<a href="#mesh">`, `class="num shade4 named" title="node3 → node2: 0.6`, `>failed</td>`} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not have %s", want)
		}
	}
}
