//go:build linux

package traffic

import (
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"golang.org/x/sys/unix"
)

// loop is the thread that all connections of an end share (Spec.EventLoop). It polls them, level-triggered, and makes one call
// for each that is ready, as Redis, memcached and programs that use libuv or libevent do. The source of a stream makes several.
type loop struct {
	spec  Spec
	r     *run
	epoll int
	flows []flow
	// open is the number of flows that have not ended.
	open int
	// edge is the time of the window's next edge.
	edge int64
}

// flow is a connection of a loop.
type flow struct {
	*conn
	index int32
	// watched are the events that the poller waits for.
	watched uint32
	ended   bool
	// in is the read buffer, with got bytes of a message.
	in  []byte
	got int
	// out is the message to send, and rest the unsent part of the current one.
	out, rest []byte
	// seq is the number of the current message, due the time when it was to be sent, begun the time when sending began, and
	// full the time since when the connection has had no room for it.
	seq              uint64
	due, begun, full int64
	// Of a sender under load: first is when its first message is due, and finished means that it has sent everything. answered counts
	// the answers, and seen recognises their duplicates.
	first    int64
	finished bool
	answered uint64
	seen     *arrivals
}

// looped is one end of one kind of traffic on a loop.
type looped interface {
	// begin makes the first step of a connection.
	begin(f *flow) error
	// ready advances a connection for which the poller reports events. io.EOF means that it has
	// ended.
	ready(f *flow, events uint32) error
	// turn is called after each poll. quiet means that no connection was ready. It returns how long the next poll may wait, and
	// whether the loop is over.
	turn(now int64, quiet bool) (wait time.Duration, over bool, err error)
	// end is called after the last poll.
	end()
}

func (l *loop) looped(client bool) looped {
	switch {
	case l.spec.Kind == Stream && client:
		return loopSource{l}
	case l.spec.Kind == Stream:
		return loopSink{&loopServer{loop: l}}
	case l.spec.Kind == PingPong && client:
		return &loopAsk{loop: l}
	case l.spec.Kind == UnderLoad && client:
		return &loopLoad{loop: l, timer: -1, next: math.MaxInt64, queue: make([]*flow, len(l.flows))}
	}
	return loopEcho{&loopServer{loop: l}}
}

// share returns the function of the thread that serves all connections of an end.
func (s Spec) share(conns []*conn, client bool) func(*run) error {
	for _, c := range conns[1:] {
		c.passenger = true
	}
	return func(r *run) error {
		epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
		if err != nil {
			return fmt.Errorf("wait for connections: %w", err)
		}
		defer closeSocket(epoll)
		l := &loop{spec: s, r: r, epoll: epoll, edge: r.From, flows: make([]flow, len(conns)), open: len(conns)}
		for i, c := range conns {
			if err := unix.SetNonblock(c.fd, true); err != nil {
				return fmt.Errorf("set a connection non-blocking: %w", err)
			}
			l.flows[i] = flow{conn: c, index: int32(i)}
		}
		return l.run(l.looped(client))
	}
}

func (l *loop) run(t looped) error {
	defer t.end()
	for i := range l.flows {
		if err := l.settle(&l.flows[i], t.begin(&l.flows[i])); err != nil {
			return err
		}
	}
	events := make([]unix.EpollEvent, 64)
	var wait time.Duration
	for {
		n, err := epollWait(l.epoll, events, wait)
		if err != nil {
			return fmt.Errorf("wait for connections: %w", err)
		}
		for _, e := range events[:n] {
			if e.Fd == clockIndex {
				continue
			}
			f := &l.flows[e.Fd]
			if err := l.settle(f, t.ready(f, e.Events)); err != nil {
				return err
			}
		}
		now := l.r.now()
		l.mark(now)
		var over bool
		if wait, over, err = t.turn(now, n == 0); err != nil || over || l.open == 0 {
			return err
		}
	}
}

// settle handles the error of a connection's step: it drops a connection that has ended, and returns an error that fails the
// run.
func (l *loop) settle(f *flow, err error) error {
	switch {
	case err == nil, errors.Is(err, errStalled):
		return nil
	case errors.Is(err, io.EOF):
	default:
		if err := f.conn.ended(l.r, err); err != nil {
			return err
		}
	}
	l.drop(f)
	return nil
}

// mark records an edge of the window for all connections.
func (l *loop) mark(now int64) {
	if now < l.edge {
		return
	}
	for i := range l.flows {
		l.flows[i].mark(l.r, now)
	}
	if l.edge == l.r.To {
		l.edge = math.MaxInt64
	} else {
		l.edge = l.r.To
	}
}

// drop removes a connection that has ended from the poller, which would report it forever.
func (l *loop) drop(f *flow) {
	if f.ended {
		return
	}
	f.ended = true
	l.open--
	f.mark(l.r, max(l.r.now(), l.r.To))
	if f.watched != 0 {
		_ = unix.EpollCtl(l.epoll, unix.EPOLL_CTL_DEL, f.fd, nil) // closing it removes it as well
	}
}

// watch makes the poller report only these events, and errors.
func (l *loop) watch(f *flow, events uint32) error {
	if f.watched == events {
		return nil
	}
	op := unix.EPOLL_CTL_MOD
	if f.watched == 0 {
		op = unix.EPOLL_CTL_ADD
	}
	f.watched = events
	if err := unix.EpollCtl(l.epoll, op, f.fd, &unix.EpollEvent{Events: events, Fd: f.index}); err != nil {
		return fmt.Errorf("wait for a connection: %w", err)
	}
	return nil
}

// push sends as much of the rest as there is room for. It then makes the poller wait for room or, if everything is sent, for
// data.
func (l *loop) push(f *flow) (whole bool, err error) {
	n, err := send(f.fd, f.rest)
	if err != nil && !errors.Is(err, errStalled) {
		return false, fmt.Errorf("send: %w", err)
	}
	if f.rest = f.rest[n:]; len(f.rest) == 0 {
		return true, l.watch(f, unix.EPOLLIN)
	}
	return false, l.watch(f, unix.EPOLLOUT)
}

func (l *loop) end() {}

// loopSource is source on a loop.
type loopSource struct{ *loop }

func (l loopSource) begin(f *flow) error {
	f.out, f.seq = l.spec.payload(), 1
	return l.watch(f, unix.EPOLLOUT)
}

// sendsPerWake is the number of sends after which a source yields to the other connections, as in iperf3.
const sendsPerWake = 10

// ready sends until the connection has no more room, which a partial write shows.
func (l loopSource) ready(f *flow, _ uint32) error {
	for range sendsPerWake {
		if l.spec.UDP {
			putHeader(f.out, f.seq, f.from.at != 0 && f.to.at == 0, l.r.now())
		}
		n, err := send(f.fd, f.out)
		switch {
		case l.spec.UDP && errors.Is(err, errDropped):
		case err != nil:
			return fmt.Errorf("send: %w", err)
		}
		f.seq++
		f.bytes.Add(uint64(n))
		f.messages.Add(1)
		if n < len(f.out) {
			return nil
		}
	}
	return nil
}

func (l loopSource) turn(now int64, _ bool) (time.Duration, bool, error) {
	if !l.r.over(now) {
		return stallCheck, false, nil
	}
	for i := range l.flows {
		shutdownWrite(l.flows[i].fd)
	}
	return 0, true, nil
}

// loopServer holds what sink, collect and echo share on a loop.
type loopServer struct {
	*loop
	last int64 // when something last arrived
}

func (l *loopServer) turn(now int64, quiet bool) (time.Duration, bool, error) {
	if !quiet {
		l.last = now
	}
	return stallCheck, l.spec.served(l.r, now, l.last), nil
}

// loopSink is sink and collect on a loop.
type loopSink struct{ *loopServer }

func (l loopSink) begin(f *flow) error {
	f.in = make([]byte, max(l.spec.Size, 64<<10))
	return l.watch(f, unix.EPOLLIN)
}

func (l loopSink) ready(f *flow, _ uint32) error {
	n, err := receive(f.fd, f.in)
	now := l.r.now()
	switch {
	case err != nil:
		return fmt.Errorf("receive: %w", err)
	case l.spec.UDP && (n < datagramHeader || string(f.in[:n]) == l.spec.hello() || !f.arrivals.take(f.in, now)):
		return nil
	case n == 0 && f.to.at == 0 && now < l.r.To:
		return fmt.Errorf("receive: the client closed before the window's end: %w", io.ErrUnexpectedEOF)
	case n == 0:
		return io.EOF
	}
	f.bytes.Add(uint64(n))
	f.messages.Add(1)
	return nil
}

// loopEcho is echo on a loop.
type loopEcho struct{ *loopServer }

func (l loopEcho) begin(f *flow) error {
	f.in = make([]byte, l.spec.Size)
	return l.watch(f, unix.EPOLLIN)
}

func (l loopEcho) ready(f *flow, _ uint32) error {
	if len(f.rest) == 0 {
		n, err := receive(f.fd, f.in[f.got:])
		switch {
		case err != nil:
			return fmt.Errorf("receive: %w", err)
		case n == 0 && !l.spec.UDP:
			return io.EOF
		case l.spec.UDP && string(f.in[:n]) == l.spec.hello():
			return nil
		}
		if f.got += n; f.got < len(f.in) && !l.spec.UDP {
			return nil
		}
		f.rest = f.in[:f.got]
	}
	whole, err := l.push(f)
	if whole {
		f.bytes.Add(uint64(f.got))
		f.messages.Add(1)
		f.got = 0
	}
	return err
}

// loopAsk is ask on a loop.
type loopAsk struct {
	*loop
	looked int64 // when it last looked for lost messages
}

func (l *loopAsk) begin(f *flow) error {
	f.in, f.out = make([]byte, l.spec.Size), l.spec.payload()
	return l.next(f, l.r.now())
}

func (l *loopAsk) next(f *flow, now int64) error {
	f.seq++
	f.got, f.begun, f.rest = 0, now, f.out
	if l.spec.UDP {
		putNumber(f.out, f.seq)
	}
	_, err := l.push(f)
	return err
}

func (l *loopAsk) ready(f *flow, _ uint32) error {
	if len(f.rest) > 0 {
		_, err := l.push(f)
		return err
	}
	n, err := receive(f.fd, f.in[f.got:])
	switch {
	case err != nil:
		return fmt.Errorf("round trip: %w", err)
	case l.spec.UDP && (n == 0 || !hasNumber(f.in, f.seq)):
		return nil
	case n == 0 && !l.spec.UDP:
		return fmt.Errorf("round trip: %w", io.ErrUnexpectedEOF)
	}
	if f.got += n; f.got < len(f.in) && !l.spec.UDP {
		return nil
	}
	now := l.r.now()
	if f.begun >= l.r.From && now <= l.r.To {
		f.record(now - f.begun)
	}
	f.bytes.Add(uint64(len(f.in)))
	f.messages.Add(1)
	if now >= l.r.To {
		shutdownWrite(f.fd)
		return io.EOF
	}
	return l.next(f, now)
}

func (l *loopAsk) turn(now int64, _ bool) (time.Duration, bool, error) {
	if l.r.stopped.Load() || now >= l.r.To+int64(stallCheck) {
		return 0, true, nil
	}
	if !l.spec.UDP || now < l.looked+int64(stallCheck) {
		return stallCheck, false, nil
	}
	l.looked = now
	for i := range l.flows {
		if f := &l.flows[i]; !f.ended && now >= f.begun+int64(lostAfter) {
			f.lost++
			_ = l.next(f, now) // the next reply reports the error
		}
	}
	return stallCheck, false, nil
}
