//go:build linux

package conntrack

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath/datapath"
)

// resyncer resynchronises conntrack in the network namespace of the thread that created it.
type resyncer struct {
	drop *datapath.ResyncFilter
	// four and six are raw sockets of IPv4 and IPv6; six is -1 if the kernel has no IPv6.
	four, six int
}

func newResyncer() (r *resyncer, err error) {
	r = &resyncer{four: -1, six: -1}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("prepare to resynchronise conntrack: %w", err), r.close())
			r = nil
		}
	}()
	if r.drop, err = datapath.DropResync(); err != nil {
		return r, err
	}
	open := func(family int) (int, error) {
		fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return -1, os.NewSyscallError("socket", err)
		}
		return fd, os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(r.drop.Mark)))
	}
	if r.four, err = open(unix.AF_INET); err != nil {
		return r, err
	}
	// drop_resync drops the packets before they reach a device, but the kernel looks up a route first. On a socket bound to lo,
	// it finds one for every address, even that of a Service.
	if err := unix.BindToDevice(r.four, "lo"); err != nil {
		return r, os.NewSyscallError("setsockopt", err)
	}
	if r.six, err = open(unix.AF_INET6); errors.Is(err, unix.EAFNOSUPPORT) {
		err = nil
	}
	return r, err
}

func (r *resyncer) close() error {
	var errs []error
	for _, fd := range []int{r.four, r.six} {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	if r.drop != nil {
		errs = append(errs, r.drop.Close())
	}
	return errors.Join(errs...)
}

// resync resynchronises conntrack with a connection. If the connection stays accelerated, the entry stays liberal. Otherwise
// conntrack checks the window again, and the timeout counts from the connection's last packet. If the connection has ended,
// there is nothing to do. After errUnknown the entry is unchanged; after errNotAccepted it is still liberal.
func (r *resyncer) resync(f datapath.Flow, n datapath.Sequence, idle time.Duration, accelerated bool) error {
	before, err := Find(f)
	if err != nil || before == nil {
		return err
	}
	if !before.ours() {
		return nil // conntrack has seen all packets, or a flowtable owns the entry
	}
	if missed, err := before.missed(idle); err != nil {
		return err
	} else if missed {
		return errUnknown
	}
	if before.State != tcpEstablished {
		// The connection is still open: its end would have deleted the flow.
		if err := reopen(f, idle); err != nil {
			return err
		}
	}
	if accelerated {
		// A zero window would give the entry a short timeout, and conntrack would not see the window open again.
		n.Pod.Edge, n.Peer.Edge = openWindow(n.Pod, n.Peer), openWindow(n.Peer, n.Pod)
		if err := r.handshake(f, before, n); err != nil {
			return err
		}
		return liberal(f)
	}
	established, err := timeoutOf("established", 0)
	if err != nil {
		return err
	}
	// The handshake acknowledges all data.
	settled := n
	settled.Pod.Expects, settled.Peer.Expects = n.Peer.Next, n.Pod.Next
	if n.PeerUnseen() {
		settled.Pod.Edge = settled.Pod.Next + largestWindow
	}
	if err := r.checkWindow(f, before, settled, func(after *Entry) uint32 { return after.timeoutAfter(idle, established) }); err != nil {
		return err
	}
	return r.unacknowledged(f, before, n, idle)
}

// largestWindow is the largest window that TCP can announce (RFC 7323).
const largestWindow = 0xffff << 14

// unacknowledged corrects the entry of an idle connection with unacknowledged data, which the handshake has acknowledged
// nevertheless. It restores the highest acknowledgement, the flag of unacknowledged data, and its timeout.
func (r *resyncer) unacknowledged(f datapath.Flow, t *Entry, n datapath.Sequence, idle time.Duration) error {
	data := [2]bool{n.Pod.Next != n.Peer.Expects && !n.PeerUnseen(), n.Peer.Next != n.Pod.Expects} // of the pod, of the peer
	if !data[0] && !data[1] {
		return nil
	}
	pod, peer := t.original, t.reply
	flagsOf := [2]int{ctaTCPFlagsOriginal, ctaTCPFlagsReply}
	if t.original.from != f.Pod {
		pod, peer = peer, pod
		flagsOf[0], flagsOf[1] = flagsOf[1], flagsOf[0]
	}
	var masks [2]byte
	for side := range data {
		if data[side] {
			masks[side] |= tcpUnacknowledged
			masks[1-side] |= tcpMaxAck // makes conntrack take the next acknowledgement for the highest
		}
	}
	if err := change(f, tcpInfo(
		nl.NewRtAttr(flagsOf[0], []byte{tcpUnacknowledged, masks[0]}), nl.NewRtAttr(flagsOf[1], []byte{tcpUnacknowledged, masks[1]}),
	)); err != nil {
		return err
	}
	for side, acks := range []segment{
		{peer.from, peer.to, n.Peer.Next, n.Peer.Expects, ackFlag, t.window(peer.from, n.Pod.Edge-n.Peer.Expects), nil},
		{pod.from, pod.to, n.Pod.Next, n.Pod.Expects, ackFlag, t.window(pod.from, n.Peer.Edge-n.Pod.Expects), nil},
	} {
		if data[side] {
			if err := r.send(acks); err != nil {
				return err
			}
		}
	}
	after, err := Find(f)
	if err != nil || after == nil {
		return err
	}
	return SetTimeout(f, without(after.Timeout, idle))
}

// window converts a window in bytes to the value of the window field in a segment from one of the two ends.
func (t *Entry) window(from netip.AddrPort, bytes uint32) uint16 {
	scale := t.scale[0]
	if from != t.original.from {
		scale = t.scale[1]
	}
	return uint16(min(bytes>>min(scale, 14), 0xffff))
}

// recover makes conntrack check the window of a connection whose entry an agent has left liberal. The entry ends up as without
// the agent: the timeout counts from the last packet, and the effects of a forged RST are undone.
//
// A short timeout, for unacknowledged data or retransmissions, may be stale: conntrack ignores acknowledgements outside its
// window. So the entry gets the timeout of ESTABLISHED. If data really is unacknowledged, retransmissions shorten it again.
func (r *resyncer) recover(f datapath.Flow, n datapath.Sequence, before *Entry, timeouts timeouts) error {
	idle := before.idle(timeouts)
	closed := before.State == tcpClose || before.Timeout <= timeouts.close
	if closed {
		if err := reopen(f, idle); err != nil {
			return err
		}
	}
	return r.checkWindow(f, before, n, func(after *Entry) uint32 {
		if !closed && after.Timeout+1 < timeouts.established {
			return min(before.Timeout, after.Timeout) // the entry has a timeout policy, or the window is closed
		}
		return after.timeoutAfter(idle, timeouts.established)
	})
}

// checkWindow makes conntrack check the window of a connection again. before is its entry before the handshake. left returns
// the timeout to set, given the entry after the handshake, which has restarted its timeout.
func (r *resyncer) checkWindow(f datapath.Flow, before *Entry, n datapath.Sequence, left func(after *Entry) uint32) error {
	if err := r.handshake(f, before, n); err != nil {
		return err
	}
	after, err := Find(f)
	if err != nil || after == nil || after.State != tcpEstablished {
		return err
	}
	// If conntrack accepted the SYN, it cleared the flag in the original direction.
	if after.Flags[0]&tcpLiberal != 0 {
		return fmt.Errorf("resynchronise conntrack with %s to %s: %w", f.Pod, f.Peer, errNotAccepted)
	}
	var flags byte
	if before.Flags[0]&before.Flags[1]&tcpWindowScale == 0 {
		// Conntrack picked the connection up in mid-stream. It does not know the window scales, and made the entry liberal from
		// the start.
		flags = tcpLiberal
	}
	return change(f, tcpInfo(flagAttrs(flags, tcpLiberal)...), timeoutAttr(left(after)))
}

// timeoutAfter returns the remaining timeout of an entry whose connection has been idle. The timeout of t has just restarted.
// established is the timeout of ESTABLISHED in seconds.
func (t *Entry) timeoutAfter(idle time.Duration, established uint32) (seconds uint32) {
	begun := t.Timeout
	if begun+1 == established { // conntrack rounds down
		begun = established
	}
	return without(begun, idle)
}

// openWindow returns the right edge of a side's window, moved if necessary so that the window is not zero at any scale.
func openWindow(own, other datapath.Side) uint32 {
	return other.Expects + max(own.Edge-other.Expects, 1<<14)
}

// resyncs keeps a resyncer from one use to the next: attaching its program for each connection would be slow.
type resyncs struct {
	mu   sync.Mutex
	r    *resyncer
	used bool
	// supported is set once newResyncer has succeeded, and unsupported once it has failed for lack of a feature.
	supported, unsupported bool
}

var errCannotResync = errors.New("conntrack cannot be resynchronised")

// do calls fn with a resyncer of the calling thread's network namespace.
func (a *resyncs) do(fn func(*resyncer) error) (err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.unsupported {
		return errCannotResync
	}
	if a.r == nil {
		if a.r, err = newResyncer(); err != nil {
			if a.supported || isTemporary(err) {
				return err
			}
			a.unsupported = true
			return fmt.Errorf("%w: %w", errCannotResync, err)
		}
		a.supported = true
	}
	a.used = true
	return fn(a.r)
}

// isTemporary reports whether an error tells of a lack of memory, descriptors or a free place, and not of a missing feature. Only one
// eBPF program fits at each priority of a hook: the place may still have that of another agent, which is ending.
func isTemporary(err error) bool {
	return slices.ContainsFunc([]error{unix.EBUSY, unix.ENOMEM, unix.ENOBUFS, unix.ENOSPC, unix.EMFILE, unix.ENFILE, unix.EAGAIN, unix.EINTR},
		func(is error) bool { return errors.Is(err, is) })
}

// try returns nil, or why conntrack cannot be resynchronised.
func (a *resyncs) try() error { return a.do(func(*resyncer) error { return nil }) }

// closeUnused closes the resyncer if it was not used since the last call.
func (a *resyncs) closeUnused() error {
	a.mu.Lock()
	used := a.used
	a.used = false
	a.mu.Unlock()
	if used {
		return nil
	}
	return a.close()
}

func (a *resyncs) close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := a.r
	a.r = nil
	if r == nil {
		return nil
	}
	return r.close()
}

// errNotAccepted means that another packet of the connection, perhaps a forged one, came between the packets of the handshake.
// The entry is still liberal. The next handshake may succeed.
var errNotAccepted = errors.New("conntrack did not accept the handshake")

// errUnknown means that a connection's sequence numbers are not known or out of date: conntrack has seen later packets.
var errUnknown = errors.New("the sequence numbers of the connection are not known")

// missed reports whether the programs have missed packets that conntrack has seen: then their sequence numbers are out of date.
func (t *Entry) missed(idle time.Duration) (bool, error) {
	timeout, err := timeoutOf("established", 0)
	if err != nil {
		return false, err
	}
	// Conntrack's timeouts are whole seconds.
	return t.Timeout <= timeout && time.Duration(timeout-t.Timeout)*time.Second < idle-time.Second, nil
}

// handshake sends a handshake of the connection with entry t for conntrack to see. The entry then has the sequence numbers and
// windows of n.
func (r *resyncer) handshake(f datapath.Flow, t *Entry, n datapath.Sequence) error {
	original, reply := n.Pod, n.Peer
	if t.original.from != f.Pod {
		original, reply = reply, original
	}
	from, back := t.window(t.original.from, reply.Edge-original.Expects), t.window(t.reply.from, original.Edge-reply.Expects)
	for _, p := range []segment{
		{t.original.from, t.original.to, original.Next - 1, 0, synFlag, 0xffff, options(t.Flags[0], t.scale[0])},
		{t.reply.from, t.reply.to, reply.Next - 1, original.Next, synFlag | ackFlag, 0xffff, options(t.Flags[1], t.scale[1])},
		{t.original.from, t.original.to, original.Next, reply.Next, ackFlag, from, nil},
		{t.reply.from, t.reply.to, reply.Next, original.Next, ackFlag, back, nil},
	} {
		if err := r.send(p); err != nil {
			return fmt.Errorf("resynchronise conntrack with %s to %s: %w", f.Pod, f.Peer, err)
		}
	}
	return nil
}

var errNotDropped = errors.New("a resync packet was not dropped after conntrack")

// send sends a packet for conntrack to see. drop_resync drops it, which the kernel reports as EPERM.
func (r *resyncer) send(s segment) error {
	fd, to := r.four, unix.Sockaddr(nil)
	if s.to.Addr().Is6() {
		fd, to = r.six, &unix.SockaddrInet6{Addr: s.to.Addr().As16()}
	} else {
		to = &unix.SockaddrInet4{Addr: s.to.Addr().As4()}
	}
	switch err := unix.Sendto(fd, s.bytes(), 0, to); {
	case errors.Is(err, unix.EPERM):
		return nil
	case err == nil:
		return errNotDropped
	default:
		return os.NewSyscallError("sendto", err)
	}
}
