package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
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

// sixTarget is a lab whose nodes send the IPv6 packets of pods through the tunnel for IPv4.
// flannel and Calico use a second tunnel for them, over IPv6, which the fast path ignores.
type sixTarget struct{ *labTarget }

// oneTunnel configures that on one of two nodes.
const oneTunnel = `set -e
pods=$(ip -6 route show dev flannel-v6.1 | sed -n 's/ via .*//p')
mac=$(ip neigh show dev flannel.1 | sed 's/.* lladdr \([^ ]*\).*/\1/')
ip -6 route del $pods
ip -6 neigh replace ${pods%/*} lladdr $mac dev flannel.1
ip -6 route add $pods via ${pods%/*} dev flannel.1 onlink`

func (t sixTarget) Network(ctx context.Context, fabric int) (experiment.Network, error) {
	network, err := t.labTarget.Network(ctx, fabric)
	if err != nil {
		return nil, err
	}
	for _, node := range []string{"node0", "node1"} {
		code, err := network.(*labNetwork).Run(ctx, node, []string{"sh", "-c", oneTunnel}, nil, os.Stderr, os.Stderr)
		if err == nil && code != 0 {
			err = fmt.Errorf("exit %d", code)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("one tunnel for both on %s: %w", node, err), network.Close(ctx))
		}
	}
	return network, nil
}

const sixExperiment = `
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
`

// BenchmarkFastpathSix reports what the fast path gains for IPv6 in a tunnel over IPv4, with the
// output of a run: -benchtime 1x.
func BenchmarkFastpathSix(b *testing.B) {
	testenv.NeedRoot(b)
	p := thisProcess()
	exp, err := spec.Parse("IPv6", []byte(sixExperiment), nil)
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
		at.target = sixTarget{at.target.(*labTarget)}
		err = measure(b.Context(), p, at, exp, experiment.New(exp), nil, progress, func(env record.Environment) (*record.Dir, error) {
			return record.Create(b.TempDir(), exp.Metadata.Name, time.Now(), resolved, env)
		})
		at.release()
		if err != nil {
			b.Error(err)
		}
	}
}
