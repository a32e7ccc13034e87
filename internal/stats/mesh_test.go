package stats

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// simulatedMesh simulates n nodes. A link has a throughput of 1 Gbit/s, times the effects of faults, times the nature of
// its nodes, times noise.
type simulatedMesh struct {
	nodes, blocks int
	// fault is the remaining share of a link's throughput. If nil, it is 1.
	fault func(client, server int) float64
	// once is the remaining share of a link's throughput in block 1 only. If nil, it is 1.
	once func(client, server int) float64
	// later is the remaining share of a link's throughput after block 1. If nil, it is 1.
	later func(client, server int) float64
	// noisy is the number of links with ten times the noise in every block.
	noisy int
	// nature is the standard deviation of the logs of nodes.
	nature float64
	noise  func(r *rand.Rand) float64
	// loss is the share of segments that a link loses. If nil, no link loses any.
	loss func(client, server int) float64
}

// run returns the mesh of the throughput. It fails the test if another mesh has outliers.
func (s simulatedMesh) run(t *testing.T, r *rand.Rand) Mesh {
	t.Helper()
	all := s.meshes(t, r)
	for _, m := range all[1:] {
		if len(m.Outliers) > 0 {
			t.Fatalf("%s has outliers: %+v", m.Metric, m.Outliers)
		}
	}
	return all[0]
}

func (s simulatedMesh) meshes(t *testing.T, r *rand.Rand) []Mesh {
	t.Helper()
	exp := experiment("mesh")
	exp.Spec.Target = spec.Target{Lab: &spec.Lab{Nodes: s.nodes}}
	exp.Spec.Workloads[0].Stream.Tool, exp.Spec.Workloads[0].Stream.Protocol = spec.ToolNative, "tcp"
	exp.Spec.Mesh = &spec.Mesh{Margin: 0.1}
	own := make([]float64, s.nodes)
	for i := range own {
		own[i] = s.nature * r.NormFloat64()
	}
	var trials []record.Trial
	for b := 1; b <= s.blocks; b++ {
		for from := range s.nodes {
			tr := record.Trial{
				Block: b, Round: from + 1, Order: len(trials) + 1, Attempt: 1, Status: record.StatusOK,
				Variant: "mesh", Workload: "stream", Pairs: s.nodes / 2, Metrics: map[string]float64{metrics.Throughput: 1e9},
			}
			for to := range s.nodes {
				if from == to {
					continue
				}
				noise := s.noise(r)
				if (from*s.nodes+to)%7 == 3 && (from*s.nodes+to)/7 < s.noisy {
					noise *= 10
				}
				bits := 1e9 * math.Exp(own[from]+own[to]+noise)
				if s.fault != nil {
					bits *= s.fault(from, to)
				}
				if s.once != nil && b == 1 {
					bits *= s.once(from, to)
				}
				if s.later != nil && b > 1 {
					bits *= s.later(from, to)
				}
				p := record.Pair{Client: record.Endpoint{Place: fmt.Sprintf("node%d/pod0", from)}, Server: record.Endpoint{Place: fmt.Sprintf("node%d/pod0", to), BitsPerSecond: bits}}
				if bits == 0 {
					p.Error = "broken"
				}
				if s.loss != nil {
					const segments = 1700 // 200 ms at 100 Mbit/s
					p.Client.Bytes = segments * record.SegmentBytes
					for range segments {
						if r.Float64() < s.loss(from, to) {
							p.Client.Retransmits++
						}
					}
				}
				tr.PerPair = append(tr.PerPair, p)
			}
			trials = append(trials, tr)
		}
	}
	s2, err := Analyze(exp, trials)
	if err != nil {
		t.Fatal(err)
	}
	if len(s2.Meshes) != 3 {
		t.Fatalf("%d meshes", len(s2.Meshes))
	}
	return s2.Meshes
}

// names returns the outliers: "sends 3", "receives 3", "3→4".
func names(m Mesh) (all []string) {
	for _, o := range m.Outliers {
		switch o.Kind {
		case OutlierClient:
			all = append(all, o.Client+" sends")
		case OutlierServer:
			all = append(all, o.Server+" receives")
		default:
			all = append(all, o.Client+" → "+o.Server)
		}
	}
	return all
}

func gaussian(sd float64) func(*rand.Rand) float64 {
	return func(r *rand.Rand) float64 { return normal(sd)(r, 0, 0) }
}

// slow returns the remaining share of a link with a bad client or server.
func slow(client, server bool, share float64) float64 {
	if client || server {
		return share
	}
	return 1
}

func TestMeshNamesWhatIsBad(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		nodes  int
		blocks int
		fault  func(client, server int) float64
		want   []string
	}{
		{"a node at half rate", 12, 5, func(a, b int) float64 { return slow(a == 3, b == 3, 0.5) }, []string{"node3 sends", "node3 receives"}},
		{"a node that receives slowly, of four", 4, 5, func(_, b int) float64 { return slow(false, b == 2, 0.6) }, []string{"node2 receives"}},
		{"two nodes at half rate, whose link is no outlier", 8, 5, func(a, b int) float64 { return slow(a < 2, b < 2, 0.5) },
			[]string{"node0 sends", "node0 receives", "node1 sends", "node1 receives"}},
		{"a link", 12, 5, func(a, b int) float64 { return slow(a == 10 && b == 2, false, 0.4) }, []string{"node10 → node2"}},
		{"a link of four nodes", 4, 5, func(a, b int) float64 { return slow(a == 1 && b == 2, false, 0.4) }, []string{"node1 → node2"}},
		{"a node and a link of others", 12, 3, func(a, b int) float64 { return slow(a == 3, b == 3, 0.5) * slow(a == 5 && b == 6, false, 0.3) },
			[]string{"node3 sends", "node3 receives", "node5 → node6"}},
		{"a node that is dead", 5, 3, func(a, b int) float64 { return slow(a == 4, b == 4, 0) }, []string{"node4 sends", "node4 receives"}},
		{"a link that is dead", 5, 3, func(a, b int) float64 { return slow(a == 4 && b == 0, false, 0) }, []string{"node4 → node0"}},
		{"a link that is better", 8, 5, func(a, b int) float64 { return slow(a == 1 && b == 0, false, 2) }, nil},
		{"half of the nodes are another kind", 8, 5, func(a, b int) float64 { return slow(a < 4, b < 4, 0.5) }, nil},
		{"a node within the margin", 8, 5, func(a, b int) float64 { return slow(a == 1, b == 1, 0.95) }, nil},
		{"too few nodes to tell", 3, 5, func(a, b int) float64 { return slow(a == 1, b == 1, 0.5) }, nil},
		{"one block", 6, 1, func(a, b int) float64 { return slow(a == 1, b == 1, 0.5) }, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			m := simulatedMesh{nodes: c.nodes, blocks: c.blocks, fault: c.fault, noise: gaussian(0.02)}.run(t, rand.New(rand.NewPCG(1, 1)))
			got := names(m)
			slices.Sort(got)
			slices.Sort(c.want)
			if !slices.Equal(got, c.want) {
				t.Errorf("named %q, want %q", got, c.want)
			}
			if (m.Untested != "") != (c.nodes < 4 || c.blocks < 2) {
				t.Errorf("untested: %q", m.Untested)
			}
			for _, o := range m.Outliers {
				truth := 0.5
				switch {
				case o.Failed > 0:
					continue
				case o.Kind == OutlierLink:
					truth = math.Min(c.fault(10, 2), math.Min(c.fault(1, 2), c.fault(5, 6)))
				case o.Server == "node2":
					truth = 0.6
				}
				if o.CI95[0] > o.Ratio || o.Ratio > o.CI95[1] || math.Abs(o.Ratio/truth-1) > 0.1 {
					t.Errorf("%+v, truth is %.1f", o, truth)
				}
			}
		})
	}
}

// TestMeshNamesWhatFailedInMostBlocks: a node or link that worked only in the first block is named. One that failed only in
// the first block is not.
func TestMeshNamesWhatFailedInMostBlocks(t *testing.T) {
	node := func(a, b int) float64 { return slow(a == 1, b == 1, 0) }
	link := func(a, b int) float64 { return slow(a == 2 && b == 3, false, 0) }
	for want, s := range map[string]simulatedMesh{
		"node1 sends, node1 receives": {later: node}, "node2 → node3": {later: link}, "": {once: node},
	} {
		s.nodes, s.blocks, s.noise = 6, 4, gaussian(0.02)
		m := s.run(t, rand.New(rand.NewPCG(1, 1)))
		if got := strings.Join(names(m), ", "); got != want {
			t.Errorf("named %q, want %q", got, want)
		}
		for _, o := range m.Outliers {
			if o.N != 1 || o.Failed != 3 {
				t.Errorf("%+v, want 1 block that was good and 3 that failed", o)
			}
		}
	}
}

// TestMeshForgivesOneBlock: a link with one bad block of several is not named.
func TestMeshForgivesOneBlock(t *testing.T) {
	m := simulatedMesh{nodes: 8, blocks: 5, noise: gaussian(0.01), once: func(a, b int) float64 {
		if a == 1 && b == 2 {
			return 0.1
		}
		return 1
	}}.run(t, rand.New(rand.NewPCG(1, 1)))
	if got := names(m); got != nil {
		t.Errorf("named %q", got)
	}
}

// TestMeshNamesWhatLosesPackets: a link that loses packets is named for its retransmissions, whatever its throughput.
// Losses that all links share are not named, nor are few losses.
func TestMeshNamesWhatLosesPackets(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		want string
		loss func(client, server int) float64
	}{
		{"node1 → node2", func(a, b int) float64 { return 0.1*(1-slow(a == 1 && b == 2, false, 0)) + 0.002 }},
		{"node3 → node0", func(a, b int) float64 { return 0.01 * (1 - slow(a == 3 && b == 0, false, 0)) }},
		{"node4 sends, node4 receives", func(a, b int) float64 { return 0.05 * (1 - slow(a == 4, b == 4, 0)) }},
		{"", func(int, int) float64 { return 0.02 }},
		{"", func(a, b int) float64 { return 0.001 * (1 - slow(a == 1 && b == 2, false, 0)) }},
	} {
		m := simulatedMesh{nodes: 6, blocks: 3, noise: gaussian(0.02), loss: c.loss}.meshes(t, rand.New(rand.NewPCG(1, 1)))[2]
		if got := strings.Join(names(m), ", "); got != c.want {
			t.Errorf("named %q, want %q", got, c.want)
		}
		for _, l := range m.Links {
			for i := range 6 {
				for j := range 6 {
					if l.Client == m.Nodes[i] && l.Server == m.Nodes[j] && math.Abs(l.Mean-c.loss(i, j)) > 0.003+0.2*c.loss(i, j) {
						t.Errorf("%+v, truth is %.4f", l, c.loss(i, j))
					}
				}
			}
		}
	}
}

// TestCoverageMesh: of healthy meshes, with links of any noise, at most one in twenty has anything named.
func TestCoverageMesh(t *testing.T) {
	t.Parallel()
	tails := func(r *rand.Rand) float64 { return heavy(0.05)(r, 0, 0) }
	hit := func(r *rand.Rand) float64 { return disturbed(0.02, 0)(r, 0, 0) }
	for i, c := range []struct {
		name string
		mesh simulatedMesh
	}{
		{"12 nodes, 6 blocks, log-normal noise, SD 2%", simulatedMesh{nodes: 12, blocks: 6, noise: gaussian(0.02)}},
		{"12 nodes, 6 blocks, log-normal noise, SD 20%", simulatedMesh{nodes: 12, blocks: 6, noise: gaussian(0.2)}},
		{"12 nodes, 6 blocks, heavy tails", simulatedMesh{nodes: 12, blocks: 6, noise: tails}},
		{"12 nodes, 6 blocks, 1 link in 20 loses 10–50%", simulatedMesh{nodes: 12, blocks: 6, noise: hit}},
		{"12 nodes, 6 blocks, 7 links with SD 30%, others 3%", simulatedMesh{nodes: 12, blocks: 6, noise: gaussian(0.03), noisy: 7}},
		{"12 nodes that differ by 10% (SD), noise of 5%", simulatedMesh{nodes: 12, blocks: 6, nature: 0.1, noise: gaussian(0.05)}},
		{"12 nodes, 3 blocks, log-normal noise, SD 20%", simulatedMesh{nodes: 12, blocks: 3, noise: gaussian(0.2)}},
		{"4 nodes, 6 blocks, log-normal noise, SD 20%", simulatedMesh{nodes: 4, blocks: 6, noise: gaussian(0.2)}},
		{"4 nodes, 6 blocks, 1 link in 20 loses 10–50%", simulatedMesh{nodes: 4, blocks: 6, noise: hit}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(6, uint64(i)))
			wrong, n := 0, *simulated/10 // an experiment has hundreds of trials
			for range n {
				if got := names(c.mesh.run(t, r)); got != nil {
					wrong++
				}
			}
			share := float64(wrong) / float64(n)
			shown(t, "results/method.md", fmt.Sprintf("| %s: anything named | %.1f%% |", c.name, 100*share))
			if share > 0.05+3*standardError(float64(n)) {
				t.Errorf("in %.1f%% of healthy meshes something is named", 100*share)
			}
		})
	}
}
