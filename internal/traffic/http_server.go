package traffic

import (
	"errors"
	"fmt"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// session is a connection that a server has open.
type session struct {
	fd int
	in []byte
	// out is what is still to be sent; last, that the connection ends after it.
	out  []byte
	last bool
	// ours: it has asked for something of the trial's.
	ours bool
	// watched is what the poller looks for on it, 0 as long as it looks for nothing.
	watched uint32
}

// httpServer is one thread of a server: it waits for all of its connections at once,
// so that there may be any number of them. The threads share the listening socket.
type httpServer struct {
	site      map[string]*object
	door      *door
	spec      Spec
	listening int
	epoll     int
	sessions  map[int32]*session
	ours      int // of the sessions
	free      []*session
}

// httpThreads is how many threads share an end's connections.
func (s Spec) httpThreads() int {
	if s.Page {
		return runtime.NumCPU()
	}
	return min(s.Connections, runtime.NumCPU())
}

// serveHTTP answers requests until the run is over and its clients are gone.
func (s Spec) serveHTTP(listening int, site map[string]*object, d *door, c *conn, r *run) error {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return fmt.Errorf("wait for connections: %w", err)
	}
	defer closeSocket(epoll)
	h := &httpServer{site: site, door: d, spec: s, listening: listening, epoll: epoll, sessions: make(map[int32]*session)}
	defer func() {
		for _, one := range h.sessions {
			closeSocket(one.fd)
		}
	}()
	// One connection wakes one thread.
	event := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLEXCLUSIVE, Fd: int32(listening)}
	if err := unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, listening, &event); err != nil {
		return fmt.Errorf("wait for connections: %w", err)
	}
	// Users of a page may come late, if they were held up.
	end := r.To
	if s.Page {
		end += int64(linger)
	}
	events := make([]unix.EpollEvent, 64)
	for {
		n, err := epollWait(epoll, events, stallCheck)
		if err != nil {
			return fmt.Errorf("wait for requests: %w", err)
		}
		for i := range n {
			if e := events[i]; int(e.Fd) == listening {
				err = h.accept(c)
			} else if one := h.sessions[e.Fd]; one != nil {
				err = h.serve(one, c)
			}
			if err != nil {
				return err
			}
		}
		now := r.now()
		c.mark(r, now)
		if r.stopped.Load() || now >= end && h.ours == 0 || now >= end+int64(answerLimit) {
			return nil
		}
	}
}

// epollWait is raw for the reason that send and receive are.
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

// accept takes a connection. Its request is mostly there already, and then its life
// passes without the poller.
func (h *httpServer) accept(c *conn) error {
	fd, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(h.listening), 0, 0, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0, 0)
	switch errno {
	case 0:
	case unix.EAGAIN, unix.EINTR, unix.ECONNABORTED: // another thread has it, or nobody
		return nil
	default:
		return fmt.Errorf("take a connection: %w", errno)
	}
	if err := unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		closeSocket(int(fd))
		return fmt.Errorf("set TCP_NODELAY: %w", err)
	}
	if err := setCongestionControl(int(fd), h.spec); err != nil {
		closeSocket(int(fd))
		return err
	}
	var one *session
	if n := len(h.free); n > 0 {
		one, h.free = h.free[n-1], h.free[:n-1]
	} else {
		one = &session{in: make([]byte, 0, headLimit)}
	}
	*one = session{fd: int(fd), in: one.in[:0]}
	if len(h.sessions)-h.ours >= maxGuests {
		h.refuseOne()
	}
	h.sessions[int32(fd)] = one
	return h.serve(one, c)
}

// serve moves a session on as far as it goes without waiting.
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
				return nil // its client has its own account
			case len(one.out) > 0:
				continue
			}
		}
		if one.last {
			h.close(one)
			return nil
		}
		got, err := parseRequest(one.in)
		switch {
		case err != nil:
			h.door.strangers.Add(1)
			one.out, one.last = responseBad, true
			continue
		case got.size > 0:
			found := false
			one.out, one.last, found = respond(h.site, got)
			switch {
			case !found:
				h.door.strangers.Add(1)
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
	if one.watched == what {
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

// refuseOne ends a session that has asked for nothing yet, to make room.
func (h *httpServer) refuseOne() {
	for _, one := range h.sessions {
		if !one.ours {
			h.door.strangers.Add(1)
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
