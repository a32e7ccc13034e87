//go:build linux

package traffic

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// session is an open connection of a server.
type session struct {
	fd int
	in []byte
	// out holds the bytes that are still to be sent. last means that the connection ends after that.
	out  []byte
	last bool
	// ours means that the client has requested an object of the trial.
	ours bool
	// watched are the events that the poller waits for; 0 for none.
	watched uint32
}

// httpServer is one thread of a server. On an event loop, it serves any number of connections. Otherwise it serves one at a
// time, and blocks. The threads share the listening sockets.
type httpServer struct {
	site      map[string]*object
	auth      *authenticator
	spec      Spec
	listening []int
	epoll     int // -1 without an event loop
	sessions  map[int32]*session
	ours      int // number of sessions that are ours
	free      []*session
}

// listenHTTP prepares a server whose connections come and go while it runs.
func (s *Server) listenHTTP() error {
	opening := []byte("GET " + s.spec.Secret.Path() + "/")
	s.auth = newAuthenticator(opening, len(opening), true)
	if err := unix.SetNonblock(s.fd, s.spec.EventLoop); err != nil {
		return err
	}
	return s.listenFurther()
}

// listenFurther opens a socket for each further port.
func (s *Server) listenFurther() error {
	for i := 1; i < s.spec.Ports; i++ {
		port := int(s.addr.Port()) + i
		fd, err := -1, error(unix.EADDRNOTAVAIL)
		if port <= math.MaxUint16 {
			fd, _, err = listenSocket(s.spec, netip.AddrPortFrom(s.addr.Addr(), uint16(port)))
		}
		if err == nil {
			s.further = append(s.further, fd)
			err = unix.SetNonblock(fd, true)
		}
		if err != nil {
			for _, fd := range s.further {
				closeSocket(fd)
			}
			return fmt.Errorf("port %d, number %d of %d: %w", port, i+1, s.spec.Ports, err)
		}
	}
	return nil
}

// acceptHTTP sets up the threads of a server.
func (s *Server) acceptHTTP() (*End, error) {
	end := &End{spec: s.spec, listening: s.fd, further: s.further, conns: unconnected(s.spec.httpThreads()), auth: s.auth}
	site, listening := s.spec.site(), append([]int{s.fd}, s.further...)
	end.each(func(c *conn, r *run) error { return s.spec.serveHTTP(listening, site, s.auth, c, r) })
	return end, nil
}

// httpThreads returns the number of threads of an end.
func (s Spec) httpThreads() int {
	switch {
	case s.Page:
		return runtime.NumCPU()
	case s.EventLoop:
		return min(s.Connections, runtime.NumCPU())
	}
	return s.Connections
}

// serveHTTP answers requests until the run is over and its clients are gone.
func (s Spec) serveHTTP(listening []int, site map[string]*object, auth *authenticator, c *conn, r *run) error {
	h := &httpServer{site: site, auth: auth, spec: s, listening: listening, epoll: -1, sessions: make(map[int32]*session)}
	defer func() {
		for _, one := range h.sessions {
			closeSocket(one.fd)
		}
	}()
	if s.EventLoop {
		return h.loop(c, r)
	}
	return h.block(c, r)
}

// block serves one connection at a time. It accepts only those that have requested an object of the trial.
func (h *httpServer) block(c *conn, r *run) error {
	pending := &acceptor{authenticator: h.auth}
	defer pending.close()
	for {
		fd, err := pending.accept(h.listening[0])
		if err == nil {
			if err = setOptions(fd, h.spec); err != nil {
				closeSocket(fd)
			}
		}
		if err != nil && !errors.Is(err, errStalled) {
			return fmt.Errorf("take a connection: %w", err)
		}
		if err == nil {
			h.serveOut(h.session(fd), pending, c, r)
		}
		if h.over(c, r) {
			return nil
		}
	}
}

// serveOut serves a session until it ends. One from a trusted address that sends nothing becomes pending, so that others are
// served.
func (h *httpServer) serveOut(one *session, pending *acceptor, c *conn, r *run) {
	began := r.now()
	for h.sessions[int32(one.fd)] == one {
		_ = h.serve(one, c) // with blocking calls, an error means that the session has ended
		if h.over(c, r) {
			return
		}
		if !one.ours && len(one.in) == 0 && h.sessions[int32(one.fd)] == one && r.now()-began >= int64(stallCheck) {
			pending.add(one.fd, netip.Addr{})
			delete(h.sessions, int32(one.fd))
			h.free = append(h.free, one)
		}
	}
}

// over records the edges of the window, and reports whether the run is over.
func (h *httpServer) over(c *conn, r *run) bool {
	// Users of a page may come late if they were delayed.
	end := r.To
	if h.spec.Page {
		end += int64(linger)
	}
	now := r.now()
	c.mark(r, now)
	return r.stopped.Load() || now >= end && h.ours == 0 || now >= end+int64(answerLimit)
}

func (h *httpServer) loop(c *conn, r *run) (err error) {
	if h.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("wait for connections: %w", err)
	}
	defer closeSocket(h.epoll)
	listens := make(map[int32]bool, len(h.listening))
	for _, fd := range h.listening {
		// EPOLLEXCLUSIVE makes a connection wake only one thread.
		event := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLEXCLUSIVE, Fd: int32(fd)}
		if err := unix.EpollCtl(h.epoll, unix.EPOLL_CTL_ADD, fd, &event); err != nil {
			return fmt.Errorf("wait for connections: %w", err)
		}
		listens[int32(fd)] = true
	}
	events := make([]unix.EpollEvent, 64)
	for {
		n, err := epollWait(h.epoll, events, stallCheck)
		if err != nil {
			return fmt.Errorf("wait for requests: %w", err)
		}
		for _, e := range events[:n] {
			one := h.sessions[e.Fd]
			if listens[e.Fd] {
				// Usually the request has arrived already, and the connection never needs the poller.
				one, err = h.accept(e.Fd)
			}
			if one != nil {
				err = h.serve(one, c)
			}
			if err != nil {
				return err
			}
		}
		if h.over(c, r) {
			return nil
		}
	}
}

// epollWait is a raw system call, for the same reason as send and receive.
func epollWait(epoll int, events []unix.EpollEvent, wait time.Duration) (int, error) {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epoll), uintptr(unsafe.Pointer(unsafe.SliceData(events))),
		uintptr(len(events)), uintptr(wait.Milliseconds()), 0, 0)
	switch errno {
	case 0:
		return int(n), nil
	case unix.EINTR:
		return 0, nil
	}
	return 0, errno
}

// accept accepts a connection, or returns nil if there is none.
func (h *httpServer) accept(listening int32) (*session, error) {
	fd, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(listening), 0, 0, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0, 0)
	switch errno {
	case 0:
	case unix.EAGAIN, unix.EINTR, unix.ECONNABORTED: // another thread has it, or there is none
		return nil, nil
	default:
		return nil, fmt.Errorf("take a connection: %w", errno)
	}
	if err := unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		closeSocket(int(fd))
		return nil, fmt.Errorf("set TCP_NODELAY: %w", err)
	}
	if err := setCongestionControl(int(fd), h.spec); err != nil {
		closeSocket(int(fd))
		return nil, err
	}
	// A client may open all its connections before it requests anything.
	if len(h.sessions)-h.ours >= maxPending+h.spec.Connections {
		h.refuseOne()
	}
	return h.session(int(fd)), nil
}

// session returns the session of a new connection.
func (h *httpServer) session(fd int) *session {
	var one *session
	if n := len(h.free); n > 0 {
		one, h.free = h.free[n-1], h.free[:n-1]
	} else {
		one = &session{in: make([]byte, 0, headLimit)}
	}
	*one = session{fd: fd, in: one.in[:0]}
	h.sessions[int32(fd)] = one
	return one
}

// serve advances a session as far as possible without waiting. With blocking calls, it advances to the end of a response, or
// until a call has timed out.
func (h *httpServer) serve(one *session, c *conn) error {
	for {
		if len(one.out) > 0 {
			n, err := send(one.fd, one.out)
			c.bytes.Add(uint64(n))
			if one.out = one.out[n:]; len(one.out) == 0 {
				c.messages.Add(1)
			}
			switch {
			case errors.Is(err, errStalled):
				return h.watch(one, unix.EPOLLOUT)
			case err != nil:
				h.close(one)
				return nil // its client counts that
			case len(one.out) > 0:
				continue
			case !h.spec.EventLoop && !one.last:
				return nil
			}
		}
		if one.last {
			h.close(one)
			return nil
		}
		got, err := parseRequest(one.in)
		switch {
		case err != nil:
			h.auth.refused.Add(1)
			one.out, one.last = responseBad, true
			continue
		case got.size > 0:
			found := false
			one.out, one.last, found = respond(h.site, got)
			switch {
			case !found:
				h.auth.refused.Add(1)
			case !one.ours:
				one.ours = true
				h.ours++
			}
			one.in = one.in[:copy(one.in, one.in[got.size:])]
			continue
		}
		n, err := receive(one.fd, one.in[len(one.in):cap(one.in)])
		switch {
		case errors.Is(err, errStalled):
			return h.watch(one, unix.EPOLLIN)
		case err != nil, n == 0:
			h.close(one)
			return nil
		}
		one.in = one.in[:len(one.in)+n]
	}
}

func (h *httpServer) watch(one *session, what uint32) error {
	if one.watched == what || !h.spec.EventLoop {
		return nil
	}
	op := unix.EPOLL_CTL_MOD
	if one.watched == 0 {
		op = unix.EPOLL_CTL_ADD
	}
	one.watched = what
	if err := unix.EpollCtl(h.epoll, op, one.fd, &unix.EpollEvent{Events: what, Fd: int32(one.fd)}); err != nil {
		return fmt.Errorf("wait for a connection: %w", err)
	}
	return nil
}

// refuseOne ends a session that has requested nothing yet, to make room.
func (h *httpServer) refuseOne() {
	for _, one := range h.sessions {
		if !one.ours {
			h.auth.refused.Add(1)
			h.close(one)
			return
		}
	}
}

func (h *httpServer) close(one *session) {
	if one.ours {
		h.ours--
	}
	closeSocket(one.fd) // and the poller forgets it
	delete(h.sessions, int32(one.fd))
	h.free = append(h.free, one)
}
