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

// measurement holds the tasks of a trial: those that drive its traffic, and those that sample the nodes. All begin when the last
// one is ready.
type measurement struct {
	*network
	// whole is the trial as one part. In a mesh, parts has one for each pair and then one for each sampled node.
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
	// servers are the ends of each pair. Clients, and both ends of the workload beside, are in out.
	servers [][]record.Endpoint

	mu  sync.Mutex // of what is sampled
	out *record.Trial
}

// measure runs the traffic of a cell and samples the nodes over the same window. Pairs on nodes in failed fail.
func (n *network) measure(ctx context.Context, c Cell, pairs []pairEnds, failed map[string]error, out *record.Trial, moved func(bytes, messages uint64)) error {
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
	busy := n.machinesOf(pairs)
	sampled := slices.DeleteFunc(slices.Clone(n.nodes), func(p place.Place) bool { return p.Unprivileged || !busy[n.machineOf(p.Node)] })
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
	for i, of := range m.servers {
		out.PerPair[i].Server = of[0]
		if pairs[i].Backends {
			out.PerPair[i].Server, out.PerPair[i].Backends = combined(of), of
		}
	}
	silent := m.silences(pairs)
	m.judgeParts(silent)
	if err := m.noteFailures(pairs); err != nil {
		return err
	}
	n.nameHosts(out.Hosts)
	slices.SortFunc(out.Fastpath, func(a, b record.Fastpath) int { return cmp.Compare(a.Place, b.Place) })
	slices.SortFunc(out.VFs, func(a, b record.VFUse) int {
		return cmp.Or(cmp.Compare(a.Place, b.Place), cmp.Compare(a.NIC, b.NIC))
	})
	slices.SortFunc(out.DaemonSets, func(a, b record.DaemonSet) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Node, b.Node))
	})
	out.Loads = n.loads(sampled, out)
	if err := fillMetrics(c, out); err != nil {
		return err
	}
	if c.Round > 0 {
		if n.unsampled(pairs, out) {
			leaveOutCPUs(out.Metrics)
		}
		return nil
	}
	return cmp.Or(judge(c, out.PerPair, silent), judgeBeside(c, out.PerPair))
}

// machinesOf returns the machines on which pairs are. Variants that choose nodes by labels leave others idle, whose counters say
// nothing about the trial.
func (n *network) machinesOf(pairs []pairEnds) map[string]bool {
	busy := make(map[string]bool)
	for _, p := range pairs {
		busy[n.machineOf(p.client.place.Node)] = true
		for _, s := range p.servers {
			busy[n.machineOf(s.place.Node)] = true
		}
	}
	return busy
}

// unsampled reports whether a machine with traffic did not return what its CPUs did. What the others did would then pass for all of
// it.
func (n *network) unsampled(pairs []pairEnds, t *record.Trial) bool {
	var measured []pairEnds
	for i, p := range pairs {
		if t.PerPair[i].Error == "" {
			measured = append(measured, p)
		}
	}
	for machine := range n.machinesOf(measured) {
		if !slices.ContainsFunc(t.Hosts, func(h record.Host) bool { return h.Boot == machine }) {
			return len(t.Hosts) > 0 // without any, the figures are a tool's
		}
	}
	return false
}

// machineOf identifies the machine of a node, which nodes of a lab share: by its boot or, if that is unknown, the node's name.
func (n *network) machineOf(node string) string {
	i := slices.IndexFunc(n.facts, func(f record.Node) bool { return f.Name == node })
	if i < 0 {
		return node
	}
	return cmp.Or(n.facts[i].Boot, node)
}

// addPair adds the servers and the client of pair i, and those of the workload beside.
func (m *measurement) addPair(i int, pair pairEnds) {
	part := m.newPart()
	m.servers[i] = make([]record.Endpoint, len(pair.servers))
	servers := make([]*record.Endpoint, len(pair.servers))
	for j := range servers {
		servers[j] = &m.servers[i][j]
	}
	m.addTraffic(part, pair, exchange{i, m.cell.Workload, "", &m.out.PerPair[i].Client, servers, m.progress.of(i)})
	if m.cell.Beside != nil {
		other := new(record.Beside)
		m.out.PerPair[i].Beside = other
		m.addTraffic(part, pair.beside(), exchange{i, *m.cell.Beside, " beside", &other.Client, []*record.Endpoint{&other.Server}, func(uint64, uint64) {}})
	}
}

// exchange is the traffic of a workload at a pair, and where its ends report to.
type exchange struct {
	pair     int
	workload spec.Workload
	suffix   string // of its roles
	client   *record.Endpoint
	servers  []*record.Endpoint
	moved    func(bytes, messages uint64)
}

// addTraffic adds the servers and the client of an exchange.
func (m *measurement) addTraffic(part *part, pair pairEnds, x exchange) {
	traffic := func(s end, w spec.Workload) place.Traffic {
		return place.Traffic{Place: s.place.Name, Workload: w, CongestionControl: m.setup.CongestionControl, Secret: m.secret}
	}
	settings := x.workload.Traffic()
	ports := make(chan uint16, len(pair.servers))
	// The server of another tool has nothing to report, and ends with its client. So does a server for a fixed number
	// of requests, because it does not know which one is the last.
	serveCtx, clientDone := part.ctx, func() {}
	if settings.Tool != spec.ToolNative || m.early != nil {
		serveCtx, clientDone = context.WithCancel(part.ctx)
	}
	for j, server := range pair.servers {
		m.add(part, server, fmt.Sprintf("server %d of pair %d%s", j, x.pair, x.suffix), func() {}, func(w Worker, ready place.Ready) (err error) {
			t := traffic(server, workloadOfServer(x.workload, pair.Pair))
			if t.Address = pair.Listen(server.place, settings.IP); t.Address.Port() == 0 {
				t.Address = netip.AddrPortFrom(t.Address.Addr(), settings.PortOf(x.pair))
			}
			t.Ports = pair.Ports
			*x.servers[j], err = w.Serve(serveCtx, t, func(p uint16) (time.Time, error) {
				ports <- p
				return ready(p)
			})
			if serveCtx.Err() != nil && part.ctx.Err() == nil {
				return nil
			}
			return err
		})
	}
	done := func() {
		clientDone()
		if m.driving.Add(-1) == 0 && m.early != nil {
			close(m.early)
		}
	}
	m.add(part, pair.client, fmt.Sprintf("client of pair %d%s", x.pair, x.suffix), done, func(w Worker, ready place.Ready) (err error) {
		t := traffic(pair.client, x.workload)
		for range pair.servers {
			select {
			case p := <-ports:
				t.Address = netip.AddrPortFrom(pair.To.Addr(), p)
			case <-part.ctx.Done():
				return context.Cause(part.ctx)
			}
		}
		*x.client, err = w.Drive(part.ctx, t, ready, x.moved)
		return err
	})
}

// workloadOfServer returns the workload of each server of a pair. Long-lived connections are divided among backends; connections that
// come and go are not.
func workloadOfServer(w spec.Workload, p place.Pair) spec.Workload {
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

// addSampler adds the task that samples a node.
func (m *measurement) addSampler(node place.Place) {
	part := m.newPart()
	m.add(part, end{node, controlOf(node)}, "sample", func() {}, func(w Worker, ready place.Ready) error {
		sample, err := w.Sample(part.ctx, place.Sampling{
			Place: node.Name, CPUs: m.sampleCPUs[node.Name], Connections: m.cell.connections(),
			Warmup: time.Duration(m.spec.Warmup), Duration: time.Duration(m.spec.Duration), Early: m.early,
		}, ready)
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
		m.out.DaemonSets = append(m.out.DaemonSets, sample.DaemonSets...)
		if sample.Series != "" {
			m.out.Series[node.Name] = sample.Series
		}
		return err
	})
}

// add adds a task of a worker to a part, which calls done at its end, even if there is no worker. The first task that fails makes the
// part fail, and stops its other tasks.
func (m *measurement) add(p *part, s end, role string, done func(), do func(w Worker, ready place.Ready) error) {
	who := s.place.Name + " (" + role + ")"
	p.ends = append(p.ends, s)
	m.gate.expect(who, p.cancel)
	m.tasks = append(m.tasks, func() error {
		defer done()
		w, err := m.openWorker(p.ctx, s.key, s.place)
		if err == nil {
			err = do(w, func(uint16) (time.Time, error) { return m.gate.ready(p.ctx, who) })
		}
		if err != nil && p.ctx.Err() == nil {
			p.cancel(cmp.Or(m.deadWorker(p), fmt.Errorf("%s: %w", s.place.Name, err)))
			m.drop(s.key)
		}
		m.gate.done(who)
		return err
	})
}

// deathTime bounds how long workers may take to show that they live. In a cluster the API server reports a death, possibly
// with a delay.
const deathTime = 5 * time.Second

// deadWorker returns which worker of a part has died, and why. The other ends of its connections may report first that these
// were reset or refused, which does not show the cause.
func (m *measurement) deadWorker(p *part) error {
	ctx, cancel := context.WithTimeout(p.ctx, deathTime)
	defer cancel()
	deaths := make([]error, len(p.ends))
	var wg sync.WaitGroup
	for i, s := range p.ends {
		w := m.workerOf(s.key)
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

// combined sums up what the backends of a pair did.
func combined(backends []record.Endpoint) record.Endpoint {
	all := record.Endpoint{Silent: backends[0].Silent}
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
		all.Silent = min(all.Silent, e.Silent)
		all.Warnings = append(all.Warnings, e.Warnings...)
	}
	all.Place = strings.Join(names, " ")
	return all
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
