package experiment

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// slack bounds how much longer than its traffic a trial may take.
const slack = 30 * time.Second

// trial applies a variant, measures a cell, and puts everything back.
func (n *network) trial(ctx context.Context, owner string, c Cell, out *record.Trial, moved func(bytes, messages uint64)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.time()+slack, fmt.Errorf("the trial has not ended %s after its traffic", slack))
	defer cancel()
	pairs, err := n.pairs(out.Block, c)
	if err != nil {
		return err
	}
	settings, failed, err := n.apply(ctx, owner, c, pairs)
	if err == nil {
		err = n.changing(ctx, c, out, func() error { return n.measure(ctx, c, pairs, failed, out, moved) })
	}
	// Revert what was applied, however the trial ended.
	back, stop := context.WithTimeout(context.WithoutCancel(ctx), restoreTime)
	defer stop()
	held, revertErr := n.revert(back, c, pairs)
	if len(held) > 0 {
		settings = held
	}
	out.Settings = settings
	if err := errors.Join(err, revertErr); err != nil {
		return err
	}
	out.Warnings = append(out.Warnings, warnings(c, out)...)
	out.Warnings = append(out.Warnings, congestionWarnings(n.setup.CongestionControl, out.PerPair)...)
	out.Warnings = append(out.Warnings, n.heldWarnings()...)
	if len(out.Settings) > 0 && slices.ContainsFunc(c.Variant.Accelerate, v1alpha1.Accelerator.Steers) {
		out.Warnings = append(out.Warnings, n.interruptWarnings()...)
	}
	return nil
}

// changing measures while the network makes the changes of a variant, and records how many it made per second.
func (n *network) changing(ctx context.Context, c Cell, out *record.Trial, measure func() error) error {
	changes, ok := n.Network.(Changing)
	if !ok {
		return measure()
	}
	begin := time.Now()
	perSecond, stop, err := changes.Change(ctx, c.Variant)
	if err != nil {
		return err
	}
	err = measure()
	made, changeErr := stop()
	seconds := time.Since(begin).Seconds()
	out.EndpointChanges = float64(made) / seconds
	out.Warnings = append(out.Warnings, changeWarnings(perSecond, made, seconds)...)
	return errors.Join(err, changeErr)
}

// changeWarnings warns if far fewer endpoints were replaced than the variant asks for. Some changes always wait for the
// next batch when the traffic ends: those that came while rules were loaded, or within kube-proxy's second after that.
func changeWarnings(perSecond, made int, seconds float64) []record.Warning {
	if float64(made) >= 0.5*seconds*float64(perSecond)-1 {
		return nil
	}
	return []record.Warning{record.Warnf(record.WarnChanges,
		"%.1f endpoints a second were replaced, in place of %d: this machine takes longer to load the rules", float64(made)/seconds, perSecond)}
}

// heldWarnings warns of accelerators that others keep applied.
func (n *network) heldWarnings() (all []record.Warning) {
	for _, f := range n.facts {
		for _, what := range f.Held {
			all = append(all, record.Warnf(record.WarnHeld,
				"%s is accelerated already (%s): every variant is measured with that, the baseline too (delete the policy, or run slipstream accel revert)", f.Name, what))
		}
	}
	return all
}

// slowInterrupt is about the time of a packet's whole way through a kernel. An interrupt to another CPU that takes as long
// counts as slow.
const slowInterrupt = 5 * time.Microsecond

// interruptWarnings warns of the cost of steering on machines where it is high.
func (n *network) interruptWarnings() []record.Warning {
	var worst float64
	for _, f := range n.facts {
		worst = max(worst, f.InterruptSeconds)
	}
	if worst < slowInterrupt.Seconds() {
		return nil
	}
	return []record.Warning{record.Warnf(record.WarnInterrupts,
		"an interrupt to another CPU takes %.0f µs, round trip, and steering needs one for each batch of packets that it moves (bare metal: 1 to 3 µs)", worst*1e6)}
}

// steered returns the places in which the accelerators of a cell act, with the workers that control them: the nodes and the
// pods of its pairs, or only those of one side.
func (n *network) steered(c Cell, pairs []seatedPair) []seated {
	var ends, in []seated
	for _, pair := range pairs {
		if c.Variant.On != spec.SideServer {
			ends = append(ends, pair.client)
		}
		if c.Variant.On != spec.SideClient {
			ends = append(ends, pair.servers...)
		}
	}
	add := func(p place.Place) {
		if len(v1alpha1.AcceleratorsFor(c.Variant.Accelerate, p.Kind == place.Pod)) > 0 {
			in = append(in, seated{p, controlOf(p)})
		}
	}
	for _, node := range n.nodes {
		if c.Variant.On == "" || slices.ContainsFunc(ends, func(end seated) bool { return end.place.Node == node.Name }) {
			add(node)
		}
	}
	for _, end := range ends {
		if end.place.Kind == place.Pod {
			add(end.place)
		}
	}
	return in
}

// apply applies a cell's accelerators in all places concurrently. In a mesh it returns the nodes where that failed: only
// their pairs fail.
func (n *network) apply(ctx context.Context, owner string, c Cell, pairs []seatedPair) (all []record.Setting, failed map[string]error, err error) {
	var mu sync.Mutex
	failed = make(map[string]error)
	var tasks []func() error
	for _, s := range n.steered(c, pairs) {
		mine := v1alpha1.AcceleratorsFor(c.Variant.Accelerate, s.place.Kind == place.Pod)
		tasks = append(tasks, func() error {
			settings, err := n.applyTo(ctx, s, place.Steering{Place: s.place, Accelerators: mine, Owner: owner})
			mu.Lock()
			defer mu.Unlock()
			all = append(all, settings...)
			if err != nil && c.Round > 0 && ctx.Err() == nil {
				failed[s.place.Node], err = err, nil
			}
			return err
		})
	}
	err = inParallel(tasks)
	return all, failed, err
}

// applyTo sets accelerators in one place.
func (n *network) applyTo(ctx context.Context, s seated, what place.Steering) ([]record.Setting, error) {
	w, err := n.worker(ctx, s.key, s.place)
	if err != nil {
		return nil, err
	}
	settings, err := w.Apply(ctx, what)
	if err != nil {
		n.drop(s.key)
		return nil, fmt.Errorf("apply to %s: %w", s.place.Name, err)
	}
	return settings, nil
}

// revert reverts a cell's accelerators, and returns the settings that were in force until then.
func (n *network) revert(ctx context.Context, c Cell, pairs []seatedPair) ([]record.Setting, error) {
	var mu sync.Mutex
	var all []record.Setting
	var tasks []func() error
	for _, s := range n.steered(c, pairs) {
		tasks = append(tasks, func() error {
			w, err := n.worker(ctx, s.key, s.place)
			if c.Round > 0 && errors.Is(err, place.ErrLost) {
				return nil // the others continue
			}
			if err != nil {
				return err
			}
			settings, err := w.Revert(ctx)
			if err != nil {
				n.drop(s.key)
				// The next worker restores what the journal says of a dead one.
				w, again := n.worker(ctx, s.key, s.place)
				if again == nil {
					_, again = w.Revert(ctx)
				}
				if c.Round > 0 && errors.Is(again, place.ErrLost) {
					return nil
				}
				if again != nil {
					return fmt.Errorf("revert %s: %w", s.place.Name, errors.Join(err, again))
				}
				return nil
			}
			mu.Lock()
			all = append(all, settings...)
			mu.Unlock()
			return nil
		})
	}
	err := inParallel(tasks)
	slices.SortFunc(all, func(a, b record.Setting) int {
		return cmp.Or(cmp.Compare(a.Place, b.Place), cmp.Compare(a.Path, b.Path))
	})
	return all, err
}

// measure runs the traffic of a cell and samples the nodes over the same window. Pairs on nodes in failed fail.
func (n *network) measure(ctx context.Context, c Cell, pairs []seatedPair, failed map[string]error, out *record.Trial, moved func(bytes, messages uint64)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out.PerPair, out.Series = make([]record.Pair, c.Pairs), make(map[string]string)
	m := &measurement{
		network: n, whole: &part{ctx: ctx, cancel: cancel}, cell: c, spec: c.Workload.Traffic(), out: out,
		gate: newBarrier(ctx, n.setup.Lead), progress: newProgress(c.Pairs, moved), servers: make([][]record.Endpoint, c.Pairs),
	}
	_, _ = rand.Read(m.secret[:]) // it ends the program rather than fail
	// With a fixed number of requests, the window ends once they are done.
	if m.spec.Counted() {
		m.early = make(chan struct{})
	}
	m.driving.Store(int64(c.Pairs))
	for i, pair := range pairs {
		m.addPair(i, pair)
		if err := cmp.Or(failed[pair.client.place.Node], failed[pair.servers[0].place.Node]); err != nil {
			m.parts[i].cancel(err)
		}
	}
	sampled := slices.DeleteFunc(slices.Clone(n.nodes), func(p place.Place) bool { return p.Unprivileged })
	for _, node := range sampled {
		m.addSampler(node)
	}
	if c.Round > 0 {
		defer m.hurry()()
	}
	if err := inParallel(m.tasks); err != nil && ctx.Err() != nil {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return fmt.Errorf("%w; %s", context.Cause(ctx), m.gate.awaited())
		}
		return cmp.Or(context.Cause(ctx), err)
	}
	if err := m.noteFailures(pairs); err != nil {
		return err
	}
	for i, of := range m.servers {
		if out.PerPair[i].Error != "" {
			continue
		}
		out.PerPair[i].Server = of[0]
		if pairs[i].Backends {
			out.PerPair[i].Server, out.PerPair[i].Backends = together(of), of
		}
	}
	n.nameHosts(out.Hosts)
	slices.SortFunc(out.Fastpath, func(a, b record.Fastpath) int { return cmp.Compare(a.Place, b.Place) })
	slices.SortFunc(out.VFs, func(a, b record.VFUse) int {
		return cmp.Or(cmp.Compare(a.Place, b.Place), cmp.Compare(a.NIC, b.NIC))
	})
	out.Loads = n.loads(sampled, out)
	return fill(c, out)
}

// measurement is the traffic of a trial and what samples it: tasks that all begin when the last of them is ready.
type measurement struct {
	*network
	// whole is all of the trial. In a mesh it has parts: the pairs, then what samples the nodes.
	whole    *part
	parts    []*part
	cell     Cell
	spec     *spec.Traffic
	gate     *barrier
	progress *progress
	secret   [16]byte
	// early is closed when the last of the driving clients is done; nil if the length of the window is fixed.
	early   chan struct{}
	driving atomic.Int64
	tasks   []func() error
	// servers are the ends of each pair. Clients are in out.
	servers [][]record.Endpoint

	mu  sync.Mutex // of what is sampled
	out *record.Trial
}

// add adds a task of a worker to a part. The first task that fails makes the part fail, and stops its other tasks.
func (m *measurement) add(p *part, s seated, role string, do func(w Worker, ready place.Ready) error) {
	who := s.place.Name + " (" + role + ")"
	p.seats = append(p.seats, s)
	m.gate.expect(who, p.cancel)
	m.tasks = append(m.tasks, func() error {
		w, err := m.worker(p.ctx, s.key, s.place)
		if err == nil {
			err = do(w, func(uint16) (time.Time, error) { return m.gate.ready(p.ctx, who) })
		}
		if err != nil && p.ctx.Err() == nil {
			p.cancel(cmp.Or(m.death(p), fmt.Errorf("%s: %w", s.place.Name, err)))
			m.drop(s.key)
		}
		m.gate.done(who)
		return err
	})
}

// deathTime bounds how long workers may take to show that they live. In a cluster the API server reports a death, possibly
// with a delay.
const deathTime = 5 * time.Second

// death returns which worker of a part has died, and why. The other ends of its connections may report first that these
// were reset or refused, which does not show the cause.
func (m *measurement) death(p *part) error {
	ctx, cancel := context.WithTimeout(p.ctx, deathTime)
	defer cancel()
	deaths := make([]error, len(p.seats))
	var wg sync.WaitGroup
	for i, s := range p.seats {
		w := m.started(s.key)
		if w == nil {
			continue
		}
		wg.Go(func() {
			if err := w.Alive(ctx); err != nil && w.Gone() {
				deaths[i] = fmt.Errorf("%s: %w", s.place.Name, err)
			}
		})
	}
	wg.Wait()
	return cmp.Or(deaths...)
}

// addPair adds the servers and the client of pair i.
func (m *measurement) addPair(i int, pair seatedPair) {
	traffic := func(s seated, w spec.Workload) place.Traffic {
		return place.Traffic{Place: s.place.Name, Workload: w, CongestionControl: m.setup.CongestionControl, Secret: m.secret}
	}
	ports := make(chan uint16, len(pair.servers))
	m.servers[i] = make([]record.Endpoint, len(pair.servers))
	// The server of another tool has nothing to report, and ends with its client. So does a server for a fixed number
	// of requests, because it does not know which one is the last.
	part := m.part()
	serveCtx, clientDone := part.ctx, func() {}
	if m.spec.Tool != spec.ToolNative || m.early != nil {
		serveCtx, clientDone = context.WithCancel(part.ctx)
	}
	for j, server := range pair.servers {
		m.add(part, server, fmt.Sprintf("server %d of pair %d", j, i), func(w Worker, ready place.Ready) (err error) {
			t := traffic(server, served(m.cell.Workload, pair.Pair))
			t.Address = pair.Listen(server.place, m.spec.IP)
			m.servers[i][j], err = w.Serve(serveCtx, t, func(p uint16) (time.Time, error) {
				ports <- p
				return ready(p)
			})
			if serveCtx.Err() != nil && part.ctx.Err() == nil {
				return nil
			}
			return err
		})
	}
	m.add(part, pair.client, fmt.Sprintf("client of pair %d", i), func(w Worker, ready place.Ready) (err error) {
		defer func() {
			clientDone()
			if m.driving.Add(-1) == 0 && m.early != nil {
				close(m.early)
			}
		}()
		t := traffic(pair.client, m.cell.Workload)
		for range pair.servers {
			select {
			case p := <-ports:
				t.Address = netip.AddrPortFrom(pair.To.Addr(), p)
			case <-part.ctx.Done():
				return context.Cause(part.ctx)
			}
		}
		m.out.PerPair[i].Client, err = w.Drive(part.ctx, t, ready, m.progress.of(i))
		return err
	})
}

// addSampler adds the task that samples a node.
func (m *measurement) addSampler(node place.Place) {
	part := m.part()
	m.add(part, seated{node, controlOf(node)}, "sample", func(w Worker, ready place.Ready) error {
		sample, err := w.Sample(part.ctx, node.Name, m.sampleCPUs[node.Name], time.Duration(m.spec.Warmup), time.Duration(m.spec.Duration), m.early, ready)
		m.mu.Lock()
		defer m.mu.Unlock()
		if sample.Host != nil {
			m.out.Hosts = append(m.out.Hosts, *sample.Host)
		}
		if sample.Fastpath != nil {
			m.out.Fastpath = append(m.out.Fastpath, *sample.Fastpath)
		}
		m.out.Devices = append(m.out.Devices, sample.Devices...)
		m.out.VFs = append(m.out.VFs, sample.VFs...)
		if sample.Series != "" {
			m.out.Series[node.Name] = sample.Series
		}
		return err
	})
}

// nameHosts says which nodes are on each machine.
func (n *network) nameHosts(hosts []record.Host) {
	for i := range hosts {
		for _, f := range n.facts {
			if f.Boot == hosts[i].Boot {
				hosts[i].Nodes = append(hosts[i].Nodes, f.Name)
			}
		}
	}
}

// together sums up what the backends of a pair did.
func together(backends []record.Endpoint) record.Endpoint {
	all := record.Endpoint{}
	names := make([]string, len(backends))
	for i, e := range backends {
		names[i] = e.Place
		all.Seconds += e.Seconds / float64(len(backends))
		all.Bytes += e.Bytes
		all.BitsPerSecond += e.BitsPerSecond
		all.Messages += e.Messages
		all.Lost += e.Lost
		all.Retransmits += e.Retransmits
		all.CPUSeconds += e.CPUSeconds
		all.Sleeps += e.Sleeps
		all.Warnings = append(all.Warnings, e.Warnings...)
	}
	all.Place = strings.Join(names, " ")
	return all
}

// loads returns the load of the CPUs and the NIC of each node of a lab, from the samples of CPUs and devices.
func (n *network) loads(nodes []place.Place, t *record.Trial) []record.Load {
	var all []record.Load
	for _, node := range nodes {
		facts := slices.IndexFunc(n.facts, func(f record.Node) bool { return f.Name == node.Name })
		if len(node.Cores) == 0 || facts < 0 {
			continue
		}
		host := slices.IndexFunc(t.Hosts, func(h record.Host) bool { return h.Boot == n.facts[facts].Boot })
		if host < 0 {
			continue
		}
		h := t.Hosts[host]
		l := record.Load{Node: node.Name, Role: node.Role, Rate: float64(node.NICRate), Shared: node.Shared, Core: node.Cores[0]}
		for _, cpu := range h.CPUs {
			if busy := ratio(cpu.Busy, h.Seconds); busy > l.Busy && slices.Contains(node.Cores, cpu.ID) {
				l.Core, l.Busy = cpu.ID, busy
			}
		}
		for _, d := range t.Devices {
			nic := func(l record.Link) bool { return l.Name == d.Name && l.Class == v1alpha1.DeviceNIC }
			if d.Place == node.Name && slices.ContainsFunc(n.facts[facts].Links, nic) {
				l.Receive += ratio(8*float64(d.RxBytes), h.Seconds)
				l.Send += ratio(8*float64(d.TxBytes), h.Seconds)
			}
		}
		all = append(all, l)
	}
	return all
}

// served returns the workload of each server of a pair. Long-lived connections are divided among backends; connections that
// come and go are not.
func served(w spec.Workload, p place.Pair) spec.Workload {
	if !p.Backends || w.Connect != nil || w.HTTP != nil || w.Application != nil {
		return w
	}
	for _, t := range []**spec.Traffic{&w.Stream, &w.PingPong, &w.UnderLoad} {
		if *t != nil {
			own := **t
			own.Connections /= len(p.Servers)
			*t = &own
		}
	}
	return w
}

// progress adds up what the pairs report.
type progress struct {
	mu              sync.Mutex
	bytes, messages []uint64
	moved           func(bytes, messages uint64)
}

func newProgress(pairs int, moved func(bytes, messages uint64)) *progress {
	return &progress{bytes: make([]uint64, pairs), messages: make([]uint64, pairs), moved: moved}
}

func (p *progress) of(i int) func(bytes, messages uint64) {
	return func(bytes, messages uint64) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.bytes[i], p.messages[i] = bytes, messages
		if i == 0 { // report once a second, not once for each pair
			p.moved(sum(p.bytes), sum(p.messages))
		}
	}
}

func sum(all []uint64) (total uint64) {
	for _, v := range all {
		total += v
	}
	return total
}
