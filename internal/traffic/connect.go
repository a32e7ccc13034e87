package traffic

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
)

// backlog is large enough for many connections at once.
const backlog = 4096

// connect opens a connection, sends a message, reads the answer to its end, and closes, again and again. The latency covers all
// of that. A connection without an answer counts as lost, and so does one that is reset after others were answered: one in some
// millions is, even over the host network. The server closes first, so that the client's ports are free immediately: only the
// end that closes first has the connection in TIME_WAIT.
func (s Spec) connect(to netip.AddrPort, c *conn, r *run) error {
	buf := s.message()
	for {
		began := r.now()
		err := s.exchange(to, buf, r)
		now := r.now()
		switch {
		case errors.Is(err, errStalled):
			c.lost++ // no answer within dialTimeout
		case err != nil && (now >= r.To || r.stopped.Load()):
			c.mark(r, max(now, r.To))
			return nil
		case errors.Is(err, errReset) && c.messages.Load() > 0:
			c.lost++
		case err != nil:
			return fmt.Errorf("connection to %s: %w", to, err)
		default:
			if began >= r.From && now <= r.To {
				_ = c.hdr.RecordValue(min(now-began, c.hdr.HighestTrackableValue()))
			}
			c.bytes.Add(uint64(len(buf)))
			c.messages.Add(1)
		}
		c.mark(r, now)
		if now >= r.To || r.stopped.Load() {
			return nil
		}
	}
}

// exchange opens a connection, exchanges a message, and closes.
func (s Spec) exchange(to netip.AddrPort, buf []byte, r *run) error {
	fd, err := newSocket(s, to.Addr())
	if err != nil {
		return err
	}
	defer closeSocket(fd)
	giveUp := r.now() + int64(dialTimeout)
	if err := dialTCP(fd, to); err != nil {
		return err
	}
	for b := buf; len(b) > 0; {
		n, err := send(fd, b)
		if err != nil && !again(err, giveUp, r) {
			return err
		}
		b = b[n:]
	}
	for got := 0; ; {
		n, err := receive(fd, buf[got:])
		switch {
		case again(err, giveUp, r):
			continue
		case err != nil:
			return err
		case n == 0 && got < len(buf):
			return io.ErrUnexpectedEOF
		}
		if got += n; got == len(buf) {
			break
		}
	}
	// The answer is complete. Wait until the server closes.
	for {
		switch n, err := receive(fd, make([]byte, 1)); {
		case again(err, giveUp, r):
		case err != nil:
			return err
		case n > 0:
			return fmt.Errorf("the server sent more than %d bytes", len(buf))
		default:
			return nil
		}
	}
}

// again reports whether to repeat a call that ended with err, because it moved nothing and there is time left.
func again(err error, giveUp int64, r *run) bool {
	return errors.Is(err, errStalled) && r.now() < giveUp && !r.stopped.Load()
}

// answer accepts connections on the listening socket fd, one at a time, echoes the message of each, and closes it. After the
// window it continues until nothing has come for stallCheck: the client's last connection may be in the queue behind those of
// others.
func (s Spec) answer(fd int, auth *authenticator, c *conn, r *run) error {
	buf := make([]byte, s.Size)
	a := &acceptor{authenticator: auth}
	defer a.close()
	for last := r.now(); ; {
		err := s.answerOne(fd, a, buf, r)
		now := r.now()
		switch {
		case errors.Is(err, errStalled), errors.Is(err, errOver):
		case err != nil:
			// The client is gone, and counts that itself.
			c.lost++
		default:
			c.bytes.Add(uint64(len(buf)))
			c.messages.Add(1)
		}
		c.mark(r, now)
		if !errors.Is(err, errStalled) || errors.Is(err, errUnauthenticated) {
			last = now
		}
		if s.served(r, now, last) {
			return nil
		}
	}
}

func (s Spec) answerOne(listening int, a *acceptor, buf []byte, r *run) error {
	fd, err := a.accept(listening)
	if err != nil {
		return err
	}
	defer func() {
		if fd >= 0 {
			closeSocket(fd)
		}
	}()
	if err := setOptions(fd, s); err != nil {
		return err
	}
	for have := 0; have < len(buf); {
		n, err := receive(fd, buf[have:])
		switch {
		case errors.Is(err, errStalled) && have == 0:
			// This connection from a trusted address has sent nothing yet. Other connections must not wait for it.
			a.add(fd, netip.Addr{})
			fd = -1
			return errUnauthenticated
		case errors.Is(err, errStalled):
			if r.over(r.now()) {
				return errOver
			}
		case err != nil:
			return err
		case n == 0:
			return io.ErrUnexpectedEOF
		}
		have += n
	}
	if !bytes.HasPrefix(buf, a.opening[:a.first]) { // of a trusted address
		a.refused.Add(1)
		return errUnauthenticated
	}
	return sendAll(fd, buf, r, tail)
}
