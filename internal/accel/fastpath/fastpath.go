//go:build linux

// Package fastpath lets packets of pods' established connections over a VXLAN overlay
// past the bridge, routing and netfilter of a node, and keeps that safe: it finds the
// devices, attaches the programs of bpf/fastpath.c to them, follows what changes, and
// is the heart without whose beat the programs do nothing.
//
// Which packet goes where is the programs' business; what an accelerator is, and when
// one is applied, that of internal/accel. docs/fastpath.md tells the path of a packet.
//
// Nothing of it outlives the process: programs, maps and attachments go with it, and
// there is nothing to put back. What conntrack knows of connections that are open then is
// renewed (conntrack.go); if the process is killed, conntrack goes on not to check their window,
// until they have been idle on the fast path of the next.
package fastpath

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"slipstream.dev/bpf"
)

// LeaseTime is how long the programs work on without a beat.
const LeaseTime = 2 * time.Second

const (
	leaseRenewal = LeaseTime / 4
	// forgetWhenFull is how many beats a connection may be idle where there is little room: it is
	// not on the fast path by then.
	forgetWhenFull = 4
	// sweepEvery is how many beats pass from one look at all connections to the next.
	sweepEvery = 8
	// scanShare is how much longer than a look at the devices took there is none, whatever is
	// announced meanwhile.
	scanShare = 10
)

// forgetAfter is how many beats a connection may be idle until it is forgotten; tests have less
// patience.
var forgetAfter = 20

// idleAfter is how many beats a pod is watched without a connection; tests have less patience.
var idleAfter = 64

// Hook is a program at a device.
type Hook struct {
	Device string
	// Program is its name in bpf/fastpath.c.
	Program string
}

// Fastpath is the fast path of one node, from Start to Close.
type Fastpath struct {
	log      *slog.Logger
	programs *bpf.Fastpath
	ns       netns.NsHandle
	links    *netlink.Handle
	changes  *invalidator
	// unseenBy are the kinds of observers that packets may jump; ours the programs.
	unseenBy []string
	ours     map[ebpf.ProgramID]bool

	quit, resync, news chan struct{}
	// leasing is what keeps the programs alive, running is what ends with them.
	leasing, running sync.WaitGroup
	resyncs          resyncs
	warnResync       sync.Once
	dropForged       forgedFilter
	warnDropForged   sync.Once
	pods             pods
	// pause is how long there is to be no look at the devices after the last.
	pause time.Duration
	// verify has the next look at the devices ask the kernel for every attachment too.
	verify atomic.Bool

	// mu guards what follows.
	mu       sync.Mutex
	node     node
	detector detector
	active   bool
	attached map[attachment]link.Link
	// inspected is how many sides of devices have been inspected in this round.
	inspected int
	// failed says why the last try to attach failed, for as long as there is the device.
	failed   map[attachment]error
	skipped  []string
	repaired int
	problem  error
}

type attachment struct {
	device  int
	program string
}

// Start makes the fast path of a network namespace, which stays open until Close, with
// the devices that are there and those that come later. What it does not understand
// stays as it is, and so does what others observe, but for kinds of v1alpha1's Fastpath that
// may be unseenBy: see Refused. It fails where the kernel lacks something.
func Start(ns netns.NsHandle, log *slog.Logger, unseenBy ...string) (f *Fastpath, err error) {
	f = &Fastpath{
		log: log, ns: ns, unseenBy: unseenBy, quit: make(chan struct{}), resync: make(chan struct{}, 1), news: make(chan struct{}, 1),
		attached: make(map[attachment]link.Link), failed: make(map[attachment]error), pods: pods{used: make(map[int]time.Time), asked: make(map[netip.Addr]bool)},
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("start the fast path: %w", err), f.Close())
			f = nil
		}
	}()
	if f.programs, err = bpf.LoadFastpath(); err != nil {
		return f, err
	}
	if f.ours, err = idsOf(f.programHooks()); err != nil {
		return f, err
	}
	// To load them took all types of the kernel: 10 MiB that an idle process would keep
	// for minutes.
	debug.FreeOSMemory()
	if f.links, err = netlink.NewHandleAt(ns, unix.NETLINK_ROUTE); err != nil {
		return f, fmt.Errorf("open netlink: %w", err)
	}
	// Heard before looked at, so that nothing is missed between.
	if f.changes, err = newInvalidator(ns, f.changed); err != nil {
		return f, err
	}
	// A kernel that cannot is one thing, not to be permitted another.
	if err := within(ns, f.resyncs.try); errors.Is(err, fs.ErrPermission) {
		return f, err
	}
	started := make(chan error, 1)
	f.leasing.Go(func() {
		if err := within(ns, func() error { return f.run(started) }); err != nil {
			started <- err
		}
	})
	f.running.Go(func() {
		if err := within(ns, f.handleEvents); err != nil {
			log.Error("handle events of the fast path", "error", err)
		}
	})
	return f, <-started
}

// Plan tells what is attached where on a fast path that watches all pods.
func Plan(ns netns.NsHandle, unseenBy ...string) (all []Hook, err error) {
	err = within(ns, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return fmt.Errorf("open netlink: %w", err)
		}
		defer h.Close()
		// Those of whoever holds a fast path are told by their names.
		n, err := look(h, nil, unseenBy, func(id ebpf.ProgramID) bool { return slices.Contains(programs, programName(id)) })
		for _, a := range n.attachments(n.veths, true) {
			all = append(all, Hook{n.names[a.device], a.program})
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("plan the fast path: %w", err)
	}
	return all, nil
}

// Close takes the programs off. It is safe on what Start did not finish.
func (f *Fastpath) Close() error {
	close(f.quit)
	var errs []error
	if f.changes != nil {
		f.changes.close()
	}
	f.leasing.Wait()
	// Without a beat they carry nothing, and go on to follow what conntrack is to know.
	if f.programs != nil {
		// What is left is not judged by numbers that go on without the programs.
		errs = append(errs, f.programs.RenewLease(0), f.releaseAll(), f.dropForged.close())
	}
	f.mu.Lock()
	for at, l := range f.attached {
		errs = append(errs, l.Close())
		delete(f.attached, at)
	}
	f.mu.Unlock()
	if f.programs != nil {
		errs = append(errs, f.programs.Close())
	}
	f.running.Wait()
	errs = append(errs, f.resyncs.close())
	if f.changes != nil {
		errs = append(errs, f.changes.release())
	}
	if f.links != nil {
		f.links.Close()
	}
	return errors.Join(errs...)
}

// releaseAll has conntrack check the windows of all connections again.
func (f *Fastpath) releaseAll() error {
	flows, err := f.programs.Flows()
	if err != nil {
		return err
	}
	return within(f.ns, func() error {
		// Those that never pause are given so long in all.
		until := time.Now().Add(releaseTimeout)
		for len(flows) > 0 {
			for flow := range flows {
				done, err := f.release(flow, false)
				if err == nil && !done && time.Now().Before(until) {
					continue
				}
				if err == nil && !done {
					err = abandon(flow)
				}
				if err != nil {
					f.log.Warn("resynchronise conntrack with a connection that leaves the fast path", "connection", flow, "error", err)
				}
				delete(flows, flow)
			}
			time.Sleep(time.Millisecond)
		}
		return nil
	})
}

// releaseTimeout bounds what Close does for connections that are busy.
const releaseTimeout = 2 * time.Second

// release has conntrack check the window of a connection again, if it pauses. If it does not, or
// not all of it was seen, conntrack goes on to be liberal with it. One that has been idle for long
// has paused, even if what was sent last was never acknowledged, as by a host that is gone.
func (f *Fastpath) release(flow bpf.Flow, idle bool) (done bool, err error) {
	if flow.Protocol != unix.IPPROTO_TCP {
		return true, nil
	}
	now, err := monotonic()
	if err != nil {
		return false, err
	}
	n, err := f.programs.Sequence(flow, now)
	if err != nil {
		return false, err
	}
	known := n
	if idle && n != (bpf.Sequence{}) {
		// What is sent again has conntrack know that it is not acknowledged.
		known.Pod.Next, known.Peer.Next = n.Peer.Expects, n.Pod.Expects
	} else if !n.Acknowledged() {
		if is, err := lookUp(flow); err == nil && (is == nil || (is.flags[0]|is.flags[1])&tcpLiberal == 0) {
			return true, nil // it was never carried
		}
		return false, nil
	}
	if err := f.resyncConntrack(flow, known, false); errors.Is(err, errMissed) {
		return false, nil
	} else if err != nil {
		return false, errors.Join(err, abandon(flow))
	}
	after, err := f.sequence(flow)
	switch {
	case err != nil:
		return true, err
	case after != n:
		// Conntrack has missed some of what came meanwhile.
		return false, liberal(flow)
	case known != n:
		return true, unacknowledged(flow, now-n.Last)
	}
	return true, nil
}

// sequence are the TCP sequence numbers of a connection, zero if not all are known.
func (f *Fastpath) sequence(flow bpf.Flow) (bpf.Sequence, error) {
	now, err := monotonic()
	if err != nil {
		return bpf.Sequence{}, err
	}
	return f.programs.Sequence(flow, now)
}

// renew has conntrack know a connection's numbers, if this kernel can.
func (f *Fastpath) resyncConntrack(flow bpf.Flow, n bpf.Sequence, carried bool) error {
	now, err := monotonic()
	if err != nil {
		return err
	}
	err = f.resyncs.do(func(r *resyncer) error { return r.resync(flow, n, now-n.Last, carried) })
	if errors.Is(err, errCannotResync) {
		f.warnResync.Do(func() { f.log.Warn("conntrack stays liberal with accelerated connections: it cannot be resynchronised", "error", err) })
		return abandon(flow)
	}
	return err
}

// Counts tells what became of packets: see bpf.Fastpath.
func (f *Fastpath) Counts() (map[string]uint64, error) { return f.programs.Counts() }

// Connections counts those that are known, and those of them that take the fast path now.
func (f *Fastpath) Connections() (known, fast int, err error) {
	now, err := monotonic()
	if err != nil {
		return 0, 0, err
	}
	return f.programs.Accelerated(now)
}

// TablesWorn tells whether it is time to begin anew: its tables fill with what has been there
// once, and what finds no room in them stays on the slow path.
func (f *Fastpath) TablesWorn() bool {
	worn, err := f.programs.TablesWorn()
	if err != nil {
		f.log.Warn("check the tables of the fast path", "error", err)
	}
	return worn
}

// Verify has the devices looked at anew soon, every program attached again that somebody
// has taken off, and moved to the end behind which others have come.
func (f *Fastpath) Verify() {
	f.verify.Store(true)
	poke(f.resync)
}

// Changes gets something after Hooks, Refused, Repaired or Problem have become others.
func (f *Fastpath) Changes() <-chan struct{} { return f.news }

// Repaired is how often a program was found to be taken off, and was attached again.
func (f *Fastpath) Repaired() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.repaired
}

// Problem is why all packets take the slow path now, if they do: the devices could not
// be looked at, or the heart does not beat.
func (f *Fastpath) Problem() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.problem
}

func (f *Fastpath) setProblem(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if (err == nil) != (f.problem == nil) {
		poke(f.news)
	}
	f.problem = err
}

// poke has whoever waits go on, now or when he comes to wait.
func poke(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// Hooks are where programs are attached now. There are none while no pod has a connection
// that is worth it, though scouts may look for one.
func (f *Fastpath) Hooks() []Hook {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.active {
		return nil
	}
	var all []Hook
	for at := range f.attached {
		all = append(all, Hook{f.node.names[at.device], at.program})
	}
	slices.SortFunc(all, func(a, b Hook) int {
		return strings.Compare(a.Device+" "+a.Program, b.Device+" "+b.Program)
	})
	return all
}

// VXLANDevices are the VXLAN devices whose packets it may carry.
func (f *Fastpath) VXLANDevices() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.node.tunnels()
}

// Skipped says, a sentence each, which devices are left to the slow path, and why.
func (f *Fastpath) Skipped() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.skipped)
}

// changed is called for what the kernel announces.
func (f *Fastpath) changed(generation uint32, devices bool) {
	if err := f.programs.SetGeneration(generation); err != nil {
		f.log.Error("invalidate the fast path", "error", err)
	}
	if devices {
		poke(f.resync)
	}
}

// run beats, and keeps the devices in step. Its thread is in the network namespace, as
// programs are attached to a device of the thread's. If anything in here hangs, the beat
// stops, and with it the fast path. It fails only before it says that it has started.
func (f *Fastpath) run(started chan<- error) error {
	err := f.sync()
	if err == nil {
		err = f.renewLease()
	}
	if err != nil {
		return err
	}
	started <- nil
	ticker := time.NewTicker(detectEvery)
	defer ticker.Stop()
	unseen := make(map[bpf.Flow]time.Duration)
	resync, paused := f.resync, make(<-chan time.Time)
	var synced error
	for n := 0; ; {
		select {
		case <-f.quit:
			return nil
		case <-paused:
			resync = f.resync
		case <-resync:
			if synced = f.sync(); synced != nil {
				f.log.Warn("scan devices for the fast path", "error", synced)
				// What is not known is not to be used.
				if err := f.programs.SetVXLANDevices(nil); err != nil {
					f.log.Error("clear the VXLAN devices of the fast path", "error", err)
				}
			}
			f.setProblem(synced)
			resync, paused = nil, time.After(f.pause)
		case now := <-ticker.C:
			if err := f.detect(now); err != nil {
				f.log.Warn("detect eligible connections", "error", err)
			}
			if n++; n%int(leaseRenewal/detectEvery) > 0 {
				continue
			}
			if err := f.renewLease(); err != nil {
				f.log.Error("renew the lease of the fast path", "error", err)
				f.setProblem(err)
			} else {
				f.setProblem(synced)
			}
			if err := f.inspect(); err != nil {
				f.log.Warn("look for observers at devices of the fast path", "error", err)
			}
			if n%int(sweepEvery*leaseRenewal/detectEvery) > 0 {
				continue
			}
			if err := f.forget(unseen); err != nil {
				f.log.Warn("forget connections of the fast path", "error", err)
				continue
			}
			if f.pods.rest() || f.changes.restless() {
				poke(f.resync)
			}
			if err := f.resyncs.rest(); err != nil {
				f.log.Warn("detach the program that drops resync packets", "error", err)
			}
		}
	}
}

func (f *Fastpath) renewLease() error {
	now, err := monotonic()
	if err != nil {
		return err
	}
	return f.programs.RenewLease(now + LeaseTime)
}

// monotonic is the time of the programs.
func monotonic() (time.Duration, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return time.Duration(now.Nano()), nil
}

// threadTime is the CPU time of the calling thread: unlike that of a clock it does not go on while
// the process waits for a CPU, or is stopped.
func threadTime() (time.Duration, error) {
	var used unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &used); err != nil {
		return 0, fmt.Errorf("read the thread's clock: %w", err)
	}
	return time.Duration(used.Nano()), nil
}

// attach has a pod's link be watched, which has a connection worth it.
func (f *Fastpath) attach(link int) {
	if link != 0 && f.pods.use(link) {
		poke(f.resync)
	}
}

// forget takes out connections that have been idle for a while, so that there is room, and has
// the pods of all others be watched. They are looked up no more by then but by their next
// packet, which becomes known anew. Since when one has been there that was never seen to get
// through, unseen says.
func (f *Fastpath) forget(unseen map[bpf.Flow]time.Duration) error {
	flows, err := f.programs.Flows()
	if err != nil {
		return err
	}
	for flow := range unseen {
		if seen, known := flows[flow]; !known || seen.Validated != 0 {
			delete(unseen, flow)
		}
	}
	now, err := monotonic()
	if err != nil {
		return err
	}
	idle := time.Duration(forgetAfter) * leaseRenewal
	crowded := len(flows) > f.programs.Room()/4*3
	if crowded {
		idle = forgetWhenFull * leaseRenewal
	}
	for flow, seen := range flows {
		since := seen.Validated
		if since == 0 {
			if unseen[flow] == 0 {
				unseen[flow] = now
			}
			since = unseen[flow]
		}
		if now-since > idle {
			delete(unseen, flow)
			// There may be thousands.
			if err := f.renewLease(); err != nil {
				return err
			}
			done, err := f.release(flow, true)
			if err != nil {
				f.log.Warn("resynchronise conntrack with an idle connection", "connection", flow, "error", err)
			} else if n, err := f.sequence(flow); err != nil {
				return err
			} else if !done && n != (bpf.Sequence{}) && !crowded {
				f.attach(seen.Link) // conntrack is still liberal with it, which takes a guard
				continue
			}
			if err := f.programs.Forget(flow); err != nil {
				return err
			}
			continue
		}
		f.attach(seen.Link)
	}
	if len(flows) == 0 {
		return f.dropForged.rest()
	}
	f.ensureDropForged()
	return nil
}

// ensureDropForged has forged ends of connections be dropped, if this kernel can.
func (f *Fastpath) ensureDropForged() {
	err := f.dropForged.start(f.programs)
	if err != nil {
		f.warnDropForged.Do(func() {
			f.log.Warn("forged FIN and RST packets can have conntrack delete entries of accelerated connections", "error", err)
		})
	}
}

// reopen has conntrack hold a connection as established, if it took it to have ended and it has not.
func (f *Fastpath) reopen(flow bpf.Flow) error {
	if flow.Protocol != unix.IPPROTO_TCP {
		return nil
	}
	now, err := monotonic()
	if err != nil {
		return err
	}
	n, err := f.programs.Sequence(flow, now)
	if err != nil || n == (bpf.Sequence{}) {
		return err
	}
	return reopen(flow, now-n.Last)
}

// handleEvents does as the programs ask, until they are closed.
func (f *Fastpath) handleEvents() error {
	for {
		news, err := f.programs.ReadEvent()
		if errors.Is(err, ringbuf.ErrClosed) {
			return nil
		}
		if err == nil {
			err = f.handle(news)
		}
		if err != nil {
			f.log.Warn("handle an event of the fast path", "connection", news.Flow, "error", err)
		}
	}
}

// handle does what the programs ask for: watches a pod, or tells conntrack of a connection.
func (f *Fastpath) handle(news bpf.Event) error {
	flow := news.Flow
	switch {
	case news.Kind == bpf.EventAttach:
		link, anew := f.pods.linkOf(news.Pod)
		if anew {
			poke(f.resync)
		}
		f.attach(link)
		return nil
	case news.Kind == bpf.EventLiberal:
		f.ensureDropForged()
		return liberal(flow)
	case news.Kind == bpf.EventReopen:
		return f.reopen(flow)
	case news.Kind == bpf.EventAcked:
		return acked(flow)
	case news.Kind == bpf.EventReset:
		return reset(flow)
	}
	n, err := f.sequence(flow)
	if err != nil || n == (bpf.Sequence{}) {
		return err
	}
	if err := f.resyncConntrack(flow, n, true); !errors.Is(err, errMissed) {
		return err
	}
	return nil
}

// detect has the programs at the VXLAN devices look for connections, or not.
func (f *Fastpath) detect(now time.Time) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.active {
		f.detector = detector{}
		return nil
	}
	if f.closing() {
		return nil
	}
	n, err := packets(f.links, f.node)
	if err != nil {
		poke(f.resync) // what is wrong it will say
		return nil
	}
	if !f.detector.look(now, n) {
		return nil
	}
	return f.attachPrograms(false)
}

// sync looks at the devices that are there, tells the programs of them, and attaches these.
func (f *Fastpath) sync() error {
	began, err := threadTime()
	if err != nil {
		return err
	}
	known, err := f.changes.known(func() ([]netlink.Neigh, error) { return speaksTo(f.links) })
	if err != nil {
		return err
	}
	node, err := look(f.links, known, f.unseenBy, f.own)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closing() {
		return nil
	}
	restless, err := f.changes.own(&node, f.programs.SetLinkMACs)
	if err := errors.Join(
		err,
		f.programs.SetVXLANDevices(node.overlays),
		f.programs.SetNode(node.mtu, node.ports[0], node.ports[1]),
	); err != nil {
		return err
	}
	for _, link := range restless {
		node.skipped = append(node.skipped, node.names[link]+": which Ethernet addresses are behind it changes too often; another pod may be taking them")
	}
	verify := f.verify.Swap(false)
	if verify {
		f.pods.forget()
	}
	for _, address := range f.pods.wanted() {
		if link := node.routed(f.links, address); link != 0 {
			node.behind[address] = link
		}
	}
	used, err := threadTime()
	if err != nil {
		return err
	}
	f.pause = scanShare * (used - began)
	if !slices.Equal(node.tunnels(), f.node.tunnels()) {
		poke(f.news)
	}
	refused := f.skipped
	f.node = node
	err = f.attachPrograms(verify)
	if slices.ContainsFunc(f.skipped, func(why string) bool { return !slices.Contains(refused, why) }) {
		// What was seen at a device that is left alone now is void.
		f.changes.void()
	}
	return err
}

// inspectMax bounds the sides of devices that are asked for in a beat: those of 128 pods that
// have connections, and of the next ones in the next beat.
const inspectMax = 256

// inspect has the devices be looked at anew where something has changed that is not announced: a
// sysctl, a program of XDP or tcx. It asks for VXLAN devices, bridges, NICs, and the links of pods
// that have programs of ours.
func (f *Fastpath) inspect() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	why, err := everywhere(f.unseenBy)
	if err != nil {
		return err
	}
	changed := why != f.node.everywhere
	hooks := f.programHooks()
	ours := make(map[side]bool)
	for a := range f.attached {
		ours[side{a.device, hooks[a.program].egress}] = true
	}
	sides := slices.Collect(maps.Keys(ours))
	for _, device := range f.node.guarded {
		for _, s := range both(device) {
			if !ours[s] {
				sides = append(sides, s)
			}
		}
	}
	slices.SortFunc(sides, func(a, b side) int {
		return cmp.Or(cmp.Compare(a.device, b.device), cmp.Compare(a.String(), b.String()))
	})
	sides, f.inspected = turn(sides, f.inspected)
	for _, s := range sides {
		// The kernel has each wait for its turn.
		if err := f.renewLease(); err != nil {
			return err
		}
		as, err := f.asSeen(s, ours[s])
		if err != nil {
			return err
		}
		changed = changed || !as
	}
	if changed {
		f.Verify()
	}
	return nil
}

// turn is the part of all sides that begins behind so many, and how many are behind it.
func turn(all []side, from int) (part []side, next int) {
	if from >= len(all) {
		from = 0
	}
	next = min(from+inspectMax, len(all))
	return all[from:next], next
}

// asSeen tells whether a side has the programs that it had at the last look, and ours behind them
// if it is to have one.
func (f *Fastpath) asSeen(s side, ours bool) (bool, error) {
	all, err := programsAt(s)
	if err != nil || ours && (len(all) == 0 || !f.own(all[len(all)-1])) {
		return false, err
	}
	was, asked := f.node.observers.programs[s]
	if asked && !slices.Equal(slices.DeleteFunc(all, f.own), was) {
		return false, nil
	}
	if s.egress || !slices.Contains(f.node.guarded, s.device) {
		return true, nil
	}
	l, err := f.links.LinkByIndex(s.device)
	return err != nil || hasXDP(l) == f.node.observers.xdp[s.device], nil // one that is gone is announced
}

// closing tells whether it is being closed: what is attached now would stay.
func (f *Fastpath) closing() bool {
	select {
	case <-f.quit:
		return true
	default:
		return false
	}
}

// programs are their names.
var programs = []string{"observe_nic", "nic_decap", "observe_vxlan", "vxlan_ingress", "encap", "observe_pod"}

// hook is a program and the side of a device that it is for.
type hook struct {
	program *ebpf.Program
	egress  bool
}

func (f *Fastpath) programHooks() map[string]hook {
	return map[string]hook{
		"observe_nic":   {f.programs.ObserveNIC, true},
		"nic_decap":     {f.programs.NICDecap, false},
		"observe_vxlan": {f.programs.ObserveVXLAN, true},
		"vxlan_ingress": {f.programs.VXLANIngress, false},
		"encap":         {f.programs.Encap, false},
		"observe_pod":   {f.programs.ObservePod, true},
	}
}

// idsOf are the kernel's numbers of programs.
func idsOf(hooks map[string]hook) (map[ebpf.ProgramID]bool, error) {
	ids := make(map[ebpf.ProgramID]bool)
	for name, h := range hooks {
		info, err := h.program.Info()
		if err != nil {
			return nil, fmt.Errorf("ask for the number of program %s: %w", name, err)
		}
		id, _ := info.ID()
		ids[id] = true
	}
	return ids, nil
}

func (f *Fastpath) own(id ebpf.ProgramID) bool { return f.ours[id] }

// attachPrograms has those programs be attached that are needed at the devices of the node.
func (f *Fastpath) attachPrograms(verify bool) error {
	hooks := f.programHooks()
	node := f.node
	links, watched := f.pods.follow(node)
	attachments := node.attachments(links, f.detector.on)
	want := make(map[attachment]bool)
	for _, a := range attachments {
		want[a] = true
	}
	var errs []error
	// Of scouts that come and go there is no news.
	quiet := !f.active && len(links) == 0
	changed := false
	for a, l := range f.attached {
		// The kernel takes its time with each, and there may be hundreds.
		errs = append(errs, f.renewLease())
		switch {
		case !want[a]:
			if _, there := node.names[a.device]; there && !slices.Contains(node.veths, a.device) {
				errs = append(errs, f.programs.InvalidateSequences()) // packets go on there, and are not seen
			}
			errs = append(errs, l.Close())
		case verify && !holds(l, a.device):
			f.log.Warn("somebody detached a program of the fast path; it is attached again", "device", node.names[a.device], "program", a.program)
			errs = append(errs, f.programs.InvalidateSequences(), l.Close())
			f.repaired++
		case verify && !f.last(side{a.device, hooks[a.program].egress}):
			f.log.Info("another program was attached behind one of the fast path, which would bypass it; the fast path moves to the end", "device", node.names[a.device], "program", a.program)
			errs = append(errs, f.programs.InvalidateSequences(), l.Close())
		default:
			continue
		}
		delete(f.attached, a)
		changed = true
	}
	f.active = len(links) > 0
	errs = append(errs, f.setWatched(node, watched))
	for _, a := range attachments {
		if f.attached[a] != nil {
			continue
		}
		errs = append(errs, f.renewLease())
		h := hooks[a.program]
		l, err := link.AttachTCX(link.TCXOptions{Interface: a.device, Program: h.program, Attach: side{a.device, h.egress}.attach()})
		if errors.Is(err, unix.ENODEV) {
			continue // it went; a change will tell
		}
		if err != nil {
			// The others do without it: nothing is believed that has not passed all hooks.
			f.failed[a] = err
			continue
		}
		delete(f.failed, a)
		f.attached[a] = l
		changed = true
		if a.program == "observe_pod" {
			errs = append(errs, f.setWatched(node, watched))
		}
	}
	var failed []string
	for a, err := range f.failed {
		if name, there := node.names[a.device]; there {
			failed = append(failed, fmt.Sprintf("%s: attach %s: %v", name, a.program, err))
		} else {
			delete(f.failed, a)
		}
	}
	slices.Sort(failed)
	refused := slices.Concat(node.skipped, failed)
	for _, r := range refused {
		if !slices.Contains(f.skipped, r) {
			f.log.Info("the fast path skips " + r)
		}
	}
	if changed && !quiet || !slices.Equal(refused, f.skipped) {
		poke(f.news)
	}
	f.skipped = refused
	return errors.Join(errs...)
}

// setWatched tells the programs which pods are watched, of those whose links have deliver.
func (f *Fastpath) setWatched(n node, watched []int) error {
	addresses := make(map[int][]netip.Addr)
	for address, link := range n.behind {
		addresses[link] = append(addresses[link], address)
	}
	var all []bpf.Pod
	for _, link := range watched {
		if f.attached[attachment{link, "observe_pod"}] != nil {
			all = append(all, bpf.Pod{Link: link, Addresses: addresses[link]})
		}
	}
	return f.programs.SetWatched(all)
}

// last tells whether one of ours is the last program at a side, as far as the kernel says: those
// behind it would not see what it carries.
func (f *Fastpath) last(s side) bool {
	all, err := programsAt(s)
	return err != nil || len(all) == 0 || f.ours[all[len(all)-1]]
}

// holds tells whether a program is at its device still, as far as the kernel says.
func holds(l link.Link, device int) bool {
	info, err := l.Info()
	if err != nil {
		return true // and a reason to leave it alone
	}
	at := info.TCX()
	return at == nil || int(at.Ifindex) == device
}

// within runs fn on a thread that is in a network namespace. One that does not find back
// is not used again.
func within(ns netns.NsHandle, fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := netns.Get()
		if err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("open this network namespace: %w", err)
			return
		}
		defer home.Close()
		if err = netns.Set(ns); err != nil {
			err = fmt.Errorf("enter a network namespace: %w", err)
		} else {
			err = fn()
		}
		if back := netns.Set(home); back != nil {
			err = errors.Join(err, fmt.Errorf("leave a network namespace: %w", back))
		} else {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}
