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

// clockIndex identifies the timer in the poller's events, where a connection is identified by its index.
const clockIndex = -1

// loopLoad is load on a loop: one thread sends the messages that are due, and receives the replies.
type loopLoad struct {
	*loop
	// timer wakes the poller, whose own timeouts are in milliseconds. set is the time to which it is set.
	timer int
	set   int64
	// next is when the next message on any connection is due.
	next int64
	// queue is a ring, which begins at head, of the connections that wait for their next message to be due, in that order. Those that
	// wait for room are not in it.
	queue         []*flow
	head, waiting int
}

func (l *loopLoad) begin(f *flow) error {
	f.in, f.out, f.seen = make([]byte, l.spec.Size), l.spec.payload(), l.spec.answers()
	f.first = l.spec.first(l.r)
	if f.due = f.first; l.spec.Rate > 0 {
		l.schedule(f)
	}
	if l.timer >= 0 {
		return l.watch(f, l.wants(f))
	}
	timer, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("create a timer: %w", err)
	}
	l.timer = timer
	if err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, timer, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: clockIndex}); err != nil {
		return fmt.Errorf("wait for a timer: %w", err)
	}
	return l.watch(f, l.wants(f))
}

// wants returns the events for which a connection waits: replies, and room if it has something to send.
func (l *loopLoad) wants(f *flow) uint32 {
	if !f.finished && (len(f.rest) > 0 || l.spec.Rate == 0) {
		return unix.EPOLLIN | unix.EPOLLOUT
	}
	return unix.EPOLLIN
}

func (l *loopLoad) ready(f *flow, events uint32) error {
	if events&^unix.EPOLLOUT != 0 {
		if err := l.take(f); err != nil {
			return err
		}
	}
	if events&unix.EPOLLOUT == 0 || f.finished {
		return nil
	}
	if len(f.rest) > 0 {
		return l.push(f)
	}
	return l.send(f)
}

// take reads the replies that have arrived.
func (l *loopLoad) take(f *flow) error {
	n, err := receive(f.fd, f.in[f.got:])
	now := l.r.now()
	switch {
	case err != nil:
		return fmt.Errorf("receive: %w", err)
	case l.spec.UDP && (string(f.in[:n]) == l.spec.hello() || n < len(f.in) || f.seen != nil && !f.seen.take(f.in, now)):
		return nil
	case n == 0 && now < l.r.To && !l.r.stopped.Load():
		return fmt.Errorf("receive: the server closed before the window's end: %w", io.ErrUnexpectedEOF)
	case n == 0:
		return io.EOF
	}
	if f.got += n; f.got < len(f.in) {
		return nil
	}
	f.got = 0
	if at := l.spec.stamped(f.in); at >= l.r.From && at < l.r.To {
		f.answered++
		f.record(now - at)
	}
	f.bytes.Add(uint64(len(f.in)))
	f.messages.Add(1)
	return nil
}

// send begins the message that is due.
func (l *loopLoad) send(f *flow) error {
	f.begun = l.r.now()
	if l.spec.Rate == 0 {
		f.due = f.begun
	}
	switch {
	case f.due >= l.r.To || l.r.stopped.Load():
		return l.finish(f)
	case f.begun >= l.r.To+int64(lostAfter):
		return l.abandon(f)
	}
	l.spec.stamp(f.out, f.due, int64(f.seq))
	f.rest, f.full = f.out, 0
	return l.push(f)
}

// push sends as much of the rest of a message as there is room for.
func (l *loopLoad) push(f *flow) error {
	n, err := send(f.fd, f.rest)
	if err != nil && !errors.Is(err, errStalled) {
		return fmt.Errorf("send: %w", err)
	}
	if f.rest = f.rest[n:]; len(f.rest) > 0 {
		if f.full == 0 {
			f.full = l.r.now()
		}
		return l.watch(f, l.wants(f))
	}
	if f.full != 0 {
		f.pace.held(l.r, f.full)
	}
	f.pace.account(l.r, f.due, f.begun)
	f.seq++
	if l.spec.Rate > 0 {
		f.due = f.first + l.spec.after(int64(f.seq))
		l.schedule(f)
	}
	return l.watch(f, l.wants(f))
}

// schedule puts a connection into the queue. All have the same interval, so its next message is due after those of all others,
// unless it is late.
func (l *loopLoad) schedule(f *flow) {
	place := func(i int) **flow { return &l.queue[(l.head+i)%len(l.queue)] }
	i := l.waiting
	for ; i > 0 && (*place(i - 1)).due > f.due; i-- {
		*place(i) = *place(i - 1)
	}
	*place(i) = f
	l.waiting++
	l.next = (*place(0)).due
}

// unschedule takes the first connection from the queue.
func (l *loopLoad) unschedule() *flow {
	f := l.queue[l.head]
	l.head, l.waiting = (l.head+1)%len(l.queue), l.waiting-1
	if l.next = math.MaxInt64; l.waiting > 0 {
		l.next = l.queue[l.head].due
	}
	return f
}

func (l *loopLoad) abandon(f *flow) error {
	if f.full != 0 {
		f.pace.held(l.r, f.full)
	}
	f.pace.abandon(l.r, f.due, l.spec.Rate)
	return l.finish(f)
}

func (l *loopLoad) finish(f *flow) error {
	f.finished = true
	shutdownWrite(f.fd)
	return l.watch(f, l.wants(f))
}

func (l *loopLoad) turn(now int64, _ bool) (time.Duration, bool, error) {
	if now < l.r.To {
		// Not more than one message for each connection, because otherwise replies would wait if the rate cannot be reached.
		for range l.flows {
			if now < l.next {
				break
			}
			f := l.unschedule()
			if err := l.settle(f, l.tend(f, now)); err != nil {
				return 0, true, err
			}
		}
		return l.sleep(now)
	}
	l.waiting, l.next = 0, math.MaxInt64 // from now on, look after all of them
	for i := range l.flows {
		f := &l.flows[i]
		if err := l.settle(f, l.tend(f, now)); err != nil {
			return 0, true, err
		}
	}
	return l.sleep(now)
}

// tend does what is due for a connection now.
func (l *loopLoad) tend(f *flow, now int64) error {
	switch last := now >= l.r.To+int64(lostAfter); {
	case f.ended:
	case f.finished:
		if last || now >= l.r.To && f.answered >= f.pace.sent.Load() {
			return io.EOF
		}
	case last:
		return l.abandon(f)
	case len(f.rest) > 0: // until there is room
	case l.spec.Rate == 0:
		if now >= l.r.To {
			return l.finish(f)
		}
	case min(f.due, l.r.To) <= now:
		return l.send(f)
	}
	return nil
}

// sleep returns how long the poller may wait: 0 if the next message is due shortly or Spec.Busy is set, and otherwise
// stallCheck, with the timer set to wake it earlier for that message or for an edge of the window.
func (l *loopLoad) sleep(now int64) (time.Duration, bool, error) {
	at := l.edge
	if l.next != math.MaxInt64 {
		if at = min(at, l.next-int64(spin)); l.spec.Busy || at <= now {
			return 0, l.r.stopped.Load(), nil
		}
	}
	if at == math.MaxInt64 {
		at = 0 // none
	}
	if at != l.set {
		l.set = at
		if err := unix.TimerfdSettime(l.timer, unix.TFD_TIMER_ABSTIME, &unix.ItimerSpec{Value: unix.NsecToTimespec(at)}, nil); err != nil {
			return 0, true, fmt.Errorf("set a timer: %w", err)
		}
	}
	return stallCheck, l.r.stopped.Load(), nil
}

// end counts the lost messages.
func (l *loopLoad) end() {
	for i := range l.flows {
		f := &l.flows[i]
		f.to.lost = f.pace.unanswered(f.answered)
	}
	if l.timer >= 0 {
		closeSocket(l.timer)
	}
}
