//go:build linux

package fastpath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/accel/fastpath/datapath"
)

// Conntrack does not see most packets of an accelerated connection. But once the connection is
// idle or leaves the fast path, its entry must be what it would be without the fast path.
// Otherwise an idle connection times out after minutes instead of days, and any forged RST
// closes it.
//
// While a connection is accelerated, its entry is liberal (liberal): conntrack accepts packets
// outside the window that it knows, and they refresh the timeout. Netlink cannot set the
// sequence numbers of an entry. But conntrack takes them from a handshake ("we get in sync" in
// nf_conntrack_tcp_packet), even if the entry is ESTABLISHED. So resync sends a handshake
// that ends at the present sequence numbers: four packets from the node, which drop_resync drops
// right behind conntrack. Then conntrack checks the window again.

// Constants of ctnetlink (include/uapi/linux/netfilter/nfnetlink_conntrack.h).
const (
	ctaTupleOrig, ctaTupleReply, ctaProtoInfo, ctaTimeout = 1, 2, 4, 7
	ctaTupleIP, ctaTupleProto                             = 1, 2
	ctaIPv4Src, ctaIPv4Dst                                = 1, 2
	ctaIPv6Src, ctaIPv6Dst                                = 3, 4
	ctaProtoNum, ctaProtoSrcPort, ctaProtoDstPort         = 1, 2, 3
	ctaProtoInfoTCP                                       = 1
	ctaTCPState                                           = 1
	ctaTCPScaleOriginal, ctaTCPScaleReply                 = 2, 3
	ctaTCPFlagsOriginal, ctaTCPFlagsReply                 = 4, 5
	ctNew, ctGet                                          = 0, 1 // IPCTNL_MSG_CT_*

	tcpEstablished, tcpClose = 3, 8 // enum tcp_conntrack

	// IP_CT_TCP_FLAG_* of nf_conntrack_tcp.h: window scaling, SACK permitted, close initiated, liberal
	// (the window is not checked), unacknowledged data, and a known highest acknowledgement, against
	// which conntrack checks RSTs.
	tcpScaled, tcpSelective, tcpCloseInit, tcpLiberal, tcpUnacknowledged, tcpMaxAck = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
)

// tracked is the conntrack entry of a TCP connection.
type tracked struct {
	// original and reply are the tuples of the two directions; the client's is the original one.
	original, reply struct{ from, to netip.AddrPort }
	state           uint8
	// scale and flags are indexed by direction: original, reply.
	scale, flags [2]uint8
	timeout      uint32 // s
}

// lookUp returns the conntrack entry of a connection in the calling thread's network namespace, or
// nil if there is none.
func lookUp(f datapath.Flow) (*tracked, error) {
	answers, err := request(ctGet, f)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ask conntrack for %s to %s: %w", f.Pod, f.Peer, err)
	}
	if len(answers) != 1 {
		return nil, fmt.Errorf("ask conntrack for %s to %s: %d answers", f.Pod, f.Peer, len(answers))
	}
	t, err := parseTracked(answers[0])
	if err != nil {
		return nil, fmt.Errorf("ask conntrack for %s to %s: %w", f.Pod, f.Peer, err)
	}
	return t, nil
}

// change sets attributes of a conntrack entry. It is no error if the entry is gone: the connection
// has ended meanwhile.
func change(f datapath.Flow, to ...*nl.RtAttr) error {
	if _, err := request(ctNew, f, to...); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("change conntrack's entry of %s to %s: %w", f.Pod, f.Peer, err)
	}
	return nil
}

// liberal stops conntrack from checking the window of a connection.
func liberal(f datapath.Flow) error { return change(f, tcpInfo(flagAttrs(tcpLiberal, tcpLiberal)...)) }

// acked clears the flag of unacknowledged data: the acknowledgements took the fast path.
func acked(f datapath.Flow) error { return change(f, tcpInfo(flagAttrs(0, tcpUnacknowledged)...)) }

// reopen moves a connection that has not ended back to ESTABLISHED. A forged FIN or RST can move it
// out of that state, because a liberal conntrack does not check sequence numbers, and then the
// entry would soon time out.
func reopen(f datapath.Flow, idle time.Duration) error {
	is, err := lookUp(f)
	if err != nil || is == nil || is.state == tcpEstablished || is.flags[0]&is.flags[1]&tcpLiberal == 0 {
		return err
	}
	timeout, err := timeoutOf("established", idle)
	if err != nil {
		return err
	}
	// Set the state first, in a message of its own: the kernel applies a message's timeout before its
	// state, and an RST between the two would leave its own short timeout to the ESTABLISHED entry.
	state := append(flagAttrs(0, tcpCloseInit), nl.NewRtAttr(ctaTCPState, []byte{tcpEstablished}))
	return errors.Join(change(f, tcpInfo(state...)), change(f, timeoutAttr(timeout)))
}

// timeoutOf returns the timeout that is left to a connection in a state, as sysctls name it, that
// has been idle for so long.
func timeoutOf(state string, idle time.Duration) (seconds uint32, err error) {
	err = readSysctl("net/netfilter/nf_conntrack_tcp_timeout_"+state, &seconds)
	return seconds - min(seconds, uint32(idle/time.Second)), err
}

// unacknowledged shortens the timeout of an idle connection to that of one with unacknowledged data,
// which the resynchronised entry does not show.
func unacknowledged(f datapath.Flow, idle time.Duration) error {
	is, err := lookUp(f)
	if err != nil || is == nil {
		return err
	}
	timeout, err := timeoutOf("unacknowledged", idle)
	if err != nil || is.timeout <= timeout {
		return err
	}
	return change(f, timeoutAttr(timeout))
}

// reset moves a connection to CLOSE, with the timeout of that state: its RST took the fast path.
func reset(f datapath.Flow) error {
	timeout, err := timeoutOf("close", 0)
	if err != nil {
		return err
	}
	return change(f, tcpInfo(nl.NewRtAttr(ctaTCPState, []byte{tcpClose})), timeoutAttr(timeout))
}

// abandon leaves the entry of a connection liberal for good, because conntrack will never know its
// sequence numbers.
func abandon(f datapath.Flow) error {
	return change(f, tcpInfo(flagAttrs(tcpLiberal, tcpLiberal|tcpUnacknowledged|tcpMaxAck)...))
}

// timeoutAttr sets the timeout of an entry.
func timeoutAttr(seconds uint32) *nl.RtAttr {
	return nl.NewRtAttr(ctaTimeout, binary.BigEndian.AppendUint32(nil, seconds))
}

// flagAttrs sets the flags of a mask in both directions.
func flagAttrs(flags, mask byte) (all []*nl.RtAttr) {
	for _, way := range []int{ctaTCPFlagsOriginal, ctaTCPFlagsReply} {
		all = append(all, nl.NewRtAttr(way, []byte{flags, mask}))
	}
	return all
}

func tcpInfo(is ...*nl.RtAttr) *nl.RtAttr {
	info := nl.NewRtAttr(ctaProtoInfo|unix.NLA_F_NESTED, nil)
	tcp := info.AddRtAttr(ctaProtoInfoTCP|unix.NLA_F_NESTED, nil)
	for _, a := range is {
		tcp.AddChild(a)
	}
	return info
}

// request sends a ctnetlink request about a connection, which conntrack finds by the tuple of what
// the pod sends.
func request(kind int, f datapath.Flow, more ...*nl.RtAttr) ([][]byte, error) {
	r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|kind, unix.NLM_F_ACK)
	family := uint8(unix.AF_INET)
	source, destination := ctaIPv4Src, ctaIPv4Dst
	if f.Pod.Addr().Is6() {
		family, source, destination = unix.AF_INET6, ctaIPv6Src, ctaIPv6Dst
	}
	r.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	port := func(a netip.AddrPort) []byte { return binary.BigEndian.AppendUint16(nil, a.Port()) }
	tuple := nl.NewRtAttr(ctaTupleOrig|unix.NLA_F_NESTED, nil)
	ip := tuple.AddRtAttr(ctaTupleIP|unix.NLA_F_NESTED, nil)
	ip.AddRtAttr(source, f.Pod.Addr().AsSlice())
	ip.AddRtAttr(destination, f.Peer.Addr().AsSlice())
	proto := tuple.AddRtAttr(ctaTupleProto|unix.NLA_F_NESTED, nil)
	proto.AddRtAttr(ctaProtoNum, []byte{f.Protocol})
	proto.AddRtAttr(ctaProtoSrcPort, port(f.Pod))
	proto.AddRtAttr(ctaProtoDstPort, port(f.Peer))
	r.AddData(tuple)
	for _, a := range more {
		r.AddData(a)
	}
	return r.Execute(unix.NETLINK_NETFILTER, 0)
}

var errShort = errors.New("conntrack's answer is truncated")

// parseTracked parses a ctnetlink message: struct nfgenmsg and attributes.
func parseTracked(b []byte) (*tracked, error) {
	if len(b) < nl.SizeofNfgenmsg {
		return nil, errShort
	}
	t := &tracked{}
	err := each(b[nl.SizeofNfgenmsg:], func(kind uint16, b []byte) (err error) {
		switch kind {
		case ctaTupleOrig:
			t.original.from, t.original.to, err = parseTuple(b)
		case ctaTupleReply:
			t.reply.from, t.reply.to, err = parseTuple(b)
		case ctaTimeout:
			if len(b) < 4 {
				return errShort
			}
			t.timeout = binary.BigEndian.Uint32(b)
		case ctaProtoInfo:
			err = each(b, func(kind uint16, b []byte) error {
				if kind != ctaProtoInfoTCP {
					return nil
				}
				return each(b, func(kind uint16, b []byte) error {
					if len(b) < 1 {
						return errShort
					}
					switch kind {
					case ctaTCPState:
						t.state = b[0]
					case ctaTCPScaleOriginal, ctaTCPScaleReply:
						t.scale[kind-ctaTCPScaleOriginal] = b[0]
					case ctaTCPFlagsOriginal, ctaTCPFlagsReply:
						t.flags[kind-ctaTCPFlagsOriginal] = b[0]
					}
					return nil
				})
			})
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return t, nil
}

func parseTuple(b []byte) (from, to netip.AddrPort, err error) {
	var ends [2]netip.Addr
	var ports [2]uint16
	err = each(b, func(kind uint16, b []byte) error {
		return each(b, func(of uint16, b []byte) error {
			switch {
			case kind == ctaTupleIP && (of >= ctaIPv4Src && of <= ctaIPv6Dst):
				address, ok := netip.AddrFromSlice(b)
				if !ok {
					return errShort
				}
				ends[(of-ctaIPv4Src)%2] = address
			case kind == ctaTupleProto && (of == ctaProtoSrcPort || of == ctaProtoDstPort):
				if len(b) < 2 {
					return errShort
				}
				ports[of-ctaProtoSrcPort] = binary.BigEndian.Uint16(b)
			}
			return nil
		})
	})
	return netip.AddrPortFrom(ends[0], ports[0]), netip.AddrPortFrom(ends[1], ports[1]), err
}

// each calls read for each netlink attribute, until it fails.
func each(b []byte, read func(kind uint16, b []byte) error) error {
	var first error
	err := attributes(b, func(kind uint16, b []byte) {
		if first == nil {
			first = read(kind, b)
		}
	})
	return errors.Join(first, err)
}

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
	// drop_resync drops the packets before they reach a device, and binding to one saves the route
	// lookup: there need not be a route to a Service.
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

// resync resynchronises conntrack with a connection. If the connection stays accelerated, the entry
// stays liberal. Otherwise conntrack checks the window again, and the timeout counts from the
// connection's last packet. It is no error if the connection has ended; if it returns errMissed, it
// has not changed the entry.
func (r *resyncer) resync(f datapath.Flow, n datapath.Sequence, idle time.Duration, accelerated bool) error {
	before, err := lookUp(f)
	if err != nil || before == nil {
		return err
	}
	if (before.flags[0]|before.flags[1])&tcpLiberal == 0 {
		return nil // conntrack has seen all packets
	}
	if missed, err := before.missed(idle); err != nil {
		return err
	} else if missed {
		return errMissed
	}
	if before.state != tcpEstablished {
		// The connection has not ended: its end would have deleted the flow.
		if err := reopen(f, idle); err != nil {
			return err
		}
	}
	original, reply := n.Pod, n.Peer
	if before.original.from != f.Pod {
		original, reply = reply, original
	}
	if accelerated {
		// Conntrack gives a closed window a short timeout, and would not see it open again.
		original.Edge, reply.Edge = openWindow(original, reply), openWindow(reply, original)
	}
	if err := r.handshake(before, original, reply); err != nil {
		return fmt.Errorf("resynchronise conntrack with %s to %s: %w", f.Pod, f.Peer, err)
	}
	if accelerated {
		return liberal(f)
	}
	after, err := lookUp(f)
	if err != nil || after == nil || after.state != tcpEstablished {
		return err
	}
	// The SYN of the handshake cleared the flag in the original direction, if conntrack accepted it.
	if after.flags[0]&tcpLiberal != 0 {
		return fmt.Errorf("resynchronise conntrack with %s to %s: it did not accept the handshake", f.Pod, f.Peer)
	}
	var flags byte
	if before.flags[0]&before.flags[1]&tcpScaled == 0 {
		// Conntrack picked the connection up in mid-stream, does not know its window scales, and was
		// liberal from the start.
		flags = tcpLiberal
	}
	return change(f, tcpInfo(flagAttrs(flags, tcpLiberal)...), timeoutAttr(after.timeout-min(after.timeout, uint32(idle/time.Second))))
}

// openWindow returns the right edge of a window of a side that is open, whatever its scale.
func openWindow(own, other datapath.Side) uint32 {
	return other.Expects + max(own.Edge-other.Expects, 1<<14)
}

// resyncs keeps a resyncer while it is in use: attaching its program for each connection would
// be slow.
type resyncs struct {
	mu   sync.Mutex
	r    *resyncer
	used bool
	// unsupported is set once the kernel has turned out to lack a feature.
	unsupported bool
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
			a.unsupported = true
			return fmt.Errorf("%w: %w", errCannotResync, err)
		}
	}
	a.used = true
	return fn(a.r)
}

// try returns why conntrack cannot be resynchronised, if so.
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

// forgedFilter attaches drop_forged (datapath.Programs.DropForged): a forged FIN or RST would make conntrack
// delete the entry of a connection that it is liberal with.
type forgedFilter struct {
	mu           sync.Mutex
	attached     io.Closer
	used, closed bool
}

// start attaches the program in the calling thread's network namespace, unless it is attached.
func (g *forgedFilter) start(programs *datapath.Programs) (err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.used = true
	if g.attached == nil && !g.closed {
		g.attached, err = programs.DropForged()
	}
	return err
}

// detachUnused detaches the program if start was not called since the last call.
func (g *forgedFilter) detachUnused() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	used := g.used
	g.used = false
	if used {
		return nil
	}
	return g.detach()
}

// detach detaches the program. The caller holds mu.
func (g *forgedFilter) detach() (err error) {
	if g.attached != nil {
		err = g.attached.Close()
		g.attached = nil
	}
	return err
}

// close detaches the program for good.
func (g *forgedFilter) close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	return g.detach()
}

var errMissed = errors.New("conntrack has seen packets that the fast path missed")

// missed reports whether conntrack has seen a later packet of an established connection than the
// programs have: then their sequence numbers are old.
func (t *tracked) missed(idle time.Duration) (bool, error) {
	timeout, err := timeoutOf("established", 0)
	if err != nil {
		return false, err
	}
	// Conntrack's timeouts are whole seconds.
	return t.timeout <= timeout && time.Duration(timeout-t.timeout)*time.Second < idle-time.Second, nil
}

// TCP flags (RFC 9293, section 3.1) and options (section 3.2; RFC 2018 and RFC 7323).
const (
	synFlag, ackFlag                               = 0x02, 0x10
	noOption, scaleOption, selectivePermitted byte = 1, 3, 4
)

// handshake sends a handshake that leaves conntrack with the given sequence numbers and windows.
func (r *resyncer) handshake(t *tracked, original, reply datapath.Side) error {
	window := func(own, other datapath.Side, scale uint8) uint16 {
		return uint16(min((other.Edge-own.Expects)>>min(scale, 14), 0xffff))
	}
	from, back := window(original, reply, t.scale[0]), window(reply, original, t.scale[1])
	for _, p := range []segment{
		{t.original.from, t.original.to, original.Next - 1, 0, synFlag, 0xffff, options(t.flags[0], t.scale[0])},
		{t.reply.from, t.reply.to, reply.Next - 1, original.Next, synFlag | ackFlag, 0xffff, options(t.flags[1], t.scale[1])},
		{t.original.from, t.original.to, original.Next, reply.Next, ackFlag, from, nil},
		{t.reply.from, t.reply.to, reply.Next, original.Next, ackFlag, back, nil},
	} {
		if err := r.send(p); err != nil {
			return err
		}
	}
	return nil
}

// options returns the options of a SYN that conntrack reads.
func options(flags, scale uint8) (b []byte) {
	if flags&tcpSelective != 0 {
		b = append(b, noOption, noOption, selectivePermitted, 2)
	}
	if flags&tcpScaled != 0 {
		b = append(b, noOption, scaleOption, 3, scale)
	}
	return b
}

// segment is a TCP segment without data.
type segment struct {
	from, to netip.AddrPort
	seq, ack uint32
	flags    byte
	window   uint16
	options  []byte
}

// bytes returns the packet with its IP header. The checksums are zero: conntrack does not verify those
// of packets that the node sends, and nobody else sees them.
func (s segment) bytes() []byte {
	length := 20 + len(s.options)
	var b []byte
	if s.from.Addr().Is6() {
		b = []byte{0x60, 0, 0, 0, 0, byte(length), unix.IPPROTO_TCP, 64}
	} else {
		b = []byte{0x45, 0, 0, byte(20 + length), 0, 1, 0, 0, 64, unix.IPPROTO_TCP, 0, 0}
	}
	b = append(b, s.from.Addr().AsSlice()...)
	b = append(b, s.to.Addr().AsSlice()...)
	b = binary.BigEndian.AppendUint16(b, s.from.Port())
	b = binary.BigEndian.AppendUint16(b, s.to.Port())
	b = binary.BigEndian.AppendUint32(b, s.seq)
	b = binary.BigEndian.AppendUint32(b, s.ack)
	b = append(b, byte(length/4)<<4, s.flags)
	b = binary.BigEndian.AppendUint16(b, s.window)
	b = append(b, 0, 0, 0, 0)
	return append(b, s.options...)
}

var errNotDropped = errors.New("a resync packet was not dropped behind conntrack")

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
