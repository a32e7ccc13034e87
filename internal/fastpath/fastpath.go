//go:build linux

// Package fastpath runs the fast path of a node: packets of pods' established connections
// to other nodes bypass the node's bridge, routing and netfilter. It finds the devices,
// attaches the programs of bpf/fastpath/fastpath.c, invalidates flows when the network changes, and
// renews the lease without which the programs forward nothing.
//
// The programs decide which path a packet takes; internal/accel decides when the fast path is
// applied. docs/explanation/fastpath.md describes the path of a packet.
//
// Nothing outlives the process: the kernel removes programs, maps and attachments with it. Close resynchronises conntrack with
// the open connections (package conntrack). If the process is killed, their conntrack entries stay liberal until the next
// process finds the connections idle.
package fastpath

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
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
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath/conntrack"
	"slipstream.dev/internal/fastpath/datapath"
	"slipstream.dev/internal/netns"
)

// LeaseTime is the time for which the programs forward packets after the last renewal of the lease.
const LeaseTime = 2 * time.Second

const (
	leaseRenewal = LeaseTime / 4
	// forgetWhenFull replaces forgetAfter while the flow table is nearly full. After that time without a packet, a flow has
	// expired, so deleting it costs its connection nothing.
	forgetWhenFull = 4
	// sweepEvery is the interval between sweeps of the flow table, in lease renewals.
	sweepEvery = 8
	// After a scan of the devices, the next one waits for scanShare times the CPU time of the first: a burst of notifications
	// must not occupy a CPU.
	scanShare = 10
	// scanRetry is the shortest pause after a scan that failed.
	scanRetry = 100 * time.Millisecond
)

// scan is a variable because tests make it fail.
var scan = (*Fastpath).sync

// forgetAfter is the number of lease renewals after which the sweep forgets an idle connection.
// Tests shorten it.
var forgetAfter = 20

// idleAfter is the number of lease renewals after which a pod without an eligible connection is
// idle. Tests shorten it.
var idleAfter = 64

// Hook is a program attached to a device.
type Hook struct {
	Device string
	// Program is the program's name in bpf/fastpath/fastpath.c.
	Program string
}

// Fastpath runs the fast path of one node, from Start to Close.
type Fastpath struct {
	log      *slog.Logger
	programs *datapath.Programs
	ns       netns.Handle
	links    *netlink.Handle
	changes  *invalidator
	// unseenBy holds the kinds of observers that the fast path may bypass, ours the IDs of its own programs.
	unseenBy []string
	ours     map[ebpf.ProgramID]bool

	quit, rescan, updates chan struct{}
	// leasing waits for run, which renews the lease; running waits for handleEvents, which ends
	// when the programs are closed.
	leasing, running sync.WaitGroup
	entries          *conntrack.Entries
	dropForged       forgedFilter
	warnDropForged   sync.Once
	pods             activePods
	homes            homes
	// pause is the minimum time between the last scan of the devices and the next.
	pause time.Duration
	// verify makes the next scan also check every attachment in the kernel.
	verify atomic.Bool

	// mu guards the fields below.
	mu       sync.Mutex
	node     node
	detector detector
	local    localDetector
	active   bool
	attached map[attachment]link.Link
	// inspected is the number of attach points that inspect has checked in the current round.
	inspected int
	// failed holds the errors of attachments that failed, while their devices exist.
	failed   map[attachment]error
	skipped  []skip
	repaired int
	problem  error
}

type attachment struct {
	device  int
	program string
}

// Start runs the fast path in a network namespace until Close; the caller keeps ns open until then. The fast path also uses
// devices that appear later. It skips devices that it does not support, and devices with observers unless unseenBy has their
// kind (v1alpha1.Fastpath): see Skipped. Start fails if the kernel lacks a feature.
func Start(ns netns.Handle, log *slog.Logger, unseenBy ...string) (f *Fastpath, err error) {
	f = &Fastpath{
		log: log, ns: ns, unseenBy: unseenBy, quit: make(chan struct{}), rescan: make(chan struct{}, 1), updates: make(chan struct{}, 1),
		attached: make(map[attachment]link.Link), failed: make(map[attachment]error), pods: activePods{links: make(map[int]podLink), requested: make(map[netip.Addr]bool)},
		homes: make(homes),
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("start the fast path: %w", err), f.Close())
			f = nil
		}
	}()
	if f.programs, err = datapath.Load(); err != nil {
		return f, err
	}
	if f.ours, err = idsOf(f.programHooks()); err != nil {
		return f, err
	}
	// Loading has parsed the kernel's BTF, which takes 10 MiB. Return them now: an idle process would keep them for minutes.
	debug.FreeOSMemory()
	if f.links, err = netlink.NewHandleAt(ns, unix.NETLINK_ROUTE); err != nil {
		return f, fmt.Errorf("open netlink: %w", err)
	}
	// Subscribe before the first scan, so that no change falls between the two.
	if f.changes, err = newInvalidator(ns, f.changed); err != nil {
		return f, err
	}
	if err := netns.Do(ns, func() (err error) {
		f.entries, err = conntrack.New(f.programs, forConntrack{f}, log)
		return err
	}); err != nil {
		return f, err
	}
	started := make(chan error, 1)
	f.leasing.Go(func() {
		if err := netns.Do(ns, func() error { return f.run(started) }); err != nil {
			started <- err
		}
	})
	f.running.Go(func() {
		if err := netns.Do(ns, f.handleEvents); err != nil {
			log.Error("handle events of the fast path", "error", err)
		}
	})
	return f, <-started
}

// Plan returns the hooks that the fast path would have if every pod had an eligible connection.
func Plan(ns netns.Handle, unseenBy ...string) (all []Hook, err error) {
	err = netns.Do(ns, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return fmt.Errorf("open netlink: %w", err)
		}
		defer h.Close()
		// Another process may run the fast path; its programs are recognised by name.
		ours := func(id ebpf.ProgramID) bool { return slices.Contains(programNames, programName(id)) }
		n, err := scanDevices(h, nil, unseenBy, ours, func() error { return nil })
		for _, a := range n.attachments(n.veths, true, nil) {
			all = append(all, Hook{n.names[a.device], a.program})
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("plan the fast path: %w", err)
	}
	return all, nil
}

// Close detaches the programs. It also cleans up after a Start that failed.
func (f *Fastpath) Close() error {
	close(f.quit)
	if f.entries != nil {
		f.entries.Stop()
	}
	var errs []error
	if f.changes != nil {
		f.changes.close()
	}
	f.leasing.Wait()
	// Without a lease the programs forward nothing, but still follow the sequence numbers that
	// ReleaseAll needs.
	if f.programs != nil {
		errs = append(errs, f.programs.RenewLease(0))
	}
	if f.entries != nil {
		errs = append(errs, netns.Do(f.ns, f.entries.ReleaseAll))
	}
	// Detach drop_forged before the other programs: it must not judge packets by sequence numbers
	// that nobody updates.
	errs = append(errs, f.dropForged.close())
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
	if f.entries != nil {
		errs = append(errs, f.entries.Close())
	}
	if f.changes != nil {
		errs = append(errs, f.changes.release())
	}
	if f.links != nil {
		f.links.Close()
	}
	return errors.Join(errs...)
}

// Counts returns the number of packets by reason: see datapath.Programs.Counts.
func (f *Fastpath) Counts() (map[string]uint64, error) { return f.programs.Counts() }

// Connections counts the known connections, and the accelerated ones by kind: see datapath.Programs.Accelerated.
func (f *Fastpath) Connections() (known int, fast map[string]int, err error) {
	now, err := datapath.Now()
	if err != nil {
		return 0, nil, err
	}
	return f.programs.Accelerated(now)
}

// Verify requests a scan of the devices that also checks every attachment. It re-attaches programs that another process has
// detached, and moves programs back to the end of their attach point.
func (f *Fastpath) Verify() {
	f.verify.Store(true)
	poke(f.rescan)
}

// Changes receives a value after Hooks, Devices, Local, Skipped, Repaired or Problem have changed.
func (f *Fastpath) Changes() <-chan struct{} { return f.updates }

// Repaired returns how often a program that somebody had detached was attached again.
func (f *Fastpath) Repaired() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.repaired
}

// Problem returns why all packets take the slow path now, or nil: scanning the devices or renewing
// the lease failed.
func (f *Fastpath) Problem() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.problem
}

func (f *Fastpath) setProblem(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if (err == nil) != (f.problem == nil) {
		poke(f.updates)
	}
	f.problem = err
}

// poke wakes the receiver of ch. It does not block: a pending wake-up serves all.
func poke(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// Hooks returns the attached programs with their devices, without those that the detectors attach for a moment. While the fast
// path is idle it returns none.
func (f *Fastpath) Hooks() []Hook {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.active {
		return nil
	}
	var all []Hook
	for at := range f.attached {
		if !f.isSampling(at) {
			all = append(all, Hook{f.node.names[at.device], at.program})
		}
	}
	slices.SortFunc(all, func(a, b Hook) int {
		return strings.Compare(a.Device+" "+a.Program, b.Device+" "+b.Program)
	})
	return all
}

// Devices returns the names of the supported VXLAN devices, and of the NICs over which the node routes packets of pods without
// encapsulation.
func (f *Fastpath) Devices() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.node.supported()
}

// Local reports whether connections between pods of the node may take the fast path: not all links of pods are skipped.
func (f *Fastpath) Local() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.node.veths) > 0
}

// changed handles a change that the invalidator reports.
func (f *Fastpath) changed(generation uint32, devices bool) {
	if err := f.programs.SetGeneration(generation); err != nil {
		f.log.Error("invalidate the fast path", "error", err)
	}
	if devices {
		poke(f.rescan)
	}
}

// run renews the lease, scans the devices and sweeps the flow table until quit is closed. It runs in the network namespace,
// because the kernel resolves device indices there when it attaches programs. One goroutine does everything on purpose: if any
// step hangs, the lease expires and packets take the slow path. run returns an error only if it cannot start; once it has, it
// sends nil to started.
func (f *Fastpath) run(started chan<- error) error {
	err := scan(f)
	if err == nil {
		if err := f.entries.FindLiberal(); err != nil {
			f.log.Warn("find connections of a killed agent", "error", err)
		}
		err = f.renewLease()
	}
	if err != nil {
		return err
	}
	started <- nil
	ticker := time.NewTicker(detectEvery)
	defer ticker.Stop()
	unvalidated := make(map[datapath.Flow]time.Duration)
	rescan, paused := f.rescan, make(<-chan time.Time)
	var synced error
	interrupted := false
	began := time.Now()
	renewal, sweep := pace{leaseRenewal, began}, pace{sweepEvery * leaseRenewal, began}
	for {
		select {
		case <-f.quit:
			return nil
		case <-paused:
			rescan = f.rescan
		case <-rescan:
			err := scan(f)
			pause := f.pause
			if err != nil {
				if synced == nil || err.Error() != synced.Error() {
					f.log.Warn("scan devices for the fast path", "error", err)
				}
				poke(f.rescan)
				pause = max(pause, scanRetry)
			}
			// A change interrupted the scan, and also invalidated the flows if it concerns them. The next scan sees it.
			if interrupted = !interrupted && errors.Is(err, netlink.ErrDumpInterrupted); !interrupted {
				synced = err
			}
			if synced != nil {
				// Fail safe: the programs must not use devices in an unknown state.
				if err := errors.Join(f.programs.SetVXLANDevices(nil), f.programs.SetRouters(nil), f.programs.SetPodDevices(nil)); err != nil {
					f.log.Error("clear the devices of the fast path", "error", err)
				}
			}
			f.setProblem(synced)
			rescan, paused = nil, time.After(pause)
		case <-ticker.C:
			// The tick may be old: it was not received while programs were being attached.
			now := time.Now()
			if err := f.detect(now); err != nil {
				f.log.Warn("detect eligible connections", "error", err)
			}
			if !renewal.due(now) {
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
			if err := f.entries.Recover(); err != nil {
				f.log.Warn("recover connections of a killed agent", "error", err)
			}
			if !sweep.due(now) {
				continue
			}
			if err := f.forget(unvalidated); err != nil {
				f.log.Warn("forget connections of the fast path", "error", err)
				continue
			}
			if err := f.programs.Recycle(); err != nil {
				f.log.Warn("make room in the tables of the fast path", "error", err)
			}
			if f.pods.anyIdle() || f.changes.throttled() {
				poke(f.rescan)
			}
		}
	}
}

// pace tells when something is due again. It reads the clock instead of counting ticks: the ticker drops ticks while the agent
// waits for a CPU, so a lease renewed by counting would expire while the agent runs.
type pace struct {
	every time.Duration
	last  time.Time
}

// due reports, at each tick of the detector, whether it is time again.
func (p *pace) due(now time.Time) bool {
	if now.Sub(p.last) < p.every-detectEvery/2 { // ticks may come early or late
		return false
	}
	p.last = now
	return true
}

func (f *Fastpath) renewLease() error {
	now, err := datapath.Now()
	if err != nil {
		return err
	}
	return f.programs.RenewLease(now + LeaseTime)
}

// threadTime returns the CPU time of the calling thread, which does not advance while the thread waits for a CPU.
func threadTime() (time.Duration, error) {
	var used unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &used); err != nil {
		return 0, fmt.Errorf("read the thread's clock: %w", err)
	}
	return time.Duration(used.Nano()), nil
}

// attach requests programs for the link of a pod that has an eligible connection.
func (f *Fastpath) attach(link int) {
	if link != 0 && f.pods.use(link) {
		poke(f.rescan)
	}
}

// forget resynchronises conntrack with idle connections and deletes their flows to make room; a later packet creates the flow
// again. The pods of all other connections stay active. A flow that was never validated has no time stamp, so unvalidated
// records when forget first found it.
func (f *Fastpath) forget(unvalidated map[datapath.Flow]time.Duration) error {
	flows, err := f.programs.Flows()
	if err != nil {
		return err
	}
	f.homes.prune(f.node, flows)
	for flow := range unvalidated {
		if activity, known := flows[flow]; !known || activity.Validated != 0 {
			delete(unvalidated, flow)
		}
	}
	now, err := datapath.Now()
	if err != nil {
		return err
	}
	idle := time.Duration(forgetAfter) * leaseRenewal
	crowded := len(flows) > f.programs.Capacity()/4*3
	if crowded {
		idle = forgetWhenFull * leaseRenewal
	}
	for flow, activity := range flows {
		since := activity.Validated
		if since == 0 {
			if unvalidated[flow] == 0 {
				unvalidated[flow] = now
			}
			since = unvalidated[flow]
		}
		if now-since > idle {
			delete(unvalidated, flow)
			// There may be thousands of connections: the lease must not expire meanwhile.
			if err := f.renewLease(); err != nil {
				return err
			}
			if forgotten, err := f.entries.Forget(flow, crowded); err != nil {
				return err
			} else if forgotten {
				continue
			}
		}
		f.attach(activity.Link)
		f.attach(activity.PeerLink)
	}
	if left := f.entries.AnyLeft(); len(flows) == 0 && !left {
		return errors.Join(f.dropForged.detachUnused(), f.entries.CloseUnused())
	}
	f.ensureDropForged()
	return nil
}

// ensureDropForged attaches drop_forged, if the kernel supports it.
func (f *Fastpath) ensureDropForged() {
	err := f.dropForged.start(f.programs)
	if err != nil {
		f.warnDropForged.Do(func() {
			f.log.Warn("forged FIN and RST packets can make conntrack delete entries of accelerated connections", "error", err)
		})
	}
}

// handleEvents handles the events of the programs until they are closed.
func (f *Fastpath) handleEvents() error {
	for {
		event, err := f.programs.ReadEvent()
		if errors.Is(err, ringbuf.ErrClosed) {
			return nil
		}
		if err == nil {
			err = f.handle(event)
		}
		if err != nil {
			f.log.Warn("handle an event of the fast path", "connection", event.Flow, "error", err)
		}
	}
}

// handle attaches programs for a pod, or updates a conntrack entry, as an event asks.
func (f *Fastpath) handle(event datapath.Event) error {
	if event.Kind != datapath.EventAttach {
		return f.entries.Handle(event)
	}
	if event.Link != 0 {
		// The programs deliver only to pods whose MAC address is known. Requesting both makes the node resolve their addresses.
		f.request(f.pods.linkOfAddress(event.Flow.Pod.Addr()))
		f.request(f.pods.linkOfAddress(event.Flow.Peer.Addr()))
		f.attach(event.Link)
		return nil
	}
	f.request(f.pods.linkOf(event.Pod))
	return nil
}

// request requests programs for the link of a pod, or a scan that looks for the pod if the link is unknown.
func (f *Fastpath) request(link int, scan bool) {
	if scan {
		poke(f.rescan)
	}
	f.attach(link)
}

// detect attaches and detaches the programs that look for eligible connections, as the two detectors decide.
func (f *Fastpath) detect(now time.Time) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closing() {
		return nil
	}
	switched, err := f.detectLocal(now)
	if err != nil {
		return err
	}
	if f.active {
		f.detector = detector{}
	} else if n, err := packets(f.links, f.node); err != nil {
		poke(f.rescan) // the scan reports the problem
	} else if f.detector.update(now, n) {
		switched = true
	}
	if !switched {
		return nil
	}
	return f.attachPrograms(false)
}

// sync scans the devices, configures the programs for them, and attaches the programs.
func (f *Fastpath) sync() error {
	began, err := threadTime()
	if err != nil {
		return err
	}
	known, err := f.changes.known(func() ([]netlink.Neigh, error) { return listNeighbours(f.links) })
	if err != nil {
		return err
	}
	node, err := scanDevices(f.links, known, f.unseenBy, f.owns, f.renewLease)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closing() {
		return nil
	}
	throttled, err := f.changes.setLinkMACs(&node, f.programs.SetLinkMACs)
	if err := errors.Join(
		err,
		f.programs.SetVXLANDevices(node.overlays),
		f.programs.SetRouters(node.routers),
		f.programs.SetRemotes(node.remotes),
		f.programs.SetPodDevices(node.podDevices),
		f.programs.SetNode(node.mtu, node.ports[0], node.ports[1]),
	); err != nil {
		return err
	}
	for _, link := range throttled {
		node.skip(node.names[link], byMoves, "the MAC addresses behind it change too often; another pod may be using them")
	}
	verify := f.verify.Swap(false)
	if verify {
		f.pods.forgetRequests()
	}
	f.pods.requestLost(f.node.podLinks, node.podLinks)
	for _, address := range f.pods.wanted() {
		if err := f.renewLease(); err != nil {
			return err
		}
		link, unresolved := node.linkByRoute(f.links, address)
		if link != 0 {
			if _, known := f.node.podLinks[address]; !known {
				f.pods.use(link) // the request did not know it, and perhaps no packet requests it again
			}
			node.podLinks[address] = link
		}
		if unresolved != 0 && f.pods.resolve(address) {
			// The node may have no neighbour entry for a pod on a bridge, because packets between its pods are not routed, or for
			// a pod that has been idle. A notification will tell when the kernel has resolved the address.
			ask := netlink.Neigh{LinkIndex: unresolved, IP: address.AsSlice(), Flags: netlink.NTF_USE, HardwareAddr: make([]byte, 6)} // the kernel ignores the zeros
			if err := f.links.NeighSet(&ask); err != nil {
				f.log.Debug("resolve a pod's address", "address", address, "error", err)
			}
		}
	}
	used, err := threadTime()
	if err != nil {
		return err
	}
	f.pause = scanShare * (used - began)
	if !slices.Equal(node.supported(), f.node.supported()) || (len(node.veths) > 0) != (len(f.node.veths) > 0) {
		poke(f.updates)
	}
	if f.homes.moved(node) {
		// Packets of known flows have taken another link than the programs were attached to.
		if err := f.programs.InvalidateSequences(); err != nil {
			return err
		}
	}
	before := f.skipped
	f.node = node
	err = f.attachPrograms(verify)
	if slices.ContainsFunc(f.skipped, func(s skip) bool { return !slices.Contains(before, s) }) {
		// Flows that were validated over a device that is now skipped must not use it any more.
		f.changes.invalidate()
	}
	return err
}

// closing reports whether Close has begun: nobody would detach what is attached from then on.
func (f *Fastpath) closing() bool {
	select {
	case <-f.quit:
		return true
	default:
		return false
	}
}

// forConntrack implements conntrack.Fastpath.
type forConntrack struct{ f *Fastpath }

func (c forConntrack) DropForged()               { c.f.ensureDropForged() }
func (c forConntrack) Links() map[netip.Addr]int { return c.f.node.podLinks }
func (c forConntrack) Locate(pod netip.Addr)     { c.f.request(c.f.pods.linkOfAddress(pod)) }
func (c forConntrack) Attach(link int)           { c.f.attach(link) }

func (c forConntrack) Attached(link int) bool {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	return c.f.attached[attachment{link, "redirect_pod"}] != nil
}

func (c forConntrack) MACs() (map[netip.Addr]net.HardwareAddr, error) {
	neighbours, err := listNeighbours(c.f.links)
	if err != nil {
		return nil, err
	}
	macs := make(map[netip.Addr]net.HardwareAddr)
	for _, at := range neighbours {
		if address, ok := netip.AddrFromSlice(at.IP); ok && len(at.HardwareAddr) == len(mac{}) {
			macs[address.Unmap()] = at.HardwareAddr
		}
	}
	return macs, nil
}
