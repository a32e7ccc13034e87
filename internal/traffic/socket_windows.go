package traffic

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/windows"
)

// This file has the engine's calls on Windows. Sockets are non-blocking: a socket whose blocking call has timed out must not be
// used any more (SO_RCVTIMEO of setsockopt), and a thread has to check every stallCheck whether to stop. A call that can move
// nothing waits in WSAPoll and tries once more. So waiting for a message costs one call more than in a blocking program.

var (
	winsock  = windows.NewLazySystemDLL("ws2_32.dll")
	accept   = winsock.NewProc("accept")
	ioctl    = winsock.NewProc("ioctlsocket")
	recv     = winsock.NewProc("recv")
	recvFrom = winsock.NewProc("recvfrom")
	selector = winsock.NewProc("select")
	sendTo   = winsock.NewProc("send")
	poll     = winsock.NewProc("WSAPoll")

	kernel        = windows.NewLazySystemDLL("kernel32.dll")
	counter       = kernel.NewProc("QueryPerformanceCounter")
	threadTimes   = kernel.NewProc("GetThreadTimes")
	startWinsock  = sync.OnceValue(func() error { return windows.WSAStartup(0x202, new(windows.WSAData)) })
	counterPerSec = sync.OnceValue(func() uint64 {
		var f int64
		_, _, _ = kernel.NewProc("QueryPerformanceFrequency").Call(uintptr(unsafe.Pointer(&f))) // it does not fail on Windows XP or later
		return uint64(f)
	})
)

// errReset is the error of a connection that the other end has reset.
const errReset = windows.WSAECONNRESET

// fits returns an error that says why this system cannot generate the traffic of an end, or nil.
func (s Spec) fits(server bool) error {
	switch {
	case s.Kind == HTTP:
		return errors.New("the engine's HTTP needs Linux: choose other traffic for a place that runs Windows")
	case s.EventLoop:
		return errors.New("io: epoll needs Linux: leave it out for a place that runs Windows, where each connection has a thread that waits")
	case s.CongestionControl != "":
		return setCongestionControl(0, s)
	case s.UDP && server && s.Connections > 1:
		return fmt.Errorf("a server on Windows takes 1 UDP flow of a pair, not %d, as datagrams to one port reach one socket there: set connections: 1, or have the server on Linux", s.Connections)
	}
	return nil
}

// Now returns the performance counter in nanoseconds, the clock of a Window. Go's own clock advances with the timer interrupt,
// in steps of 0.5 ms to 15.6 ms.
func Now() int64 {
	var count int64
	_, _, _ = syscall.SyscallN(counter.Addr(), uintptr(unsafe.Pointer(&count)))
	high, low := bits.Mul64(uint64(count), uint64(time.Second))
	ns, _ := bits.Div64(high, low, counterPerSec())
	return int64(ns)
}

type clock struct{}

func newClock() clock { return clock{} }

func (clock) now() int64 { return Now() }

// threadSpent returns the CPU time of the calling thread, which Windows counts in timer interrupts. Windows does not count
// sleeps.
func threadSpent() spent {
	var created, exited, system, user windows.Filetime
	// It fails only for a thread that does not exist.
	_, _, _ = threadTimes.Call(uintptr(windows.CurrentThread()),
		uintptr(unsafe.Pointer(&created)), uintptr(unsafe.Pointer(&exited)), uintptr(unsafe.Pointer(&system)), uintptr(unsafe.Pointer(&user)))
	ticks := func(f windows.Filetime) int64 { return int64(f.HighDateTime)<<32 | int64(f.LowDateTime) }
	return spent{cpu: time.Duration(100 * (ticks(system) + ticks(user)))}
}

// retransmits returns 0: Windows reports how many bytes were retransmitted, not how many segments.
func retransmits(int) uint64 { return 0 }

func send(fd int, b []byte) (int, error) {
	n, err := trySend(fd, b)
	if err != errStalled {
		return n, err
	}
	if err := wait([]pollFD{{fd: uintptr(fd), events: pollOut}}); err != nil {
		return 0, err
	}
	return trySend(fd, b)
}

// trySend is send without waiting for room.
func trySend(fd int, b []byte) (int, error) {
	n, _, errno := syscall.SyscallN(sendTo.Addr(), uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), 0)
	return moved(n, errno, 0)
}

func receive(fd int, b []byte) (int, error) {
	n, err := tryReceive(fd, b, 0)
	if err != errStalled {
		return n, err
	}
	if err := wait([]pollFD{toRead(fd)}); err != nil {
		return 0, err
	}
	return tryReceive(fd, b, 0)
}

// peek reads what has arrived, and leaves it in the socket.
func peek(fd int, b []byte) (int, error) { return tryReceive(fd, b, windows.MSG_PEEK) }

func tryReceive(fd int, b []byte, flags uintptr) (int, error) {
	n, _, errno := syscall.SyscallN(recv.Addr(), uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), flags)
	return moved(n, errno, len(b))
}

// moved returns how many bytes a call has moved, given the size of the buffer.
func moved(n uintptr, errno syscall.Errno, room int) (int, error) {
	if int32(n) >= 0 {
		return int(n), nil
	}
	switch errno {
	case windows.WSAEMSGSIZE: // the datagram was longer, and is truncated
		return room, nil
	case windows.WSAEWOULDBLOCK:
		return 0, errStalled
	case windows.WSAENOBUFS: // only over UDP
		return 0, errDropped
	default:
		return 0, errno
	}
}

// pollFD is a socket to wait for (WSAPOLLFD).
type pollFD struct {
	fd      uintptr
	events  int16
	Revents int16
}

// From winsock2.h.
const (
	pollIn  = 0x0300 // POLLRDNORM | POLLRDBAND
	pollOut = 0x0010 // POLLWRNORM
)

func toRead(fd int) pollFD { return pollFD{fd: uintptr(fd), events: pollIn} }

// wait returns when one of the sockets can move something, or stallCheck has passed.
func wait(fds []pollFD) error {
	n, _, errno := syscall.SyscallN(poll.Addr(), uintptr(unsafe.Pointer(unsafe.SliceData(fds))), uintptr(len(fds)), uintptr(stallCheck.Milliseconds()))
	switch {
	case int32(n) > 0:
		return nil
	case int32(n) == 0:
		return errStalled
	}
	return errno
}

func sockaddr(a netip.AddrPort) windows.Sockaddr {
	if a.Addr().Is4() {
		return &windows.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &windows.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

func addrPort(sa windows.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *windows.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *windows.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

func newSocket(spec Spec, addr netip.Addr) (int, error) {
	if err := startWinsock(); err != nil {
		return -1, fmt.Errorf("open socket: %w", err)
	}
	family, kind := int32(windows.AF_INET), int32(windows.SOCK_STREAM)
	if addr.Is6() {
		family = windows.AF_INET6
	}
	if spec.UDP {
		kind = windows.SOCK_DGRAM
	}
	s, err := windows.WSASocket(family, kind, 0, nil, 0, windows.WSA_FLAG_OVERLAPPED|windows.WSA_FLAG_NO_HANDLE_INHERIT)
	if err != nil {
		return -1, fmt.Errorf("open socket: %w", err)
	}
	if err := setOptions(int(s), spec); err != nil {
		closeSocket(int(s))
		return -1, err
	}
	return int(s), nil
}

// fionbio makes a socket non-blocking (winsock2.h).
const fionbio = 0x8004667e

func setOptions(fd int, spec Spec) error {
	on := uint32(1)
	if failed, _, errno := ioctl.Call(uintptr(fd), fionbio, uintptr(unsafe.Pointer(&on))); failed != 0 {
		return fmt.Errorf("set FIONBIO: %w", errno)
	}
	if spec.UDP || !spec.noDelay() {
		return nil
	}
	if err := windows.SetsockoptInt(windows.Handle(fd), windows.IPPROTO_TCP, windows.TCP_NODELAY, 1); err != nil {
		return fmt.Errorf("set TCP_NODELAY: %w", err)
	}
	return nil
}

// setCongestionControl fails if a congestion control is set: Windows has no socket option for it.
func setCongestionControl(_ int, s Spec) error {
	if s.CongestionControl == "" {
		return nil
	}
	return fmt.Errorf("congestion control %s: it cannot be set on Windows: leave it out", s.CongestionControl)
}

// setTimeouts does nothing, because sockets are non-blocking.
func setTimeouts(int, time.Duration) error { return nil }

func listenSocket(spec Spec, addr netip.AddrPort) (int, netip.AddrPort, error) {
	fd, err := newSocket(spec, addr.Addr())
	if err != nil {
		return -1, netip.AddrPort{}, err
	}
	s := windows.Handle(fd)
	err = windows.Bind(s, sockaddr(addr))
	if err == nil && !spec.UDP {
		err = windows.Listen(s, backlog)
	}
	var bound windows.Sockaddr
	if err == nil {
		bound, err = windows.Getsockname(s)
	}
	if err != nil {
		closeSocket(fd)
		return -1, netip.AddrPort{}, err
	}
	return fd, addrPort(bound), nil
}

// acceptSocket waits for a connection, for at most stallCheck.
func acceptSocket(listening int) (int, netip.Addr, error) {
	if err := wait([]pollFD{toRead(listening)}); err != nil {
		return -1, netip.Addr{}, err
	}
	fd, _, errno := accept.Call(uintptr(listening), 0, 0)
	switch {
	case windows.Handle(fd) != windows.InvalidHandle:
	case errno == windows.WSAEWOULDBLOCK, errno == windows.WSAECONNRESET: // another thread has it, or there is none
		return -1, netip.Addr{}, errStalled
	default:
		return -1, netip.Addr{}, errno
	}
	from, err := windows.Getpeername(windows.Handle(fd))
	if err != nil { // it has gone
		closeSocket(int(fd))
		return -1, netip.Addr{}, errStalled
	}
	return int(fd), addrPort(from).Addr(), nil
}

// acceptFlows accepts the single flow of a pair. Windows delivers datagrams to any of the sockets that are bound to a port,
// even to one that is connected to another address, so the listening socket itself becomes the flow's.
func acceptFlows(spec Spec, fd int, _ netip.AddrPort, auth *authenticator, stop *atomic.Bool) ([]*conn, error) {
	hello := spec.hello()
	buf := make([]byte, len(hello)+1)
	for {
		if stop.Load() {
			closeSocket(fd)
			return nil, context.Canceled
		}
		n, peer, err := receiveFrom(fd, buf)
		switch {
		case errors.Is(err, errStalled):
			continue
		case err == nil && string(buf[:n]) != hello:
			auth.refused.Add(1)
			continue
		case err == nil:
			err = connectUDP(fd, peer)
		}
		if err == nil {
			_, err = send(fd, []byte(hello))
		}
		if err != nil {
			closeSocket(fd)
			return nil, err
		}
		return []*conn{{fd: fd}}, nil
	}
}

func receiveFrom(fd int, b []byte) (int, netip.AddrPort, error) {
	if err := wait([]pollFD{toRead(fd)}); err != nil {
		return 0, netip.AddrPort{}, err
	}
	var from windows.RawSockaddrAny
	size := int32(unsafe.Sizeof(from))
	got, _, errno := recvFrom.Call(uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), 0,
		uintptr(unsafe.Pointer(&from)), uintptr(unsafe.Pointer(&size)))
	n, err := moved(got, errno.(syscall.Errno), len(b))
	if err != nil {
		return 0, netip.AddrPort{}, err
	}
	peer, err := from.Sockaddr()
	if err != nil {
		return 0, netip.AddrPort{}, err
	}
	return n, addrPort(peer), nil
}

// soError is SO_ERROR of winsock2.h.
const soError = 0x1007

// fdSet holds the sockets for select.
type fdSet struct {
	count   uint32
	sockets [64]uintptr
}

// dialTCP connects within dialTimeout. It uses select, because WSAPoll does not report a failed connection before Windows 10
// 2004.
func dialTCP(fd int, to netip.AddrPort) error {
	err := windows.Connect(windows.Handle(fd), sockaddr(to))
	if err != windows.WSAEWOULDBLOCK {
		return err
	}
	writable, failed := fdSet{count: 1, sockets: [64]uintptr{uintptr(fd)}}, fdSet{count: 1, sockets: [64]uintptr{uintptr(fd)}}
	limit := windows.NsecToTimeval(int64(dialTimeout))
	n, _, errno := selector.Call(0, 0, uintptr(unsafe.Pointer(&writable)), uintptr(unsafe.Pointer(&failed)), uintptr(unsafe.Pointer(&limit)))
	switch {
	case int32(n) < 0:
		return errno
	case n == 0:
		return errStalled
	case failed.count == 0:
		return nil
	}
	why, err := windows.GetsockoptInt(windows.Handle(fd), windows.SOL_SOCKET, soError)
	if err != nil {
		return err
	}
	return syscall.Errno(why)
}

func connectUDP(fd int, to netip.AddrPort) error {
	return windows.Connect(windows.Handle(fd), sockaddr(to))
}

// shutdownWrite sends a FIN to a TCP peer.
func shutdownWrite(fd int) {
	// It fails if the peer is gone, which does not matter.
	_ = windows.Shutdown(windows.Handle(fd), windows.SHUT_WR)
}

func closeSocket(fd int) { _ = windows.Closesocket(windows.Handle(fd)) }

// errLinux is for functions that are never called here, because fits refuses the traffic that needs them.
var errLinux = errors.New("it needs Linux")

func (s Spec) share([]*conn, bool) func(*run) error {
	return func(*run) error { return errLinux }
}

func (s *Server) listenHTTP() error          { return errLinux }
func (s *Server) acceptHTTP() (*End, error)  { return nil, errLinux }
func (e *End) dialHTTP(netip.AddrPort) error { return errLinux }
