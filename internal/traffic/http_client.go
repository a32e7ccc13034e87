//go:build linux

package traffic

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// answerLimit is the time after which an unanswered request counts as failed.
	answerLimit = 5 * time.Second
	// failurePause is the pause after a failed request: a refused connection is so cheap that a hundred thousand would fail per
	// second.
	failurePause = 5 * time.Millisecond
)

// requests counts the requests that the threads of a client still have to make in total.
type requests struct {
	bounded bool
	left    atomic.Int64
}

func newRequests(n int) *requests {
	q := &requests{bounded: n > 0}
	q.left.Store(int64(n))
	return q
}

// take takes one request, and returns false if none is left.
func (q *requests) take() bool { return !q.bounded || q.left.Add(-1) >= 0 }

// States of a browser.
const (
	idle = iota
	connecting
	sending
	reading
	ending // the response is complete; wait until the server closes
	done   // nothing is left to request
)

// browser is one of the concurrent connections of a client.
type browser struct {
	fd    int // -1 without one
	state int
	// began is when the current request began, or when the next may begin after a failure.
	began int64
	sent  int // bytes of the request
	in    []byte
	have  int // bytes of the response
	head  head
}

// httpClient is one thread of a client. On an event loop, it serves its share of the connections, as the server does. Otherwise
// it has one connection, and blocks.
type httpClient struct {
	spec     Spec
	address  unix.Sockaddr
	family   int
	request  []byte
	left     *requests
	c        *conn
	r        *run
	epoll    int
	browsers []browser
	byFD     map[int32]*browser
	body     []byte // its content is ignored
	paused   int
}

// dialHTTP sets up the threads of a client, which open connections while they run.
func (e *End) dialHTTP(to netip.AddrPort) error {
	s := e.spec
	if s.Page {
		e.conns = unconnected(s.Connections)
		e.each(func(c *conn, r *run) error { return s.visit(to, c, r) })
		return nil
	}
	e.conns = unconnected(s.httpThreads())
	left := newRequests(s.Requests)
	e.each(func(c *conn, r *run) error {
		thread := slices.Index(e.conns, c)
		share := (s.Connections + thread) / len(e.conns)
		return s.requestAll(to, share, left, c, r)
	})
	return nil
}

// requestAll requests the only object until the run is over or all requests are done. The latency includes opening a
// connection, if necessary. It ends with the last byte of the response or, if the connection is not kept, with the end of the
// connection.
func (s Spec) requestAll(to netip.AddrPort, share int, left *requests, c *conn, r *run) error {
	connection := "close"
	if s.KeepAlive {
		connection = "keep-alive"
	}
	h := &httpClient{
		spec: s, address: sockaddr(to), family: unix.AF_INET, left: left, c: c, r: r,
		request: fmt.Appendf(nil, "GET %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: slipstream\r\nConnection: %s\r\n\r\n", s.Secret.Path()+pageIndex, to, connection),
		byFD:    make(map[int32]*browser), body: make([]byte, 64<<10),
	}
	if to.Addr().Is6() {
		h.family = unix.AF_INET6
	}
	h.browsers = make([]browser, share)
	for i := range h.browsers {
		h.browsers[i] = browser{fd: -1, in: make([]byte, headLimit)}
	}
	defer func() {
		for i := range h.browsers {
			h.close(&h.browsers[i])
		}
	}()
	if !s.EventLoop {
		h.block()
		return nil
	}
	return h.loop()
}

// block does what loop does for one connection, with blocking calls.
func (h *httpClient) block() {
	for b := &h.browsers[0]; ; {
		err := h.move(b)
		now := h.r.now()
		switch {
		case b.state == done:
			h.c.finish(h.r, now)
			return
		case err != nil && !errors.Is(err, errStalled):
			h.fail(b, err)
		case b.state != idle && now-b.began > int64(answerLimit):
			h.fail(b, errNoAnswer)
		}
		h.c.mark(h.r, now)
		if b.state == idle && now < b.began { // it has failed, and pauses
			h.r.await(min(b.began, h.r.To), sleeper{}, false)
			now = h.r.now()
		}
		if now >= h.r.To || h.r.stopped.Load() {
			h.cutOff(now)
			return
		}
	}
}

func (h *httpClient) loop() (err error) {
	if h.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("wait for responses: %w", err)
	}
	defer closeSocket(h.epoll)
	for i := range h.browsers {
		h.step(&h.browsers[i])
	}
	events := make([]unix.EpollEvent, 64)
	looked := h.r.now()
	for {
		wait := stallCheck
		if h.paused > 0 {
			wait = failurePause
		}
		n, err := epollWait(h.epoll, events, wait)
		if err != nil {
			return fmt.Errorf("wait for responses: %w", err)
		}
		for i := range n {
			b := h.byFD[events[i].Fd]
			if b == nil || events[i].Events == unix.EPOLLOUT && b.state != connecting && b.state != sending {
				continue
			}
			h.step(b)
		}
		now := h.r.now()
		h.c.mark(h.r, now)
		if now >= h.r.To || h.r.stopped.Load() {
			h.cutOff(now)
			return nil
		}
		if h.paused > 0 || now-looked > int64(stallCheck) {
			looked = now
			if h.attend(now) == len(h.browsers) {
				h.c.finish(h.r, now)
				return nil
			}
		} else if h.left.bounded && h.left.left.Load() < 0 && h.attend(now) == len(h.browsers) {
			h.c.finish(h.r, now)
			return nil
		}
	}
}

// attend starts the next requests of browsers whose pause is over, gives up requests after answerLimit, and counts the browsers
// that are done.
func (h *httpClient) attend(now int64) (finished int) {
	for i := range h.browsers {
		switch b := &h.browsers[i]; {
		case b.state == done:
			finished++
		case b.state == idle && now >= b.began:
			h.paused--
			h.step(b)
		case b.state != idle && now-b.began > int64(answerLimit):
			h.fail(b, errNoAnswer)
		}
	}
	return finished
}

// cutOff ends the requests that are in progress after the window. Those that have taken longer than linger by then count as
// failed.
func (h *httpClient) cutOff(now int64) {
	for i := range h.browsers {
		b := &h.browsers[i]
		if b.state != idle && b.state != done && b.began >= h.r.From && now-b.began > int64(linger) {
			h.c.fail(errNoAnswer)
		}
	}
	h.c.finish(h.r, max(now, h.r.To))
}

// step advances a browser as far as possible without waiting.
func (h *httpClient) step(b *browser) {
	for {
		err := h.move(b)
		switch {
		case errors.Is(err, errStalled), b.state == done:
			return
		case err != nil:
			h.fail(b, err)
			return
		}
	}
}

// move makes one step of a browser. It returns errStalled if the browser has to wait.
func (h *httpClient) move(b *browser) error {
	switch b.state {
	case idle:
		return h.begin(b)
	case connecting: // the first write reports whether the connection is established
		b.state = sending
	case sending:
		n, err := send(b.fd, h.request[b.sent:])
		if err != nil {
			return err
		}
		if b.sent += n; b.sent < len(h.request) {
			return nil
		}
		b.state = reading
		return errStalled // the response has not arrived yet
	case reading:
		return h.read(b)
	case ending:
		n, err := receive(b.fd, h.body)
		switch {
		case err != nil:
			return err
		case n > 0:
			return fmt.Errorf("%w: more than the response", errHTTP)
		}
		h.succeed(b)
	}
	return nil
}

// begin starts a request, over a new connection if there is none.
func (h *httpClient) begin(b *browser) error {
	now := h.r.now()
	if now >= h.r.To {
		return errStalled
	}
	if now >= h.r.From && !h.left.take() {
		b.state = done
		return nil
	}
	b.began, b.sent, b.have, b.head, b.state = now, 0, 0, head{}, sending
	if b.fd >= 0 {
		return nil
	}
	fd, err := h.open()
	if err != nil {
		return err
	}
	b.fd, h.byFD[int32(fd)] = fd, b
	err = unix.Connect(fd, h.address)
	// A blocking connect waits no longer than any other call. The first write then continues to wait.
	if err != nil && !errors.Is(err, unix.EINPROGRESS) && !errors.Is(err, unix.EINTR) {
		return err
	}
	if h.spec.EventLoop {
		// The poller is edge-triggered, so the events of a connection never change.
		event := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET&0xffffffff, Fd: int32(fd)}
		if err := unix.EpollCtl(h.epoll, unix.EPOLL_CTL_ADD, fd, &event); err != nil {
			return fmt.Errorf("wait for a connection: %w", err)
		}
	}
	if err != nil {
		b.state = connecting
		return errStalled
	}
	return nil
}

func (h *httpClient) open() (int, error) {
	kind := unix.SOCK_STREAM | unix.SOCK_CLOEXEC
	if h.spec.EventLoop {
		kind |= unix.SOCK_NONBLOCK
	}
	fd, err := unix.Socket(h.family, kind, 0)
	if err != nil {
		return -1, fmt.Errorf("open socket: %w", err)
	}
	err = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	if err == nil && !h.spec.EventLoop {
		err = setTimeouts(fd, stallCheck)
	}
	if err == nil {
		err = setCongestionControl(fd, h.spec)
	}
	if err != nil {
		closeSocket(fd)
		return -1, err
	}
	return fd, nil
}

// read reads what has arrived of the response.
func (h *httpClient) read(b *browser) error {
	into := h.body
	if b.head.size == 0 {
		into = b.in[b.have:]
	}
	n, err := receive(b.fd, into)
	switch {
	case err != nil:
		return err
	case n == 0:
		return io.ErrUnexpectedEOF
	}
	b.have += n
	if b.head.size == 0 {
		if b.head, err = parseResponse(b.in[:b.have]); err != nil || b.head.size == 0 {
			return err
		}
	}
	switch want := b.head.size + b.head.length; {
	case b.have < want:
		return nil
	case b.have > want:
		return fmt.Errorf("%w: more than the response", errHTTP)
	case b.head.status < 200 || b.head.status > 299:
		return fmt.Errorf("%w: %d", errStatus, b.head.status)
	case b.head.last:
		// The server closes first, so that the client's port is free immediately.
		b.state = ending
		return nil
	}
	h.succeed(b)
	return nil
}

func (h *httpClient) succeed(b *browser) {
	now := h.r.now()
	if b.began >= h.r.From && now <= h.r.To {
		h.c.record(now - b.began)
	}
	h.c.bytes.Add(uint64(b.head.length))
	h.c.messages.Add(1)
	if b.head.last {
		h.close(b)
	}
	b.state = idle
}

func (h *httpClient) fail(b *browser, err error) {
	now := h.r.now()
	if b.began >= h.r.From && now < h.r.To { // after the window the server is gone
		h.c.fail(err)
	}
	h.close(b)
	b.state, b.began = idle, now+int64(failurePause)
	h.paused++
}

func (h *httpClient) close(b *browser) {
	if b.fd >= 0 {
		closeSocket(b.fd) // which also removes it from the poller
		delete(h.byFD, int32(b.fd))
		b.fd = -1
	}
}
