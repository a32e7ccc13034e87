package report

import (
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

// fixture makes the results of an experiment, for the tests of the writers. It draws random
// numbers from a fixed seed.
type fixture struct {
	tb      testing.TB
	exp     *spec.Experiment
	env     record.Environment
	trials  []record.Trial
	blocks  int
	cpus    int
	samples int // messages per trial
}

func accelerated(name string, devices ...string) spec.Variant {
	v := spec.Variant{Name: name}
	if name[:3] == "rfs" {
		v.Accelerate = []v1alpha1.Accelerator{{RFS: &v1alpha1.RFS{Devices: devices, CPUs: v1alpha1.CPUsAll}}}
	} else {
		v.Accelerate = []v1alpha1.Accelerator{{RPS: &v1alpha1.RPS{Devices: devices, CPUs: v1alpha1.CPUsAll}}}
	}
	return v
}

// demo returns the experiment with its trials, which a test may change. They are made once, because compressing their series
// and histograms takes longer than most tests.
func demo(tb testing.TB) *fixture {
	madeDemo.Do(func() { demoTrials = demoExperiment().run(tb).trials })
	f := demoExperiment()
	f.tb, f.trials = tb, slices.Clone(demoTrials)
	for i := range f.trials {
		t := &f.trials[i]
		t.Metrics, t.Series, t.Hosts = maps.Clone(t.Metrics), maps.Clone(t.Series), slices.Clone(t.Hosts)
		for j := range t.Hosts {
			t.Hosts[j].CPUs = slices.Clone(t.Hosts[j].CPUs)
		}
	}
	return f
}

var (
	madeDemo   sync.Once
	demoTrials []record.Trial
)

// demoExperiment returns an experiment without trials.
func demoExperiment() *fixture {
	host := []string{v1alpha1.DeviceNIC, v1alpha1.DeviceOverlay, v1alpha1.DeviceHostVeth}
	plus := append(slices.Clone(host), v1alpha1.DevicePod)
	f := &fixture{
		exp: &spec.Experiment{
			APIVersion: v1alpha1.APIVersion, Kind: spec.KindExperiment,
			Metadata: spec.Metadata{Name: "demo", Description: "What a VXLAN overlay costs on this machine, and what RPS and RFS give back."},
			Spec: spec.Spec{
				Target:   spec.Target{Lab: &spec.Lab{Nodes: 2}},
				Path:     spec.Path{VXLAN: &spec.VXLAN{Shape: spec.ShapeFlannel}},
				Baseline: "vxlan",
				Variants: []spec.Variant{
					{Name: "native", Path: &spec.Path{Native: &spec.Plain{}}},
					{Name: "vxlan"},
					accelerated("rps", host...), accelerated("rps+", plus...),
					accelerated("rfs", host...), accelerated("rfs+", plus...),
				},
				Workloads: []spec.Workload{
					{Name: "stream", Stream: &spec.Traffic{Protocol: "tcp", Size: 131072, Connections: 1, Duration: spec.Duration(2 * time.Second)}},
					{Name: "pingpong", PingPong: &spec.Traffic{Protocol: "tcp", Size: 64, Duration: spec.Duration(time.Second)}},
				},
				Pairs: []int{1, 4}, Margin: 0.02,
			},
		},
		env: record.Environment{
			Version: "0.1.0", Started: time.Date(2026, 9, 1, 8, 30, 0, 0, time.UTC),
			Command:   "slipstream run demo --set spec.seed=17",
			Placement: "Both nodes share CPUs 0-1: softirq work of one can run beside the other's processes.",
		},
		blocks: 6, cpus: 2, samples: 4000,
	}
	for _, name := range []string{"node0", "node1"} {
		f.env.Nodes = append(f.env.Nodes, record.Node{
			Name: name, Boot: "b0", Kernel: "6.12.41", Arch: "x86_64", Distribution: "Debian GNU/Linux 12 (bookworm)",
			CPUModel: "AMD EPYC 7R13", CPUs: "0-1", MemoryByte: 8 << 30, Governor: "performance", Clock: "tsc", Hypervisor: true,
			Sysctls: map[string]string{"net.core.rps_sock_flow_entries": "0", "net.ipv4.tcp_congestion_control": "cubic"},
			Tools:   map[string]string{"iperf3": "3.12"},
			Links: []record.Link{
				{Name: "eth0", Kind: "veth", Class: "nic", MTU: 1500, RxQueues: 1, TxQueues: 1, Offloads: []string{"tso", "gro"}, RPS: []string{"0"}, RFS: []string{"0"}},
				{Name: "flannel.1", Kind: "vxlan", Class: "overlay", MTU: 1450, RxQueues: 1, TxQueues: 1, Offloads: []string{"tso", "gro"}, RPS: []string{"0"}, RFS: []string{"0"}},
			},
		})
	}
	return f
}

// published is as large as the experiment of the paper: 7 variants × 5 numbers of pairs × 20
// blocks, with a latency histogram in every trial. With -short the machine has few CPUs: compressing the series of many
// takes minutes with the race detector.
func published(tb testing.TB, cpus int) *fixture {
	if testing.Short() {
		cpus = min(cpus, 2)
	}
	f := demoExperiment()
	f.exp.Metadata.Name = "rps-rfs"
	f.exp.Spec.Baseline = "baseline"
	f.exp.Spec.Variants = []spec.Variant{{Name: "baseline"},
		accelerated("rps", "nic"), accelerated("rps-7", "nic"), accelerated("rfs", "nic"),
		accelerated("rps+", "nic", "pod"), accelerated("rps-7+", "nic", "pod"), accelerated("rfs+", "nic", "pod")}
	f.exp.Spec.Pairs = []int{1, 2, 4, 8, 16}
	f.blocks, f.cpus, f.samples = 20, cpus, 300
	return f.run(tb)
}

// effect returns the true factor of a variant on throughput.
func effect(i, pairs int) float64 {
	gains := []float64{1, 1.09, 1.22, 0.93, 1.31, 1.005, 1.15}
	return 1 + (gains[i%len(gains)]-1)*math.Sqrt(float64(pairs)/4)
}

func (f *fixture) run(tb testing.TB) *fixture {
	tb.Helper()
	f.tb = tb
	r := rand.New(rand.NewPCG(1, 2))
	f.trials = nil
	for block := 1; block <= f.blocks; block++ {
		for _, w := range f.exp.Spec.Workloads {
			for _, p := range (&Model{exp: f.exp}).pairsOf(w) {
				accelerated := 0
				for _, v := range f.exp.Spec.Variants {
					factor := 1.0
					switch {
					case v.Path != nil && v.Path.Native != nil:
						factor = 2.38
					case len(v.Accelerate) > 0:
						accelerated++
						factor = effect(accelerated, p)
					}
					f.trials = append(f.trials, f.trial(tb, r, block, v.Name, w, p, factor))
				}
			}
		}
	}
	return f
}

func (f *fixture) trial(tb testing.TB, r *rand.Rand, block int, variant string, w spec.Workload, p int, factor float64) record.Trial {
	tb.Helper()
	noise := math.Exp(0.015 * r.NormFloat64())
	t := record.Trial{
		Block: block, Order: len(f.trials) + 1, Variant: variant, Workload: w.Name, Pairs: p, Attempt: 1,
		Window: 2, Status: record.StatusOK, Metrics: map[string]float64{},
	}
	if w.Stream != nil {
		t.Metrics[metrics.Throughput] = 11.8e9 * math.Pow(float64(p), 0.12) * factor * noise
		t.Metrics[metrics.CPUPerGB] = 1.21 / factor / noise
		t.Metrics[metrics.SoftirqPerGB] = 0.43 / factor / noise
	} else {
		h := record.NewHistogram()
		for range f.samples {
			us := 24 * math.Sqrt(float64(p)) / factor * math.Exp(0.18*r.NormFloat64())
			if r.Float64() < 0.01 {
				us *= 4 * math.Exp(0.5*r.NormFloat64())
			}
			if err := h.RecordValue(int64(us * noise * 1e3)); err != nil {
				tb.Fatal(err)
			}
		}
		text, err := record.EncodeHistogram(h)
		if err != nil {
			tb.Fatal(err)
		}
		t.Latency = text
		t.Metrics[metrics.Rate] = float64(p) / (h.Mean() / 1e9)
		for metric, percentile := range map[string]float64{metrics.LatencyP50: 50, metrics.LatencyP99: 99, metrics.LatencyP999: 99.9} {
			t.Metrics[metric] = float64(h.ValueAtPercentile(percentile)) / 1e9
		}
	}
	host := record.Host{Boot: "b0", Nodes: []string{"node0", "node1"}, Seconds: 2, Source: record.SoftirqEBPF}
	for id := range f.cpus {
		spread := 1.0
		if id > 0 {
			spread = min(1, 0.25*float64(p)*factor/math.Sqrt(float64(id)))
		}
		c := record.CPU{ID: id, Softirq: 0.84 * spread * noise, Steal: 0.01, IRQ: 0.004, Interrupts: 40_000 / uint64(id+1)}
		c.Busy = min(2, c.Softirq+c.Steal+c.IRQ+0.9*spread*(0.8+0.4*r.Float64()))
		host.CPUs = append(host.CPUs, c)
	}
	t.Hosts = []record.Host{host}
	t.Series = series(host, t.Order, max(t.Metrics[metrics.Throughput], 1e8))
	return t
}

// series returns the series of two nodes that share a machine. Their NICs carry a rate with a dip
// in the middle.
func series(host record.Host, seed int, rate float64) map[string]string {
	r := rand.New(rand.NewPCG(uint64(seed), 3))
	sender := record.Series{At: []int64{0}, NICs: []record.NICSeries{{Name: "eth0"}}}
	readings := int(host.Seconds * 10)
	for i := range readings {
		sender.At = append(sender.At, int64(i+1)*100_000+r.Int64N(200))
		v := rate * (1 + 0.04*r.NormFloat64())
		if i == readings/2 {
			v /= 3
		}
		sender.NICs[0].Tx = append(sender.NICs[0].Tx, uint64(v/80))
		sender.NICs[0].Rx = append(sender.NICs[0].Rx, uint64(v/8000))
	}
	receiver := sender
	receiver.NICs = []record.NICSeries{{Name: "eth0", Rx: sender.NICs[0].Tx, Tx: sender.NICs[0].Rx}}
	for _, cpu := range host.CPUs {
		c := record.CPUSeries{ID: cpu.ID}
		for range readings {
			busy := min(10, uint64(10*cpu.Busy/host.Seconds+r.Float64()))
			c.Idle = append(c.Idle, 10-busy)
			c.Softirq = append(c.Softirq, min(busy, uint64(10*cpu.Softirq/host.Seconds+r.Float64())))
		}
		sender.CPUs = append(sender.CPUs, c)
	}
	return map[string]string{"node0": record.EncodeSeries(sender), "node1": record.EncodeSeries(receiver)}
}

func (f *fixture) model() *Model { return New(f.exp, f.summary(), f.trials, f.env) }

// summary analyzes the trials. It returns one shared summary, so a change is visible to every
// caller.
func (f *fixture) summary() *stats.Summary {
	f.exp.Spec.Runs.N = f.blocks
	s, err := stats.Analyze(f.exp, f.trials)
	if err != nil {
		f.tb.Fatal(err)
	}
	return s
}

// warn adds a warning to every row that pick chooses.
func warn(s *stats.Summary, w record.Warning, pick func(stats.Row) bool) {
	for i := range s.Rows {
		if pick(s.Rows[i]) {
			s.Rows[i].Warnings = append(s.Rows[i].Warnings, w)
		}
	}
}
