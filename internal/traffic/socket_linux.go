package traffic

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// fits returns an error that says why this system cannot generate the traffic of an end. Linux can generate all traffic.
func (Spec) fits(bool) error { return nil }

// errReset is the error of a connection that the other end has reset.
const errReset = unix.ECONNRESET

// Now returns CLOCK_MONOTONIC in nanoseconds, the clock of a Window.
func Now() int64 {
	var ts unix.Timespec
	// It fails only for an unknown clock or a bad pointer.
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return ts.Nano()
}

// Instant returns the same instant on both clocks: Go's, and that of Now. If the thread loses its CPU between the two readings,
// it reads both again.
func Instant() (at time.Time, mono int64) {
	const near = 20 * time.Microsecond
	for range 100 {
		before := Now()
		at, mono = time.Now(), Now()
		if mono-before < int64(near) {
			break
		}
	}
	return at, mono
}

// clock reads the clock of Now without a system call: Go reads CLOCK_MONOTONIC through the vDSO, but reveals only differences
// between readings.
type clock struct {
	// base and mono are the same instant.
	base time.Time
	mono int64
}

func newClock() (c clock) {
	c.base, c.mono = Instant()
	return c
}

func (c *clock) now() int64 { return c.mono + int64(time.Since(c.base)) }

// threadSpent returns the CPU time and the sleeps of the calling thread. A voluntary context switch counts as a sleep.
func threadSpent() spent {
	var ts unix.Timespec
	var use unix.Rusage
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts)
	_ = unix.Getrusage(unix.RUSAGE_THREAD, &use)
	return spent{time.Duration(ts.Nano()), uint64(use.Nvcsw)}
}

// retransmits returns how many segments of a TCP connection were retransmitted, or 0 for any other socket.
func retransmits(fd int) uint64 {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return 0
	}
	return uint64(info.Total_retrans)
}

// send and receive are raw system calls. With an ordinary call, the scheduler's bookkeeping, and the hand-over of the P when
// the call blocks, would cost more per message than many kernel paths do. Both block for at most stallCheck, so that the
// thread notices the end of the run, and then return errStalled.

func send(fd int, b []byte) (int, error) {
	return transfer(unix.SYS_WRITE, fd, b)
}

// trySend is send without waiting for room.
func trySend(fd int, b []byte) (int, error) {
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	return moved(n, errno)
}

func receive(fd int, b []byte) (int, error) {
	return transfer(unix.SYS_READ, fd, b)
}

// peek reads what has arrived, and leaves it in the socket.
func peek(fd int, b []byte) (int, error) {
	n, _, err := unix.Recvfrom(fd, b, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
		err = errStalled
	}
	return n, err
}

// acceptSocket waits for a connection, for at most stallCheck.
func acceptSocket(listening int) (int, netip.Addr, error) {
	fd, from, err := unix.Accept4(listening, unix.SOCK_CLOEXEC)
	switch {
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR), errors.Is(err, unix.ECONNABORTED):
		return -1, netip.Addr{}, errStalled
	case err != nil:
		return -1, netip.Addr{}, err
	}
	return fd, addrPort(from).Addr(), nil
}

// pollFD is a socket to wait for.
type pollFD = unix.PollFd

func toRead(fd int) pollFD { return pollFD{Fd: int32(fd), Events: unix.POLLIN} }

// wait returns when something has arrived at one of the sockets, or stallCheck has passed.
func wait(fds []pollFD) error {
	n, err := unix.Poll(fds, int(stallCheck.Milliseconds()))
	if n == 0 && err == nil || errors.Is(err, unix.EINTR) {
		err = errStalled
	}
	return err
}

func transfer(call uintptr, fd int, b []byte) (int, error) {
	n, _, errno := unix.RawSyscall(call, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	return moved(n, errno)
}

func moved(n uintptr, errno unix.Errno) (int, error) {
	switch errno {
	case 0:
		return int(n), nil
	// The timeout has passed, or a signal arrived: Go's scheduler sends one every 10 ms to a thread that it wants to preempt.
	// Repeating the call here would restart the timeout with each signal.
	case unix.EAGAIN, unix.EINTR:
		return 0, errStalled
	case unix.ENOBUFS: // only over UDP
		return 0, errDropped
	default:
		return 0, errno
	}
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

func newSocket(spec Spec, addr netip.Addr) (int, error) {
	family, kind := unix.AF_INET, unix.SOCK_STREAM
	if addr.Is6() {
		family = unix.AF_INET6
	}
	if spec.UDP {
		kind = unix.SOCK_DGRAM
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open socket: %w", err)
	}
	if err := setOptions(fd, spec); err != nil {
		closeSocket(fd)
		return -1, err
	}
	return fd, nil
}

func setOptions(fd int, spec Spec) error {
	if err := setTimeouts(fd, stallCheck); err != nil {
		return err
	}
	if spec.UDP {
		return nil
	}
	if err := reuseAddress(fd); err != nil {
		return err
	}
	if spec.noDelay() {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
			return fmt.Errorf("set TCP_NODELAY: %w", err)
		}
	}
	return setCongestionControl(fd, spec)
}

// reuseAddress lets sockets with this option have the same address and port: over TCP a listener and the connections of an
// earlier one, over UDP a listener and the sockets of its flows. A UDP socket must be bound before it gets the option.
// Otherwise the kernel may choose a port that another socket with the option uses (udp_lib_get_port in net/ipv4/udp.c): two
// flows of a client could share a port, or a client could get its server's.
func reuseAddress(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return fmt.Errorf("set SO_REUSEADDR: %w", err)
	}
	return nil
}

func setCongestionControl(fd int, spec Spec) error {
	if spec.CongestionControl == "" {
		return nil
	}
	if err := unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, spec.CongestionControl); err != nil {
		return fmt.Errorf("set congestion control %q (see net.ipv4.tcp_available_congestion_control): %w", spec.CongestionControl, err)
	}
	return nil
}

func setTimeouts(fd int, d time.Duration) error {
	if err := setTimeout(fd, unix.SO_RCVTIMEO, d); err != nil {
		return err
	}
	return setTimeout(fd, unix.SO_SNDTIMEO, d)
}

func setTimeout(fd, option int, d time.Duration) error {
	tv := unix.NsecToTimeval(int64(d))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, option, &tv); err != nil {
		return fmt.Errorf("set time-out: %w", err)
	}
	return nil
}

func listenSocket(spec Spec, addr netip.AddrPort) (int, netip.AddrPort, error) {
	fd, err := newSocket(spec, addr.Addr())
	if err != nil {
		return -1, netip.AddrPort{}, err
	}
	if spec.UDP {
		err = wantAsked(fd, addr.Addr())
	}
	if err == nil {
		err = unix.Bind(fd, sockaddr(addr))
	}
	switch {
	case err != nil:
	case spec.UDP:
		err = reuseAddress(fd)
	default:
		err = unix.Listen(fd, backlog)
	}
	var bound unix.Sockaddr
	if err == nil {
		bound, err = unix.Getsockname(fd)
	}
	if err != nil {
		closeSocket(fd)
		return -1, netip.AddrPort{}, err
	}
	return fd, addrPort(bound), nil
}

// acceptFlows accepts the UDP flows of a pair, and closes the listening socket.
func acceptFlows(spec Spec, fd int, at netip.AddrPort, auth *authenticator, stop *atomic.Bool) ([]*conn, error) {
	defer closeSocket(fd)
	peers := make(map[netip.AddrPort]bool)
	var conns []*conn
	for len(conns) < spec.Connections {
		if stop.Load() {
			return conns, context.Canceled
		}
		got, err := acceptUDP(spec, fd, at, auth, peers)
		switch {
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
		case err != nil:
			return conns, err
		default:
			conns = append(conns, &conn{fd: got})
		}
	}
	return conns, nil
}

func acceptUDP(spec Spec, fd int, at netip.AddrPort, auth *authenticator, peers map[netip.AddrPort]bool) (int, error) {
	hello := spec.hello()
	buf, control := make([]byte, len(hello)+1), make([]byte, unix.CmsgSpace(unix.SizeofInet6Pktinfo))
	n, controls, _, peer, err := unix.Recvmsg(fd, buf, control, 0)
	if err != nil {
		return -1, err
	}
	if peers[addrPort(peer)] {
		return -1, unix.EAGAIN // a repeated hello, or what follows it
	}
	if string(buf[:n]) != hello {
		auth.refused.Add(1)
		return -1, unix.EAGAIN
	}
	peers[addrPort(peer)] = true
	asked, err := askedOf(control[:controls])
	if err != nil {
		return -1, err
	}
	got, err := newSocket(spec, asked)
	if err != nil {
		return -1, err
	}
	if err = reuseAddress(got); err == nil {
		err = unix.Bind(got, sockaddr(netip.AddrPortFrom(asked, at.Port())))
	}
	if err == nil {
		err = unix.Connect(got, peer)
	}
	if err == nil {
		_, err = unix.Write(got, []byte(hello))
	}
	if err != nil {
		closeSocket(got)
		return -1, err
	}
	return got, nil
}

// wantAsked makes the kernel report the destination address of each datagram. askedOf returns it.
func wantAsked(fd int, addr netip.Addr) error {
	level, option := unix.IPPROTO_IP, unix.IP_PKTINFO
	if addr.Is6() {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO
	}
	if err := unix.SetsockoptInt(fd, level, option, 1); err != nil {
		return fmt.Errorf("ask for the addresses of datagrams: %w", err)
	}
	return nil
}

func askedOf(control []byte) (netip.Addr, error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("address of a datagram: %w", err)
	}
	for _, m := range messages {
		switch {
		case m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= unix.SizeofInet4Pktinfo:
			return netip.AddrFrom4([4]byte(m.Data[8:])), nil // struct in_pktinfo: the last of three
		case m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= unix.SizeofInet6Pktinfo:
			return netip.AddrFrom16([16]byte(m.Data)), nil // struct in6_pktinfo: the first of two
		}
	}
	return netip.Addr{}, errors.New("the kernel did not report the address of a datagram")
}

// dialTCP connects within dialTimeout, to which it sets the socket's send timeout. If a signal interrupts connect(2), it calls
// connect again, which on Linux waits for the connection in progress (__inet_stream_connect in net/ipv4/af_inet.c).
func dialTCP(fd int, to netip.AddrPort) error {
	// SO_SNDTIMEO also limits a blocking connect.
	if err := setTimeout(fd, unix.SO_SNDTIMEO, dialTimeout); err != nil {
		return err
	}
	for {
		switch err := unix.Connect(fd, sockaddr(to)); {
		case errors.Is(err, unix.EINPROGRESS):
			return errStalled
		case !errors.Is(err, unix.EINTR):
			return err
		}
	}
}

func connectUDP(fd int, to netip.AddrPort) error { return unix.Connect(fd, sockaddr(to)) }

// shutdownWrite sends a FIN to a TCP peer.
func shutdownWrite(fd int) {
	// It fails if the peer is gone, which does not matter.
	_ = unix.Shutdown(fd, unix.SHUT_WR)
}

func closeSocket(fd int) { _ = unix.Close(fd) }
