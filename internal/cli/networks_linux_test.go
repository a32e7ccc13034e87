package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/testenv"
)

// TestMain makes this binary act as the program too, because a lab starts it in its places.
func TestMain(m *testing.M) {
	if len(os.Args) == 1 || strings.HasPrefix(os.Args[1], "-") {
		os.Exit(m.Run())
	}
	os.Exit(Main(context.Background(), thisProcess()))
}

func thisProcess() Process {
	return Process{Args: os.Args, Version: "test", Hurry: make(chan struct{}), Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}.plain()
}

// scriptedTarget is a lab in which each of the two nodes runs a script that changes its network to one that no path of the lab has.
type scriptedTarget struct {
	*labTarget
	script string
}

func (t scriptedTarget) Network(ctx context.Context, fabric int) (experiment.Network, error) {
	network, err := t.labTarget.Network(ctx, fabric)
	if err != nil {
		return nil, err
	}
	for _, node := range []string{"node0", "node1"} {
		code, err := network.(*labNetwork).Run(ctx, node, []string{"sh", "-c", t.script}, nil, os.Stderr, os.Stderr)
		if err == nil && code != 0 {
			err = fmt.Errorf("exit %d", code)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("change the network of %s: %w", node, err), network.Close(ctx))
		}
	}
	return network, nil
}

// benchmarkNetwork runs an experiment in a lab that a script has changed, prints what a run prints, and returns the trials. The
// result is kept in the folder of -outputdir if there is -artifacts.
func benchmarkNetwork(b *testing.B, file, script string) (trials []record.Trial) {
	testenv.NeedRoot(b)
	p := thisProcess()
	exp, err := spec.Parse(b.Name(), []byte(file), nil)
	if err != nil {
		b.Fatal(err)
	}
	resolved, err := spec.Marshal(exp)
	if err != nil {
		b.Fatal(err)
	}
	progress := newTextProgress(p)
	for b.Loop() {
		at, err := openSite(b.Context(), p, runOptions{}, exp, progress.note)
		if err != nil {
			b.Fatal(err)
		}
		at.target = scriptedTarget{at.target.(*labTarget), script}
		var result string
		err = measure(b.Context(), p, at, exp, experiment.New(exp), nil, progress, func(env record.Environment) (*record.Dir, error) {
			dir, err := record.Create(b.ArtifactDir(), exp.Metadata.Name, time.Now(), resolved, env)
			if err == nil {
				result = dir.Path
			}
			return dir, err
		})
		at.release()
		if err != nil {
			b.Fatal(err)
		}
		dir, err := record.Open(result)
		if err != nil {
			b.Fatal(err)
		}
		trials, err = dir.Trials()
		if err := errors.Join(err, dir.Close()); err != nil {
			b.Fatal(err)
		}
	}
	return trials
}

// BenchmarkFastpathSix measures what the fast path gains for IPv6 in a tunnel over IPv4: flannel and Calico use a second tunnel for
// it, over IPv6, which the fast path ignores. Give it -benchtime 1x.
func BenchmarkFastpathSix(b *testing.B) {
	benchmarkNetwork(b, `
apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: fastpath-ipv6}
spec:
  target: {lab: {nodes: 2, nic: {offload: full, mtu: 1500}}}
  path: {vxlan: {shape: flannel}}
  baseline: vxlan
  variants:
  - {name: vxlan}
  - {name: native, path: {native: {}}}
  - {name: fastpath, accelerate: [{fastpath: {}}]}
  workloads:
  - {name: stream, stream: {protocol: tcp, ip: 6, warmup: 1s, duration: 1s}}
  - {name: pingpong, pingpong: {protocol: tcp, ip: 6, size: 64, warmup: 1s, duration: 1s}}
  - {name: udp, stream: {protocol: udp, ip: 6, size: 64, warmup: 1s, duration: 1s}}
  pairs: [1, 4, 16]
  runs: 10
`, `set -e
pods=$(ip -6 route show dev flannel-v6.1 | sed -n 's/ via .*//p')
mac=$(ip neigh show dev flannel.1 | sed 's/.* lladdr \([^ ]*\).*/\1/')
ip -6 route del $pods
ip -6 neigh replace ${pods%/*} lladdr $mac dev flannel.1
ip -6 route add $pods via ${pods%/*} dev flannel.1 onlink`)
}

// BenchmarkFastpathCrossSubnet measures the fast path on nodes that reach half of each other's pods through the tunnel, and the
// other half by plain routes. With Calico's VXLANCrossSubnet, a node does so with pods of another subnet and of its own. pod0 of
// each node is behind the tunnel, pod1 is not, and so on. It also prints what each of the two ways gains. Give it -benchtime 1x.
func BenchmarkFastpathCrossSubnet(b *testing.B) {
	trials := benchmarkNetwork(b, `
apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: fastpath-crosssubnet}
spec:
  target: {lab: {nodes: 2, nic: {offload: full, mtu: 1500}}}
  path: {vxlan: {shape: calico}}
  baseline: crosssubnet
  variants:
  - {name: crosssubnet}
  - {name: native, path: {native: {}}}
  - {name: fastpath, accelerate: [{fastpath: {}}]}
  workloads:
  - {name: stream, stream: {protocol: tcp, warmup: 1s, duration: 1s}}
  - {name: pingpong, pingpong: {protocol: tcp, size: 64, warmup: 1s, duration: 1s}}
  - {name: udp, stream: {protocol: udp, size: 64, warmup: 1s, duration: 1s}}
  - {name: connect, connect: {warmup: 300ms, duration: 1s}}
  pairs: [2, 4, 16]
  runs: 20
`, `set -e
peer=$(bridge fdb show dev vxlan.calico | sed -n 's/.* dst \([0-9.]*\) .*/\1/p')
pods=$(ip -4 route show dev vxlan.calico | sed -n 's/\.0\/24 via .*//p')
for pod in $(seq 3 2 17); do ip -4 route add $pods.$pod/32 via $peer dev eth0; done`)
	fmt.Print(gainByWay(trials, "crosssubnet", "fastpath"))
}

// gainByWay compares what two variants moved per second, separately for the even pairs, which use the tunnel, and the odd ones,
// which nodes route: bytes of streams, and messages of other workloads. It returns a table of ratios with 95% intervals.
func gainByWay(trials []record.Trial, baseline, variant string) string {
	type row struct {
		workload string
		pairs    int
	}
	var rows []row
	rates := make(map[row]map[string][2]map[int]float64) // by variant, way and block
	for _, t := range trials {
		if t.Status != record.StatusOK {
			continue
		}
		r := row{t.Workload, t.Pairs}
		if rates[r] == nil {
			rows, rates[r] = append(rows, r), make(map[string][2]map[int]float64)
		}
		if _, known := rates[r][t.Variant]; !known {
			rates[r][t.Variant] = [2]map[int]float64{{}, {}}
		}
		for way := range 2 {
			rate := 0.0
			for i := way; i < len(t.PerPair); i += 2 {
				if p := t.PerPair[i]; t.Metrics[metrics.Throughput] > 0 {
					rate += float64(p.Server.Bytes) / p.Server.Seconds
				} else {
					rate += float64(p.Client.Messages) / p.Client.Seconds
				}
			}
			rates[r][t.Variant][way][t.Block] = rate
		}
	}
	slices.SortFunc(rows, func(a, b row) int {
		return cmp.Or(cmp.Compare(a.workload, b.workload), cmp.Compare(a.pairs, b.pairs))
	})
	var out strings.Builder
	fmt.Fprintf(&out, "%s relative to %s\n%-10s %5s  %-18s  %s\n", variant, baseline, "", "pairs", "by the tunnel", "routed")
	for _, r := range rows {
		fmt.Fprintf(&out, "%-10s %5d", r.workload, r.pairs)
		for way := range 2 {
			var logs []float64
			for block, rate := range rates[r][variant][way] {
				if base := rates[r][baseline][way][block]; rate > 0 && base > 0 {
					logs = append(logs, math.Log(rate/base))
				}
			}
			mean, ci95 := stats.Mean(logs)
			fmt.Fprintf(&out, "  %.2f (%.2f–%.2f)", math.Exp(mean), math.Exp(ci95[0]), math.Exp(ci95[1]))
		}
		out.WriteString("\n")
	}
	return out.String()
}
