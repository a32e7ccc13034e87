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

	"slipstream.dev/bpf"
)

// Conntrack does not see most packets of a connection that the fast path carries. What it
// knows of one must all the same be what it would know without the fast path, as soon as the
// connection is idle, or leaves the fast path: else an idle connection is forgotten after
// minutes in place of days, and anybody's reset is believed.
//
// While a connection is carried, conntrack is liberal with it (liberal): what it sees is out
// of the window that it knows of, is let through and refreshes the time-out. Netlink cannot
// set the numbers that conntrack has of a connection. But conntrack takes them from a
// handshake, "we get in sync" in nf_conntrack_tcp_packet, also where it holds the connection as
// established. So renew shows it the handshake of a connection that has come to its present
// numbers: four packets that the node sends, and a program right behind conntrack drops. Then
// it checks the window again.

// Numbers of ctnetlink (include/uapi/linux/netfilter/nfnetlink_conntrack.h).
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

	// IP_CT_TCP_FLAG_* of nf_conntrack_tcp.h: windows are scaled, selective acknowledgements
	// permitted, the window is not checked, data is unacknowledged,
	// the highest acknowledgement known, by which resets are judged, and that a side closes it.
	tcpScaled, tcpSelective, tcpCloseInit, tcpLiberal, tcpUnacknowledged, tcpMaxAck = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
)

// tracked is what conntrack knows of a connection of TCP.
type tracked struct {
	// Original is whom it is from and to as it was opened, Reply what comes back.
	original, reply struct{ from, to netip.AddrPort }
	state           uint8
	// Of the original direction, and of the reply.
	scale, flags [2]uint8
	timeout      uint32 // s
}

// lookUp asks conntrack, in the calling thread's network namespace, for a connection; nil if
// it has none.
func lookUp(f bpf.Flow) (*tracked, error) {
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

// change has conntrack know something else of a connection. One that has ended meanwhile is
// no error.
func change(f bpf.Flow, to ...*nl.RtAttr) error {
	if _, err := request(ctNew, f, to...); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("change conntrack's entry of %s to %s: %w", f.Pod, f.Peer, err)
	}
	return nil
}

// liberal has conntrack accept what is out of the window that it knows of.
func liberal(f bpf.Flow) error { return change(f, tcpInfo(flagsAre(tcpLiberal, tcpLiberal)...)) }

// acked has conntrack know that all that it has seen was acknowledged.
func acked(f bpf.Flow) error { return change(f, tcpInfo(flagsAre(0, tcpUnacknowledged)...)) }

// reopen has conntrack hold a connection as established, idle for so long, that it took to have
// ended though it has not: somebody forged that, and a liberal conntrack does not look at its
// numbers. It would soon forget the connection.
func reopen(f bpf.Flow, idle time.Duration) error {
	is, err := lookUp(f)
	if err != nil || is == nil || is.state == tcpEstablished || is.flags[0]&is.flags[1]&tcpLiberal == 0 {
		return err
	}
	timeout, err := timeoutOf("established", idle)
	if err != nil {
		return err
	}
	// The state first: the kernel takes the time-out of a message before its state, and a reset that
	// comes between the two would leave its own time-out to what is established then.
	state := append(flagsAre(0, tcpCloseInit), nl.NewRtAttr(ctaTCPState, []byte{tcpEstablished}))
	return errors.Join(change(f, tcpInfo(state...)), change(f, timeoutIs(timeout)))
}

// timeoutOf is for how many seconds conntrack remembers a connection in a state (as sysctls name them)
// that has been idle for so long.
func timeoutOf(state string, idle time.Duration) (seconds uint32, err error) {
	err = scan("net/netfilter/nf_conntrack_tcp_timeout_"+state, &seconds)
	return seconds - min(seconds, uint32(idle/time.Second)), err
}

// unacknowledged has conntrack remember a connection that is idle as long as one that waits for an
// acknowledgement.
func unacknowledged(f bpf.Flow, idle time.Duration) error {
	is, err := lookUp(f)
	if err != nil || is == nil {
		return err
	}
	timeout, err := timeoutOf("unacknowledged", idle)
	if err != nil || is.timeout <= timeout {
		return err
	}
	return change(f, timeoutIs(timeout))
}

// reset has conntrack know that a connection was reset, for as long as it remembers such.
func reset(f bpf.Flow) error {
	timeout, err := timeoutOf("close", 0)
	if err != nil {
		return err
	}
	return change(f, tcpInfo(nl.NewRtAttr(ctaTCPState, []byte{tcpClose})), timeoutIs(timeout))
}

// abandon has conntrack judge nothing of a connection by numbers that it will never catch up
// with.
func abandon(f bpf.Flow) error {
	return change(f, tcpInfo(flagsAre(tcpLiberal, tcpLiberal|tcpUnacknowledged|tcpMaxAck)...))
}

// timeoutIs has a connection be forgotten after so many seconds.
func timeoutIs(seconds uint32) *nl.RtAttr {
	return nl.NewRtAttr(ctaTimeout, binary.BigEndian.AppendUint32(nil, seconds))
}

// flagsAre has the flags of a mask be others, in both directions.
func flagsAre(flags, mask byte) (all []*nl.RtAttr) {
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

// request says something of a connection to conntrack, which finds it by what its pod sends.
func request(kind int, f bpf.Flow, more ...*nl.RtAttr) ([][]byte, error) {
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

var errShort = errors.New("conntrack's answer is cut short")

// parseTracked reads a message of ctnetlink: struct nfgenmsg, and attributes.
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

// each reads attributes of netlink, until one cannot be read.
func each(b []byte, read func(kind uint16, b []byte) error) error {
	var first error
	err := attributes(b, func(kind uint16, b []byte) {
		if first == nil {
			first = read(kind, b)
		}
	})
	return errors.Join(first, err)
}

// resyncer has conntrack know the numbers of connections, in the network namespace of the
// thread that made it.
type resyncer struct {
	drop *bpf.ResyncFilter
	// Raw sockets of IPv4 and of IPv6.
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
	if r.drop, err = bpf.DropResync(); err != nil {
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
	// Out of a device that they never reach: for that there need be no route to a service.
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

// resync has conntrack know the numbers of a connection. If it goes on to be carried conntrack
// stays liberal; else it checks the window again, and its time-out is as old as the
// connection has been idle. A connection that has ended is no error; errMissed leaves it as it is.
func (r *resyncer) resync(f bpf.Flow, n bpf.Sequence, idle time.Duration, carried bool) error {
	before, err := lookUp(f)
	if err != nil || before == nil {
		return err
	}
	if (before.flags[0]|before.flags[1])&tcpLiberal == 0 {
		return nil // it has followed the connection
	}
	if missed, err := before.missed(idle); err != nil {
		return err
	} else if missed {
		return errMissed
	}
	if before.state != tcpEstablished {
		// Its end would have had the fast path forget it.
		if err := reopen(f, idle); err != nil {
			return err
		}
	}
	original, reply := n.Pod, n.Peer
	if before.original.from != f.Pod {
		original, reply = reply, original
	}
	if err := r.handshake(before, original, reply); err != nil {
		return fmt.Errorf("resynchronise conntrack with %s to %s: %w", f.Pod, f.Peer, err)
	}
	if carried {
		return liberal(f)
	}
	after, err := lookUp(f)
	if err != nil || after == nil || after.state != tcpEstablished {
		return err
	}
	// The handshake left the original direction with what its SYN said.
	if after.flags[0]&tcpLiberal != 0 {
		return fmt.Errorf("resynchronise conntrack with %s to %s: it did not accept the handshake", f.Pod, f.Peer)
	}
	var flags byte
	if before.flags[0]&before.flags[1]&tcpScaled == 0 {
		// Conntrack has found it in the middle, does not know by how much windows are scaled, and was
		// liberal with it from the start.
		flags = tcpLiberal
	}
	return change(f, tcpInfo(flagsAre(flags, tcpLiberal)...), timeoutIs(after.timeout-min(after.timeout, uint32(idle/time.Second))))
}

// resyncs are there as long as they are needed: to attach the program takes the kernel a while.
type resyncs struct {
	mu   sync.Mutex
	r    *resyncer
	used bool
	// lacks tells whether the kernel does not have what it takes.
	lacks bool
}

var errCannotResync = errors.New("conntrack cannot be resynchronised")

// do renews, in the calling thread's network namespace.
func (a *resyncs) do(renew func(*resyncer) error) (err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.lacks {
		return errCannotResync
	}
	if a.r == nil {
		if a.r, err = newResyncer(); err != nil {
			a.lacks = true
			return fmt.Errorf("%w: %w", errCannotResync, err)
		}
	}
	a.used = true
	return renew(a.r)
}

// try tells whether numbers can be renewed.
func (a *resyncs) try() error { return a.do(func(*resyncer) error { return nil }) }

// rest ends what was not used since it was called last.
func (a *resyncs) rest() error {
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

// forgedFilter drops what would have conntrack forget a connection that it is liberal with (bpf.Guard).
type forgedFilter struct {
	mu           sync.Mutex
	attached     io.Closer
	used, closed bool
}

// start attaches it, in the calling thread's network namespace, if it is not.
func (g *forgedFilter) start(programs *bpf.Fastpath) (err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.used = true
	if g.attached == nil && !g.closed {
		g.attached, err = programs.DropForged()
	}
	return err
}

// rest takes it off, if it was not started since it was called last.
func (g *forgedFilter) rest() error {
	g.mu.Lock()
	used := g.used
	g.used = false
	g.mu.Unlock()
	if used {
		return nil
	}
	return g.detach()
}

func (g *forgedFilter) detach() (err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.attached != nil {
		err = g.attached.Close()
		g.attached = nil
	}
	return err
}

// close takes it off for good.
func (g *forgedFilter) close() error {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	return g.detach()
}

var errMissed = errors.New("conntrack has seen packets that the fast path missed")

// missed tells whether conntrack has seen a packet of an established connection since the programs
// saw its last: they have missed some.
func (t *tracked) missed(idle time.Duration) (bool, error) {
	timeout, err := timeoutOf("established", 0)
	if err != nil {
		return false, err
	}
	// Of whole seconds, as conntrack's are.
	return t.timeout <= timeout && time.Duration(timeout-t.timeout)*time.Second < idle-time.Second, nil
}

// TCP's flags (RFC 9293, section 3.1), and its options (section 3.2; RFC 2018 and 7323).
const (
	synFlag, ackFlag                               = 0x02, 0x10
	noOption, scaleOption, selectivePermitted byte = 1, 3, 4
)

// handshake shows conntrack a handshake that ends at numbers, and the window that each side has
// then.
func (r *resyncer) handshake(t *tracked, original, reply bpf.Side) error {
	window := func(own, other bpf.Side, scale uint8) uint16 {
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

// options are those of a SYN, as far as conntrack heeds them.
func options(flags, scale uint8) (b []byte) {
	if flags&tcpSelective != 0 {
		b = append(b, noOption, noOption, selectivePermitted, 2)
	}
	if flags&tcpScaled != 0 {
		b = append(b, noOption, scaleOption, 3, scale)
	}
	return b
}

// segment is a packet of TCP without data.
type segment struct {
	from, to netip.AddrPort
	seq, ack uint32
	flags    byte
	window   uint16
	options  []byte
}

// bytes are the packet with its IP header. Sums are left out: conntrack does not look at those
// of what the node sends, and nobody else sees it.
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

// send shows conntrack a packet, which is dropped then: the kernel says that it is not
// permitted.
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
