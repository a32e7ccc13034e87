//go:build linux

// Package conntrack keeps the conntrack entries of accelerated connections as they would be without the fast path. It reads and
// changes entries, resynchronises conntrack with connections, and recovers the connections of a killed agent.
//
// Conntrack does not see most packets of an accelerated connection. But once the connection is idle or leaves the fast path,
// its entry must be as if conntrack had seen them all. Otherwise an idle connection times out after minutes instead of days,
// and any forged RST closes it.
//
// While a connection is accelerated, its entry is liberal: conntrack does not check the window, and every packet that it sees
// refreshes the timeout. Netlink cannot set the sequence numbers of an entry. But conntrack takes them from a handshake ("we
// get in sync" in nf_conntrack_tcp_packet), even if the entry is ESTABLISHED. So a resync is a handshake that ends at the
// current sequence numbers: four packets from the node, which drop_resync drops right after conntrack. From then on, conntrack
// can check the window again.
//
// Package datapath reads the sequence numbers, which the programs follow; package fastpath decides when a connection leaves the
// fast path.
package conntrack

import (
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath/datapath"
)

// Fastpath is the part of a node's fast path that Entries uses.
type Fastpath interface {
	// DropForged attaches drop_forged, if the kernel supports it.
	DropForged()
	// Links maps the addresses of the pods to their links.
	Links() map[netip.Addr]int
	// MACs maps the addresses of neighbours to their MAC addresses.
	MACs() (map[netip.Addr]net.HardwareAddr, error)
	// Locate requests that the node finds the link and the MAC address of a pod, unless Links has the pod.
	Locate(pod netip.Addr)
	// Attach requests programs for the link of a pod. Attached reports whether the link has redirect_pod.
	Attach(link int)
	Attached(link int) bool
}

// Entries keeps the conntrack entries of a node. Its methods must run in the network namespace of the node. Only Handle may run
// concurrently with the others.
type Entries struct {
	programs *datapath.Programs
	fastpath Fastpath
	log      *slog.Logger
	stopped  atomic.Bool

	// mu is held while an entry is changed: an event from before the release of a connection must not make its entry liberal
	// again.
	mu         sync.Mutex
	resyncs    resyncs
	warnResync sync.Once
	// recovering holds the connections that a killed agent has left (see recover.go).
	recovering map[datapath.Flow]*recovery
	// unrecovered holds the connections that could not be recovered, so that their entries stayed liberal. No event announces
	// that one of them is used again.
	unrecovered map[datapath.Flow]bool
	// searchAt is the time of the next search for liberal entries, because the last one failed or found more than fit into
	// recovering, or a connection did not fit later. Otherwise it is zero.
	searchAt time.Time
}

// New returns the entries of a node. It fails if the process may not resynchronise conntrack. If only the kernel lacks a
// feature for that, entries stay liberal.
func New(programs *datapath.Programs, fastpath Fastpath, log *slog.Logger) (*Entries, error) {
	e := &Entries{programs: programs, fastpath: fastpath, log: log, recovering: make(map[datapath.Flow]*recovery), unrecovered: make(map[datapath.Flow]bool)}
	if err := e.resyncs.try(); errors.Is(err, fs.ErrPermission) {
		return nil, err
	}
	return e, nil
}

// Stop ends the handling of events and the recovery of connections. Call it before ReleaseAll and Close.
func (e *Entries) Stop() { e.stopped.Store(true) }

// Close ends resynchronisation.
func (e *Entries) Close() error { return e.resyncs.close() }

// CloseUnused detaches the program that drops resync packets, if no connection was resynchronised since the last call. The kernel
// then drops all packets that wait in an NFQUEUE of the node.
func (e *Entries) CloseUnused() error { return e.resyncs.closeUnused() }

// Handle updates the entry of a connection, as an event requests. It does nothing after Stop.
func (e *Entries) Handle(event datapath.Event) error {
	if event.Kind == datapath.EventLiberal {
		e.fastpath.DropForged()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stopped.Load() {
		return nil // ReleaseAll may have released the connection
	}
	flow := event.Flow
	switch event.Kind {
	case datapath.EventLiberal:
		return e.makeLiberal(flow)
	case datapath.EventReopen:
		return e.update(flow, reopen)
	case datapath.EventAcked:
		// The packet that set the flag also shortened the timeout, and conntrack may not see another one.
		return errors.Join(clearUnacknowledged(flow), e.update(flow, RestoreTimeout))
	case datapath.EventReset:
		return reset(flow)
	}
	n, _, err := e.sequence(flow)
	if err != nil || n == (datapath.Sequence{}) {
		return err
	}
	if err := e.Resync(flow, n, true); !errors.Is(err, errUnknown) {
		return err
	}
	return nil
}

func (e *Entries) makeLiberal(flow datapath.Flow) error {
	if known, err := e.programs.Known(flow); err != nil || !known {
		return err // it has ended, or Forget has released it
	}
	is, err := Find(flow)
	if err != nil || is == nil || is.Offloaded() || is.accelerated() {
		return err
	}
	if err := liberal(flow); err != nil {
		return err
	}
	if known, err := e.programs.Known(flow); err != nil || known {
		return err
	}
	// The connection has just ended, and the entry may belong to a new one between the same ports.
	return SetFlags(flow, 0, tcpLiberal)
}

// update calls do with a connection and the time for which it has been idle, if its sequence numbers are known.
func (e *Entries) update(flow datapath.Flow, do func(datapath.Flow, time.Duration) error) error {
	n, now, err := e.sequence(flow)
	if err != nil || n == (datapath.Sequence{}) {
		return err
	}
	return do(flow, now-n.Last)
}

// releaseTimeout limits the time for which ReleaseAll waits for busy connections to pause.
const releaseTimeout = 2 * time.Second

// ReleaseAll makes conntrack check the windows of all known connections again.
func (e *Entries) ReleaseAll() error {
	flows, err := e.programs.Flows()
	if err != nil {
		return err
	}
	// A connection that never pauses cannot be resynchronised, so all connections share a time limit.
	until := time.Now().Add(releaseTimeout)
	for len(flows) > 0 {
		for flow := range flows {
			e.mu.Lock()
			done, err := e.release(flow, false)
			if errors.Is(err, errUnknown) {
				err = nil // the connection's next packet may make them known
			}
			if err == nil && !done && !time.Now().Before(until) {
				done, err = true, abandon(flow)
			}
			e.mu.Unlock()
			if err != nil {
				e.log.Warn("resynchronise conntrack with a connection that leaves the fast path", "connection", flow, "error", err)
			}
			if done || err != nil {
				delete(flows, flow)
			}
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

// Forget resynchronises conntrack with an idle connection, and deletes its flow. If resynchronising fails, it keeps the flow
// unless the table is crowded: the entry is still liberal, so drop_forged needs the sequence numbers. If these are unknown, or
// the table is crowded, it deletes the flow, and Recover asks the pod for them.
func (e *Entries) Forget(flow datapath.Flow, crowded bool) (forgotten bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	done, err := e.release(flow, true)
	unknown := errors.Is(err, errUnknown)
	switch {
	case err != nil && !unknown:
		e.log.Warn("resynchronise conntrack with an idle connection", "connection", flow, "error", err)
	case !done && !unknown && !crowded:
		return false, nil
	}
	if err := e.programs.Forget(flow); err != nil || done {
		return true, err
	}
	return true, e.recoverLater(flow)
}

// unseenAfter is the longest time in which TCP retransmits unacknowledged data several times. If the pod has not done so by
// then, the acknowledgement took a path that the programs do not see.
const unseenAfter = 5 * time.Second

// release makes conntrack check the window of a connection again, and returns whether it is done with the connection. It needs
// a pause in which all data is acknowledged and all sequence numbers are known; without one, the entry stays liberal. An idle
// connection counts as paused even with unacknowledged data: its peer may be gone. It returns errUnknown if the sequence
// numbers are not known. The caller holds mu.
func (e *Entries) release(flow datapath.Flow, idle bool) (done bool, err error) {
	if flow.Protocol != unix.IPPROTO_TCP {
		return true, nil
	}
	n, now, err := e.sequence(flow)
	if err != nil {
		return false, err
	}
	if !n.Acknowledged() && (!idle || n == (datapath.Sequence{})) {
		if is, err := Find(flow); err == nil && (is == nil || !is.ours()) {
			return true, nil // it was never accelerated
		}
		if n == (datapath.Sequence{}) {
			return false, errUnknown
		}
		return false, nil
	}
	if n.PeerUnseen() && now-n.Last < unseenAfter {
		return false, nil
	}
	switch err := e.Resync(flow, n, false); {
	case errors.Is(err, errUnknown):
		return false, err
	case errors.Is(err, errNotAccepted):
		return false, nil // the caller tries again
	case err != nil:
		return false, errors.Join(err, abandon(flow))
	}
	after, _, err := e.sequence(flow)
	if err == nil && after != n {
		// Packets took the fast path during the resync, and conntrack missed them.
		return false, liberal(flow)
	}
	return true, err
}

// sequence returns the TCP sequence numbers of a connection, and the time at which it read them. n is zero unless all of them
// are known.
func (e *Entries) sequence(flow datapath.Flow) (n datapath.Sequence, now time.Duration, err error) {
	if now, err = datapath.Now(); err == nil {
		n, err = e.programs.Sequence(flow, now)
	}
	return n, now, err
}

// Resync resynchronises conntrack with a connection whose sequence numbers are n. If the kernel does not support that, its
// entry stays liberal for good. It also stays liberal while the connection is accelerated.
func (e *Entries) Resync(flow datapath.Flow, n datapath.Sequence, accelerated bool) error {
	now, err := datapath.Now()
	if err != nil {
		return err
	}
	if ahead, err := e.programs.ConntrackAhead(flow, n); err != nil {
		return err
	} else if ahead {
		return errUnknown
	}
	err = e.resyncs.do(func(r *resyncer) error { return r.resync(flow, n, now-n.Last, accelerated) })
	if errors.Is(err, errCannotResync) {
		e.warnResync.Do(func() {
			e.log.Warn("conntrack entries of accelerated connections stay liberal: they cannot be resynchronised", "error", err)
		})
		return abandon(flow)
	}
	return err
}
