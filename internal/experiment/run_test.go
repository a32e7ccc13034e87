package experiment

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/topology"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

// fakeTarget has nodes and pods in memory. It records where accelerators are applied, and fails where it is told to.
type fakeTarget struct {
	nodes    int
	topology *topology.Topology

	mu      sync.Mutex
	applied map[string]int // place → accelerators in force
	workers int            // that are open
	started int
	open    int // networks
	// fail is asked before each call of a worker. If hang returns true, the call never ends; Serve then hangs before
	// it is ready.
	fail func(call, place string) error
	hang func(call string) bool
	// hangAt is like hang, for single places; it may be nil.
	hangAt func(call, place string) bool
	all    []*fakeWorker
	// unprivileged kinds of places, as a cluster has them, and what workers were
	// started for.
	unprivileged map[place.Kind]bool
	tools        map[string]string // of every node
	busy         map[string]string // by others, on every node
	held         []string          // by others, on every node
	uses         map[place.Use]int
	// run runs the commands of switches.
	run RunCommand
	// await implements Reconnector. If it is nil, the network is no Reconnector. While the machines are away, no worker
	// can be started.
	await func(ctx context.Context, patient bool) error
	away  bool
	// drops says for how long a place drops everything within a window of 1 s; it may be nil.
	drops func(place string) time.Duration
	// takes is how long traffic takes, once everyone is ready.
	takes time.Duration
	// physicalHost runs the machine; nil if that is unknown.
	physicalHost func() string
	// slow implements Slow.
	slow error
	// apart means that each node is a machine of its own.
	apart bool
	// prepares is how long a call takes until it is ready; it may be nil.
	prepares func(call string) time.Duration
	// refuses says where no worker can be started; it may be nil.
	refuses func(place string, use place.Use) bool
	// waits means that samplers wait for the end of their window.
	waits bool
}

func newFake(nodes int) *fakeTarget {
	return &fakeTarget{nodes: nodes, applied: make(map[string]int), uses: make(map[place.Use]int), fail: func(string, string) error { return nil }, hang: func(string) bool { return false }}
}

// failing makes every call of a name fail.
func failing(name, why string) func(call, place string) error {
	return func(call, _ string) error {
		if call == name {
			return errors.New(why)
		}
		return nil
	}
}

// plan plans an experiment, and lays the target out for it.
func (f *fakeTarget) plan(exp *spec.Experiment) *Plan {
	p := New(exp)
	f.topology = p.topology
	return p
}

func (f *fakeTarget) Network(_ context.Context, fabric int) (Network, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open++
	if f.await != nil {
		return returning{&fakeNetwork{f, fabric}}, nil
	}
	return &fakeNetwork{f, fabric}, nil
}

// returning is a fakeNetwork of machines that may drop off.
type returning struct{ *fakeNetwork }

func (n returning) Await(ctx context.Context, patient bool) error { return n.await(ctx, patient) }

type fakeNetwork struct {
	*fakeTarget
	fabric int
}

func (n *fakeNetwork) Slow(context.Context) error { return n.slow }

func (n *fakeNetwork) Setup() place.Setup {
	return place.Setup{Placement: "in memory", Lead: time.Millisecond}
}

func (n *fakeNetwork) Pair(v spec.Variant, i, ip int) (place.Pair, error) {
	return n.topology.Assign(n.fabric, n.Places()).Pair(v, i, ip)
}

func (n *fakeNetwork) Places() (all []place.Place) {
	ip := netip.MustParseAddr("192.0.2.1")
	for i := range n.nodes {
		name := fmt.Sprintf("node%d", i)
		all = append(all, place.Place{Name: name, Kind: place.Node, Node: name, IPv4: ip, Unprivileged: n.unprivileged[place.Node]})
	}
	for i := range n.nodes {
		for j := range n.topology.Pods(n.fabric) {
			all = append(all, place.Place{Name: fmt.Sprintf("node%d/pod%d", i, j), Kind: place.Pod, Node: fmt.Sprintf("node%d", i), IPv4: ip,
				Unprivileged: n.unprivileged[place.Pod], Service: place.Service{IPv4: ip, Port: 4242}})
		}
	}
	return all
}

func (n *fakeNetwork) Worker(_ context.Context, p place.Place, use place.Use) (Worker, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.away || n.refuses != nil && n.refuses(p.Name, use) {
		return nil, errors.New("connection refused")
	}
	n.workers++
	n.started++
	n.uses[use]++
	w := &fakeWorker{fakeNetwork: n, place: p.Name}
	n.all = append(n.all, w)
	return w, nil
}

func (n *fakeNetwork) Close(context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.open--
	return nil
}

type fakeWorker struct {
	*fakeNetwork
	place string
	dead  bool
}

func (w *fakeWorker) call(name string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.dead {
		return errors.New("the worker is dead")
	}
	return w.fail(name, w.place)
}

func (w *fakeWorker) Describe(context.Context, place.Place) (record.Node, error) {
	return record.Node{Name: w.place, Boot: w.boot(), Tools: w.tools, Busy: w.busy, Held: w.held}, w.call("describe")
}

// boot identifies the machine of a worker.
func (w *fakeWorker) boot() string {
	if !w.apart {
		return "one"
	}
	node, _, _ := strings.Cut(w.place, "/")
	return node
}

// prepare waits until a call is ready.
func (w *fakeWorker) prepare(call string) {
	if w.prepares != nil {
		time.Sleep(w.prepares(call))
	}
}

func (w *fakeWorker) Serve(ctx context.Context, t place.Traffic, ready place.Ready) (record.Endpoint, error) {
	if err := w.call("serve"); err != nil {
		return record.Endpoint{}, err
	}
	if w.hang("serve") || w.hangAt != nil && w.hangAt("serve", w.place) {
		<-ctx.Done()
	}
	w.prepare("serve")
	_, err := ready(4242)
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return record.Endpoint{Place: t.Place, Seconds: time.Duration(t.Workload.Traffic().Duration).Seconds(), Bytes: 1e9, BitsPerSecond: 8e9, Messages: 10, Silent: w.silent()}, err
}

// silent returns for how long a worker's place dropped everything.
func (w *fakeWorker) silent() float64 {
	if w.drops == nil {
		return 0
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.drops(w.place).Seconds()
}

func (w *fakeWorker) Drive(ctx context.Context, t place.Traffic, ready place.Ready, progress func(uint64, uint64)) (record.Endpoint, error) {
	if err := w.call("drive"); err != nil {
		return record.Endpoint{}, err
	}
	if t.Address.Port() != 4242 {
		return record.Endpoint{}, fmt.Errorf("drives port %d", t.Address.Port())
	}
	progress(1, 1)
	_, err := ready(0)
	select {
	case <-time.After(w.takes):
	case <-ctx.Done():
		return record.Endpoint{}, ctx.Err()
	}
	if w.hang("drive") || w.hangAt != nil && w.hangAt("drive", w.place) {
		<-ctx.Done()
		err = ctx.Err()
	}
	return record.Endpoint{Place: t.Place, Seconds: time.Duration(t.Workload.Traffic().Duration).Seconds(), Bytes: 1e9, Messages: 10}, err
}

func (w *fakeWorker) Sample(_ context.Context, q place.Sampling, ready place.Ready) (record.Sample, error) {
	if err := w.call("sample"); err != nil {
		return record.Sample{}, err
	}
	w.prepare("sample")
	_, err := ready(0)
	if w.waits && err == nil {
		select {
		case <-q.Early:
		case <-time.After(q.Duration):
		}
	}
	var host *record.Host
	if q.CPUs {
		host = &record.Host{Boot: w.boot(), Seconds: 1, Source: record.SoftirqEBPF, CPUs: []record.CPU{{Busy: 0.5, Softirq: 0.25}}}
	}
	if host != nil && w.physicalHost != nil {
		host.PhysicalHost = w.physicalHost()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	s := record.Sample{Host: host, Series: "of " + q.Place}
	if w.applied[w.place] > 0 {
		s.Fastpath = &record.Fastpath{Place: q.Place, Packets: map[string]uint64{"fast-out-vxlan": 3}}
	}
	return s, err
}

func (w *fakeWorker) Apply(_ context.Context, s place.Steering) ([]record.Setting, error) {
	if err := w.call("apply"); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.applied[w.place]++
	return []record.Setting{{Place: w.place, Path: "x", Want: "1", Got: "1"}}, nil
}

func (w *fakeWorker) Revert(context.Context) ([]record.Setting, error) {
	w.mu.Lock()
	var settings []record.Setting
	if w.applied[w.place] > 0 {
		w.applied[w.place]--
		settings = []record.Setting{{Place: w.place, Path: "x", Want: "1", Got: "1"}}
	}
	w.mu.Unlock()
	return settings, w.call("revert")
}

func (w *fakeWorker) Alive(context.Context) error { return w.call("alive") }

func (w *fakeWorker) Gone() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.dead
}

func (w *fakeWorker) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.workers--
	return nil
}

// inForce returns the places where something is still applied.
func (f *fakeTarget) inForce() (all []string) {
	for place, n := range f.applied {
		if n != 0 {
			all = append(all, place)
		}
	}
	return all
}

type memory struct {
	trials []record.Trial
	err    error
	// switched is the variant whose switch is made.
	switched string
	wanted   atomic.Value // record.Wanted
}

func (m *memory) Wanted() (record.Wanted, error) {
	wanted, _ := m.wanted.Load().(record.Wanted)
	return wanted, nil
}

func (m *memory) Switched(variant string) error {
	m.switched = variant
	return nil
}

func (m *memory) Append(t record.Trial) error {
	if m.err == nil {
		m.trials = append(m.trials, t)
	}
	return m.err
}

func parse(t *testing.T, overrides ...string) *spec.Experiment {
	t.Helper()
	exp, err := spec.Parse("test.yaml", []byte(`
apiVersion: slipstream.dev/v1alpha1
kind: Experiment
metadata: {name: test}
spec:
  target: {lab: {nodes: 2}}
  path: {vxlan: {shape: flannel}}
  baseline: vxlan
  variants:
  - {name: vxlan}
  - {name: native, path: {native: {}}}
  - {name: rps+, accelerate: [{rps: {devices: [nic, overlay, host-veth, pod], cpus: all}}]}
  workloads:
  - {name: stream, stream: {warmup: 1ms, duration: 1s}}
  pairs: [1, 2]
  runs: 2
  seed: 7
`), overrides)
	if err != nil {
		t.Fatal(err)
	}
	return exp
}

// measure runs the rest of an experiment on a fake target. out has what was done before.
func measure(t *testing.T, ctx context.Context, f *fakeTarget, exp *spec.Experiment, out *memory, observe func(Event)) ([]record.Trial, error) {
	t.Helper()
	if observe == nil {
		observe = func(Event) {}
	}
	r, err := Start(ctx, f.plan(exp), f, f.run, "test", slices.Clone(out.trials), observe)
	if err != nil {
		t.Fatal(err)
	}
	trials, err := r.Measure(ctx, out)
	if closeErr := r.Close(); closeErr != nil {
		t.Error(closeErr)
	}
	if f.workers != 0 || f.open != 0 {
		t.Errorf("%d workers and %d networks are left", f.workers, f.open)
	}
	if left := f.inForce(); left != nil {
		t.Errorf("still applied: %v", left)
	}
	return trials, err
}

func TestMeasure(t *testing.T) {
	f, out := newFake(2), new(memory)
	trials, err := measure(t, t.Context(), f, parse(t), out, nil)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(trials, out.trials, cmpopts.IgnoreFields(record.Trial{}, "Series")); diff != "" {
		t.Errorf("returned and recorded differ:\n%s", diff)
	}
	if len(trials) != 2*3*2 {
		t.Fatalf("%d trials", len(trials))
	}
	for i, tr := range trials {
		if tr.Order != i+1 || tr.Status != record.StatusOK || tr.Attempt != 1 {
			t.Errorf("trial %d: %+v", i, tr)
		}
		want := map[string]float64{
			metrics.Throughput: 8e9 * float64(tr.Pairs),
			metrics.CPUPerGB:   0.5 / float64(tr.Pairs), metrics.SoftirqPerGB: 0.25 / float64(tr.Pairs),
		}
		if diff := cmp.Diff(want, tr.Metrics); diff != "" {
			t.Errorf("trial %d:\n%s", i, diff)
		}
		if got := len(tr.Settings) > 0; got != (tr.Variant == "rps+") {
			t.Errorf("%s has settings %v", tr.Variant, tr.Settings)
		}
		var fast []string
		for _, f := range tr.Fastpath {
			fast = append(fast, f.Place)
		}
		if want := map[string][]string{"rps+": {"node0", "node1"}}[tr.Variant]; !slices.Equal(fast, want) {
			t.Errorf("%s has a fast path at %v, want %v", tr.Variant, fast, want)
		}
		if len(tr.Hosts) != 1 || !slices.Equal(tr.Hosts[0].Nodes, []string{"node0", "node1"}) {
			t.Errorf("one machine was sampled as %+v", tr.Hosts)
		}
		if diff := cmp.Diff(map[string]string{"node0": "of node0", "node1": "of node1"}, out.trials[i].Series); diff != "" {
			t.Errorf("series on record (-want +got):\n%s", diff)
		}
		if tr.Series != nil {
			t.Errorf("trial %d keeps its series in memory", i)
		}
	}
}

// TestSettingsChanged checks that a trial does not count if somebody else changed one of its settings, and that further trials warn
// of it. If a worker fails to revert and the next one does so, the trial counts. Both have all their settings on record.
func TestSettingsChanged(t *testing.T) {
	const what = "x of node0 reads 2 and was set to 1"
	for name, c := range map[string]struct {
		err    error
		counts bool
	}{
		"changed":       {place.ChangedError(what), false},
		"a dead worker": {errors.New("the worker is gone"), true},
	} {
		t.Run(name, func(t *testing.T) {
			f, out := newFake(2), new(memory)
			failed := false
			f.fail = func(call, at string) error {
				if call == "revert" && at == "node0" && !failed {
					failed = true
					return c.err
				}
				return nil
			}
			trials, err := measure(t, t.Context(), f, parse(t), out, nil)
			if err != nil {
				t.Fatal(err)
			}
			first := slices.IndexFunc(trials, func(tr record.Trial) bool { return tr.Variant == "rps+" })
			for i, tr := range trials {
				good := i != first || c.counts
				if (tr.Status == record.StatusOK) != good || !good && (!strings.Contains(tr.Error, what) || tr.Metrics != nil) {
					t.Errorf("trial %d of %s: %s, %q, %v", i, tr.Variant, tr.Status, tr.Error, tr.Metrics)
				}
				warned := slices.ContainsFunc(tr.Warnings, func(w record.Warning) bool {
					return w.Code == record.WarnSettingChanged && strings.Contains(w.Message, what)
				})
				if want := i > first && !c.counts; warned != want {
					t.Errorf("trial %d of %s warns: %t, want %t", i, tr.Variant, warned, want)
				}
				for _, node := range []string{"node0", "node1"} {
					has := slices.ContainsFunc(tr.Settings, func(s record.Setting) bool { return s.Place == node })
					if has != (tr.Variant == "rps+") {
						t.Errorf("trial %d of %s has the settings %v", i, tr.Variant, tr.Settings)
					}
				}
			}
		})
	}
}

// TestOrder checks that blocks are complete, that the variants of a comparison are side by side, and that the seed
// determines the order.
func TestOrder(t *testing.T) {
	p := newFake(2).plan(parse(t))
	var orders []string
	first := make(map[int]bool) // pair counts that some block begins with
	for b := 1; b <= 20; b++ {
		cells := p.Periods(b)[0].Cells
		seen := make(map[string]bool)
		for i, c := range cells {
			seen[c.String()] = true
			if head := cells[i-i%3]; c.Pairs != head.Pairs || c.Workload.Name != head.Workload.Name {
				t.Errorf("block %d: %s is not beside %s", b, c, head)
			}
		}
		if len(seen) != len(p.Cells) {
			t.Errorf("block %d has %d of %d cells", b, len(seen), len(p.Cells))
		}
		first[cells[0].Pairs] = true
		order := fmt.Sprint(cells[0], cells[1], cells[2], cells[3])
		if again := p.Periods(b)[0].Cells; fmt.Sprint(again[0], again[1], again[2], again[3]) != order {
			t.Errorf("block %d is not the same twice", b)
		}
		orders = append(orders, order)
	}
	if len(first) != 2 {
		t.Errorf("blocks begin with pair counts %v only", first)
	}
	slices.Sort(orders)
	if n := len(slices.Compact(orders)); n < 5 {
		t.Errorf("20 blocks have %d orders", n)
	}
}

// TestFailures makes things fail, and resumes a run that ended with an error once nothing fails.
func TestFailures(t *testing.T) {
	// once fails the first call of a name in a place.
	once := func(name, where string, err error) func(call, place string) error {
		return func(call, place string) (failed error) {
			if call == name && place == where {
				failed, err = err, nil
			}
			return failed
		}
	}
	refuses := func(name, where, why string) func(call, place string) error {
		return func(call, place string) error {
			if call == name && place == where {
				return errors.New(why)
			}
			return nil
		}
	}
	for _, tt := range []struct {
		name  string
		set   []string // of the experiment
		full  error    // of the disk on which the record is kept
		stop  int      // before a trial of this attempt the run is interrupted
		fail  func(f *fakeTarget) func(call, place string) error
		drops func(place string) time.Duration
		want  string
	}{
		{name: "one trial", fail: func(*fakeTarget) func(string, string) error {
			return once("drive", "node0/pod0", errors.New("the cat sat on it"))
		}, want: `
1 vxlan 1: failed: node0/pod0: the cat sat on it
5 ok
7 vxlan 1: ok, attempt 2
end`},
		{name: "a variant, always", fail: func(*fakeTarget) func(string, string) error {
			return refuses("apply", "node1", "read-only file system")
		}, want: `
2 ok
3 rps+ 1: failed: apply to node1: read-only file system
4 rps+ 2: failed: apply to node1: read-only file system
2 ok
7 rps+ 1: failed, attempt 2: apply to node1: read-only file system
8 rps+ 2: failed, attempt 2: apply to node1: read-only file system
end: ErrMissing
resume
end: ErrMissing`},
		{name: "a variant, until the run is interrupted before the second attempt", stop: 2, fail: func(*fakeTarget) func(string, string) error {
			return refuses("apply", "node1", "device or resource busy")
		}, want: `
2 ok
3 rps+ 1: failed: apply to node1: device or resource busy
4 rps+ 2: failed: apply to node1: device or resource busy
2 ok
end: context canceled
resume
7 rps+ 1: ok, attempt 2
8 rps+ 2: ok, attempt 2
end`},
		{name: "a place drops everything for most of a trial", drops: func() func(string) time.Duration {
			left := 700 * time.Millisecond
			return func(place string) (dropped time.Duration) {
				if place == "node1" {
					dropped, left = left, 0
				}
				return dropped
			}
		}(), want: `
1 ok
2 native 1: failed: nothing arrived for 700ms of the window of 1s: the network or a machine stood still, or it is too slow for so short a window (set a longer duration)
4 ok
7 native 1: ok, attempt 2
end`},
		{name: "a place drops everything for most of each trial of a variant", set: []string{"spec.pairs=[1]"}, drops: func(place string) time.Duration {
			return map[string]time.Duration{"node1": 700 * time.Millisecond}[place]
		}, want: `
2 ok
3 native 1: failed: nothing arrived for 700ms of the window of 1s: the network or a machine stood still, or it is too slow for so short a window (set a longer duration)
4 native 1: failed, attempt 2: nothing arrived for 700ms of the window of 1s: the network or a machine stood still, or it is too slow for so short a window (set a longer duration)
end: ErrMissing
resume
end: ErrMissing`},
		{name: "a place drops everything for less than half of each trial", drops: func(string) time.Duration { return 400 * time.Millisecond }, want: `
6 ok
end`},
		{name: "every trial of a block", set: []string{"spec.pairs=[1]", "spec.runs=2"}, fail: func(*fakeTarget) func(string, string) error {
			return failing("drive", "no route to host")
		}, want: `
1 rps+ 1: failed: node0/pod0: no route to host
2 vxlan 1: failed: node0/pod0: no route to host
3 native 1: failed: node0: no route to host
end: every trial of block 1 failed; the last one: node0: no route to host
resume
4 rps+ 1: ok, attempt 2
5 vxlan 1: ok, attempt 2
6 native 1: ok, attempt 2
3 ok
end`},
		{name: "every trial of a block, in silence", set: []string{"spec.pairs=[1]", "spec.runs=2"}, fail: func(*fakeTarget) func(string, string) error {
			return failing("drive", "connect to 192.0.2.1:4000: no answer within 5s")
		}, want: `
1 rps+ 1: failed: node0/pod0: connect to 192.0.2.1:4000: no answer within 5s
2 vxlan 1: failed: node0/pod0: connect to 192.0.2.1:4000: no answer within 5s
3 native 1: failed: node0: connect to 192.0.2.1:4000: no answer within 5s
end: every trial of block 1 failed; the last one: node0: connect to 192.0.2.1:4000: no answer within 5s: are the two ends kept apart by a network policy, possibly a cluster-wide one, or by a firewall?
resume
4 rps+ 1: ok, attempt 2
5 vxlan 1: ok, attempt 2
6 native 1: ok, attempt 2
3 ok
end`},
		{name: "the record", full: errors.New("no space left on device"), want: `
end: no space left on device
resume
end: no space left on device`},
		{name: "all workers, of which one is noticed at once", fail: func(f *fakeTarget) func(string, string) error {
			return f.killing(once("sample", "node1", errors.New("the worker is gone")), func(*fakeWorker) bool { return true })
		}, want: `
1 vxlan 1: failed: PLACE: the worker is dead
5 ok
7 vxlan 1: ok, attempt 2
end`},
		{name: "a server, whose client sees its connection refused before", fail: func(f *fakeTarget) func(string, string) error {
			return f.killing(once("drive", "node0/pod0", errors.New("connection refused")), func(w *fakeWorker) bool { return w.place == "node1/pod0" })
		}, want: `
1 vxlan 1: failed: node1/pod0: the worker is dead
5 ok
7 vxlan 1: ok, attempt 2
end`},
		{name: "the target, which is lost", set: []string{"spec.pairs=[1]"}, fail: func(*fakeTarget) func(string, string) error {
			served := 0
			return func(call, _ string) error {
				if call == "serve" {
					if served++; served > 2 {
						return fmt.Errorf("the worker is gone: %w", &place.LostError{Why: errors.New("no more nodes")})
					}
				}
				return nil
			}
		}, want: `
2 ok
end: ErrLost: the target is lost: no more nodes
resume
1 ok
end`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			exp := parse(t, append([]string{"spec.runs=1"}, tt.set...)...)
			f, out := newFake(2), &memory{err: tt.full}
			f.drops = tt.drops
			if tt.fail != nil {
				f.fail = tt.fail(f)
			}
			ctx, cancel := context.WithCancel(t.Context())
			var last Event
			_, err := measure(t, ctx, f, exp, out, func(e Event) {
				if e.Kind == Begins && e.Trial.Attempt == tt.stop {
					cancel()
				}
				if last = e; e.Done > e.Total {
					t.Errorf("%d/%d trials are done", e.Done, e.Total)
				}
			})
			if (err == nil || errors.Is(err, ErrMissing)) && last.Done != last.Total {
				t.Errorf("at the end %d/%d trials are done", last.Done, last.Total)
			}
			got := transcript(out.trials, err)
			if err != nil {
				before := len(out.trials)
				_, err = measure(t, t.Context(), newFake(2), exp, out, nil)
				got += "\nresume" + transcript(out.trials[before:], err)
			}
			if strings.Contains(tt.want, "PLACE") {
				got = aPlace.ReplaceAllString(got, "PLACE")
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// killing marks some workers as dead when fail first returns an error.
func (f *fakeTarget) killing(fail func(call, place string) error, which func(*fakeWorker) bool) func(call, place string) error {
	return func(call, place string) error {
		err := fail(call, place)
		if err != nil {
			for _, w := range f.all {
				w.dead = which(w)
			}
		}
		return err
	}
}

// transcript has a line for each trial that failed or was tried again, with its order, variant and pairs, one for the trials
// between them, and one for the end of the run.
func transcript(trials []record.Trial, err error) string {
	var b strings.Builder
	good := 0
	flush := func() {
		if good > 0 {
			fmt.Fprintf(&b, "\n%d ok", good)
		}
		good = 0
	}
	for _, tr := range trials {
		if tr.Status == record.StatusOK && tr.Attempt == 1 {
			good++
			continue
		}
		flush()
		fmt.Fprintf(&b, "\n%d %s %d: %s", tr.Order, tr.Variant, tr.Pairs, tr.Status)
		if tr.Attempt > 1 {
			fmt.Fprintf(&b, ", attempt %d", tr.Attempt)
		}
		if tr.Status == record.StatusFailed {
			fmt.Fprintf(&b, ": %s", tr.Error)
			if len(tr.Metrics) > 0 {
				fmt.Fprintf(&b, ", but it has %v", tr.Metrics)
			}
		}
	}
	flush()
	b.WriteString("\nend")
	switch {
	case errors.Is(err, ErrMissing):
		b.WriteString(": ErrMissing")
	case errors.Is(err, place.ErrLost):
		fmt.Fprintf(&b, ": ErrLost: %v", err)
	case err != nil:
		fmt.Fprintf(&b, ": %v", err)
	}
	return b.String()
}

// aPlace is a node or a pod: which one fails first may differ from run to run.
var aPlace = regexp.MustCompile(`node\d(/pod\d)?`)

// TestHangs: a worker hangs, before the start of a trial or after it. The record names the tasks that are awaited.
// Before the start these include the clients, which wait for the server.
func TestHangs(t *testing.T) {
	for _, tt := range []struct{ call, pairs, want string }{
		{"serve", "1", "not ready: PLACE (client of pair 0), PLACE (server 0 of pair 0)"},
		{"drive", "1", "still running: PLACE (client of pair 0)"},
		{"serve", "4", "not ready: PLACE (client of pair 0), PLACE (client of pair 1), PLACE (client of pair 2), PLACE (client of pair 3), and 4 more"},
	} {
		call, want := tt.call, "the trial has not ended 30s after its traffic; "+tt.want
		synctest.Test(t, func(t *testing.T) {
			f, out := newFake(2), new(memory)
			f.hang = func(c string) bool { return c == call }
			_, _ = measure(t, t.Context(), f, parse(t, "spec.runs=1", "spec.pairs=["+tt.pairs+"]"), out, nil)
			if len(out.trials) == 0 {
				t.Fatalf("%s hangs: nothing is on record", call)
			}
			got := aPlace.ReplaceAllString(out.trials[0].Error, "PLACE")
			if got != want {
				t.Errorf("%s hangs: the record says %q, want %q", call, got, want)
			}
		})
	}
}

// TestSlow: the record of a trial that took too long begins with the server that is slow. Other failures do not mention it.
func TestSlow(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*fakeTarget)
		want   string
	}{
		"hangs": {func(f *fakeTarget) { f.hang = func(c string) bool { return c == "drive" } }, "the server took 7s: the trial has not ended 30s after its traffic"},
		"fails": {func(f *fakeTarget) { f.fail = failing("drive", "refused") }, "node0"},
	} {
		synctest.Test(t, func(t *testing.T) {
			f, out := newFake(2), new(memory)
			tt.change(f)
			f.slow = errors.New("the server took 7s")
			_, _ = measure(t, t.Context(), f, parse(t, "spec.runs=1", "spec.pairs=[1]"), out, nil)
			if len(out.trials) == 0 || !strings.HasPrefix(out.trials[0].Error, tt.want) {
				t.Errorf("%s: the record says %q, want %s", name, out.trials[0].Error, tt.want)
			}
		})
	}
}

// TestStalled: the record says whether a trial failed because its connections stalled, in a mesh too.
func TestStalled(t *testing.T) {
	for why, want := range map[error]bool{
		fmt.Errorf("run stream: %w", record.StalledAtEnd): true,
		errors.New("the cat sat on it"):                   false,
	} {
		for _, exp := range []*spec.Experiment{parse(t, "spec.runs=1"), meshOf(t, 2)} {
			f, out := newFake(2), new(memory)
			f.fail = func(call, _ string) error {
				if call == "drive" {
					return why
				}
				return nil
			}
			_, _ = measure(t, t.Context(), f, exp, out, nil)
			if len(out.trials) == 0 {
				t.Fatalf("%v: nothing is on record", why)
			}
			for _, tr := range out.trials {
				if tr.Stalled != want || !strings.Contains(tr.Error, why.Error()) {
					t.Errorf("%v: stalled %t, %s", why, tr.Stalled, tr.Error)
				}
			}
		}
	}
}

// TestDiskFull: a disk that is full in a place ends the run before it records a trial that could not be measured.
// The resumed run measures it.
func TestDiskFull(t *testing.T) {
	whole := new(memory)
	if _, err := measure(t, t.Context(), newFake(2), parse(t), whole, nil); err != nil {
		t.Fatal(err)
	}
	for _, where := range []string{"apply", "serve", "revert"} {
		f, out, calls := newFake(2), new(memory), 0
		f.fail = func(call, _ string) error {
			if call != where {
				return nil
			}
			if calls++; calls > 2 {
				return fmt.Errorf("write journal: %w", place.ErrNoSpace)
			}
			return nil
		}
		if _, err := measure(t, t.Context(), f, parse(t), out, nil); !errors.Is(err, place.ErrNoSpace) || len(out.trials) >= len(whole.trials) {
			t.Fatalf("%s: %d trials, %v", where, len(out.trials), err)
		}
		if left := f.inForce(); left != nil {
			t.Errorf("%s: accelerated still: %v", where, left)
		}
		if _, err := measure(t, t.Context(), newFake(2), parse(t), out, nil); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(keys(whole.trials), keys(out.trials)); diff != "" {
			t.Errorf("%s: resumed:\n%s", where, diff)
		}
	}
}

// TestResume interrupts a run at each of its trials and resumes it: what is on
// record in the end is what an undisturbed run records.
func TestResume(t *testing.T) {
	whole := new(memory)
	if _, err := measure(t, t.Context(), newFake(2), parse(t), whole, nil); err != nil {
		t.Fatal(err)
	}
	for stop := range len(whole.trials) {
		out := new(memory)
		ctx, cancel := context.WithCancelCause(t.Context())
		enough := errors.New("enough")
		_, err := measure(t, ctx, newFake(2), parse(t), out, func(e Event) {
			if e.Kind == Begins && e.Trial.Order == stop+1 {
				cancel(enough)
			}
		})
		if !errors.Is(err, enough) {
			t.Fatalf("stopped at %d: %v", stop, err)
		}
		if len(out.trials) != stop {
			t.Fatalf("stopped at %d with %d trials", stop, len(out.trials))
		}
		if _, err := measure(t, t.Context(), newFake(2), parse(t), out, nil); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(keys(whole.trials), keys(out.trials)); diff != "" {
			t.Errorf("stopped at %d and resumed:\n%s", stop, diff)
		}
	}
}

func keys(trials []record.Trial) (out []string) {
	for _, t := range trials {
		b, _ := json.Marshal([]any{t.Block, t.Order, t.Variant, t.Workload, t.Pairs, t.Attempt, t.Status})
		out = append(out, string(b))
	}
	return out
}

// TestCluster: pods that may not steer themselves are steered by another worker, and nodes that are not sampled have no
// CPU figures.
func TestCluster(t *testing.T) {
	for _, sampled := range []bool{true, false} {
		f, out := newFake(2), new(memory)
		f.unprivileged = map[place.Kind]bool{place.Pod: true, place.Node: !sampled}
		set := []string{"spec.target={kubernetes: {}}", "spec.path={pod: {}}", "spec.variants.native.path={service: {}}"}
		if !sampled {
			set = append(set, "spec.variants.rps+.accelerate=[]")
		}
		trials, err := measure(t, t.Context(), f, parse(t, set...), out, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, tr := range trials {
			if tr.Status != record.StatusOK {
				t.Errorf("%s: %s", tr.Variant, tr.Error)
			}
			_, cpu := tr.Metrics[metrics.CPUPerGB]
			warned := slices.ContainsFunc(tr.Warnings, func(w record.Warning) bool { return w.Code == record.WarnNoCPUs })
			if cpu != sampled || warned == sampled || len(tr.Hosts) > 0 != sampled {
				t.Errorf("sampled %t: hosts %v, metrics %v, warnings %v", sampled, tr.Hosts, tr.Metrics, tr.Warnings)
			}
		}
		// 2 pairs; a worker for control of each pod, and of each node.
		want := map[place.Use]int{place.ForTraffic: 4}
		if sampled {
			want[place.ForControl] = 4 + 2
		}
		if diff := cmp.Diff(want, f.uses); diff != "" {
			t.Errorf("sampled %t: workers (-want +got):\n%s", sampled, diff)
		}
	}
}

// TestOneSide: accelerators act on the nodes and pods of the side that they are limited to. Without a limit they act on
// all nodes, even on one without ends, such as that of a proxy.
func TestOneSide(t *testing.T) {
	for side, want := range map[string][]string{
		"":              {"node0", "node0/pod0", "node1", "node1/pod0", "node2"},
		spec.SideClient: {"node0", "node0/pod0"},
		spec.SideServer: {"node1", "node1/pod0"},
	} {
		f := newFake(3)
		var mu sync.Mutex
		var got []string
		f.fail = func(call, place string) error {
			if call == "apply" {
				mu.Lock()
				got = append(got, place)
				mu.Unlock()
			}
			return nil
		}
		set := []string{"spec.pairs=[1]", "spec.runs=1"}
		if side != "" {
			set = append(set, "spec.variants.rps+.on="+side)
		}
		if _, err := measure(t, t.Context(), f, parse(t, set...), new(memory), nil); err != nil {
			t.Fatal(err)
		}
		slices.Sort(got)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("on %q (-want +got):\n%s", side, diff)
		}
		for place, n := range f.applied {
			if n != 0 {
				t.Errorf("on %q: %s is still accelerated", side, place)
			}
		}
	}
}

// TestRefusedAtTheStart: what cannot be measured is refused before the first trial, and only that.
func TestRefusedAtTheStart(t *testing.T) {
	fast := v1alpha1.Accelerator{Fastpath: &v1alpha1.Fastpath{}}
	rps := v1alpha1.Accelerator{RPS: &v1alpha1.RPS{Devices: []string{"nic"}, CPUs: "all"}}
	held := map[string]string{"fastpath": "the fast path by agent (process 7)"}
	variant := func(a v1alpha1.Accelerator) func(*spec.Spec) {
		return func(s *spec.Spec) {
			s.Variants = append(s.Variants, spec.Variant{Name: "tried", Accelerate: []v1alpha1.Accelerator{a}})
		}
	}
	memcached := func(s *spec.Spec) { s.Workloads = append(s.Workloads, cache()) }
	for name, tt := range map[string]struct {
		change      func(*spec.Spec)
		busy, tools map[string]string
		want        string
	}{
		"an accelerator that another process has, and only one can have": {variant(fast), held, nil, "variant tried needs the fast path of node0, which is in use (the fast path by agent (process 7))"},
		"another accelerator":                      {variant(rps), held, nil, ""},
		"an accelerator that no process has":       {variant(fast), nil, nil, ""},
		"programs that a node lacks":               {memcached, nil, nil, "lacks programs of memcached: install them"},
		"programs that every node has":             {memcached, nil, map[string]string{spec.ToolMemcached: "1.6"}, ""},
		"an end without an address of the version": {func(s *spec.Spec) { s.Workloads[0].Stream.IP = 6 }, nil, nil, "node1/pod0 has no IPv6 address"},
	} {
		exp, f := parse(t), newFake(2)
		tt.change(&exp.Spec)
		f.busy, f.tools = tt.busy, tt.tools
		r, err := Start(t.Context(), f.plan(exp), f, nil, "test", nil, func(Event) {})
		if err == nil {
			err = r.Close()
		}
		if got := fmt.Sprint(err); (err == nil) != (tt.want == "") || !strings.Contains(got, tt.want) {
			t.Errorf("%s: %s, want %q", name, got, tt.want)
		}
		if f.open != 0 || f.workers != 0 {
			t.Errorf("%s: %d networks and %d workers are left", name, f.open, f.workers)
		}
	}
}

// TestSaysWhatIsHeld: that others accelerate nodes is said before the first trial, once for each node. In a cluster, the place says it.
func TestSaysWhatIsHeld(t *testing.T) {
	for name, tt := range map[string]struct {
		target spec.Target
		want   []string
	}{
		"hosts":   {spec.Target{Hosts: []spec.Host{{Name: "node0"}, {Name: "node1"}}}, []string{"node0", "node1"}},
		"cluster": {spec.Target{Kubernetes: &spec.Kubernetes{}}, nil},
	} {
		exp, f := parse(t), newFake(2)
		exp.Spec.Target, f.held = tt.target, []string{"4 settings by agent"}
		var said []string
		r, err := Start(t.Context(), f.plan(exp), f, nil, "test", nil, func(e Event) {
			if node, _, ok := strings.Cut(e.Text, " is accelerated already (4 settings by agent): every variant is measured with that"); ok {
				said = append(said, node)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(tt.want, said); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// cache is a workload of memcached.
func cache() spec.Workload {
	return spec.Workload{Name: "cache", Application: &spec.Traffic{
		Tool: spec.ToolMemcached, Operation: spec.OperationGet, Protocol: "tcp", IP: 4, Connections: 1, Duration: 1e9, Warmup: 1e6,
	}}
}

// String identifies a cell in the failures of tests.
func (c Cell) String() string {
	text := c.Variant.Name + " " + stats.At(c.Workload.Name, c.Pairs)
	if c.Round > 0 {
		text += fmt.Sprintf(", round %d", c.Round)
	}
	return text
}

// TestPauseAndStop: a run pauses when its block is complete, goes on with nothing lost, and stops after the trial under way.
func TestPauseAndStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		exp := parse(t)
		f, out := newFake(2), &memory{}
		var notes []string
		pausedAfter := 0
		trials, err := measure(t, t.Context(), f, exp, out, func(e Event) {
			switch {
			case e.Kind == Ends && len(out.trials) == 2:
				out.wanted.Store(record.WantedPause)
			case e.Kind == Note && len(notes) == 0:
				pausedAfter = len(out.trials)
				time.AfterFunc(time.Hour, func() { out.wanted.Store(record.WantedOn) })
			case e.Kind == Ends && len(out.trials) == 10:
				out.wanted.Store(record.WantedStop)
			}
			if e.Kind == Note {
				notes = append(notes, e.Text)
			}
			if e.Kind == Begins && len(out.trials) == 9 && e.Left > time.Minute {
				t.Errorf("%s are left: the pause counts", e.Left)
			}
		})
		if !errors.Is(err, ErrStopped) || len(trials) != 10 {
			t.Errorf("%d trials, %v, want 10 and ErrStopped", len(trials), err)
		}
		if pausedAfter != 6 {
			t.Errorf("it pauses after %d trials, want 6, the first block", pausedAfter)
		}
		if diff := cmp.Diff([]string{"the run pauses: slipstream serve resumes it", "the run goes on"}, notes); diff != "" {
			t.Error(diff)
		}
	})
}
