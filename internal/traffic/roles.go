package traffic

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"
)

// errStalled means that a system call moved nothing within stallCheck, or was interrupted first. errDropped means that this
// machine had no room for a message.
var (
	errStalled = errors.New("nothing moved")
	errDropped = fmt.Errorf("%w: no room for a message", errStalled)
	// errUnauthenticated is an errStalled after something happened on an unauthenticated connection.
	errUnauthenticated = fmt.Errorf("%w except on an unauthenticated connection", errStalled)
)

// source sends as much as the connection takes. Over UDP every datagram has a number, even one that this machine drops. A
// datagram that has waited too long for room keeps its number until it is sent.
func (s Spec) source(c *conn, r *run) error {
	buf := s.payload()
	number := uint64(1)
	now := r.now()
	for {
		if s.UDP {
			// The clock was read after the last send, which is just now.
			putHeader(buf, number, c.from.at != 0 && c.to.at == 0, now)
		}
		n, err := send(c.fd, buf)
		now = r.now()
		switch {
		case s.UDP && errors.Is(err, errDropped):
			number++
			c.messages.Add(1)
		case errors.Is(err, errStalled):
		case err != nil:
			if r.over(now) {
				return nil
			}
			return fmt.Errorf("send: %w", err)
		default:
			number++
			c.bytes.Add(uint64(n))
			c.messages.Add(1)
		}
		c.mark(r, now)
		if r.over(now) {
			shutdownWrite(c.fd)
			return nil
		}
	}
}

// served reports whether a server may stop. last is when it last heard from a client. A TCP server usually sees its client
// close the connection. With UDP and connect there is no such sign, so the server stops when it has heard nothing for
// stallCheck.
func (s Spec) served(r *run, now, last int64) bool {
	endUnseen := s.UDP || s.Kind == Connect
	return r.stopped.Load() || now >= r.To+int64(linger) || endUnseen && now-last >= int64(stallCheck) && r.over(now)
}

// sink receives a stream, and counts its bytes.
func (s Spec) sink(c *conn, r *run) error {
	buf := make([]byte, max(s.Size, 64<<10))
	for {
		n, err := receive(c.fd, buf)
		now := r.now()
		switch {
		case errors.Is(err, errStalled):
		case err != nil:
			return c.ended(r, fmt.Errorf("receive: %w", err))
		case n == 0:
			if c.to.at == 0 && now < r.To {
				return fmt.Errorf("receive: the client closed before the window's end: %w", io.ErrUnexpectedEOF)
			}
			c.mark(r, max(now, r.To))
			return nil
		default:
			c.bytes.Add(uint64(n))
			c.messages.Add(1)
		}
		c.mark(r, now)
		// A receiver must outlive its sender, whose clock may be behind: closing a socket with unread data resets the
		// connection.
		if s.served(r, now, now) {
			return nil
		}
	}
}

// collect receives datagrams, and counts each once. After the window it continues until nothing has come for stallCheck:
// datagrams of the window may still be on the way.
func (s Spec) collect(c *conn, r *run) error {
	buf, hello := make([]byte, max(s.Size, 64<<10)), s.hello()
	for last := r.now(); ; {
		n, err := receive(c.fd, buf)
		now := r.now()
		if err == nil {
			last = now
		}
		switch {
		case errors.Is(err, errStalled):
		case err != nil:
			return c.ended(r, fmt.Errorf("receive: %w", err))
		case n < datagramHeader || string(buf[:n]) == hello:
		case c.arrivals.take(buf, now):
			c.bytes.Add(uint64(n))
			c.messages.Add(1)
		}
		c.mark(r, now)
		if s.served(r, now, last) {
			return nil
		}
	}
}

// ask sends one message at a time, and waits until it has come back whole. That time is the latency of a round trip.
func (s Spec) ask(c *conn, r *run) error {
	out, in := s.payload(), make([]byte, s.Size)
	sent := r.now()
	for seq := uint64(1); ; seq++ {
		if s.UDP {
			putNumber(out, seq)
		}
		err := sendAll(c.fd, out, r, tail)
		if err == nil {
			err = s.reply(c, r, in, seq, sent+int64(lostAfter))
		}
		now := r.now()
		switch {
		case errors.Is(err, errLost):
			c.lost++
		case errors.Is(err, errOver):
			return s.missing(c)
		case err != nil:
			return c.ended(r, fmt.Errorf("round trip: %w", err))
		default:
			if sent >= r.From && now <= r.To {
				c.record(now - sent)
			}
			c.bytes.Add(uint64(len(in)))
			c.messages.Add(1)
		}
		c.mark(r, now)
		if s.Iterations > 0 && c.from.at != 0 && c.messages.Load()-c.from.messages >= uint64(s.Iterations) {
			c.close(now)
			shutdownWrite(c.fd)
			return nil
		}
		if now >= r.To || r.stopped.Load() {
			shutdownWrite(c.fd)
			return s.missing(c)
		}
		sent = now
	}
}

// missing returns an error if the set number of round trips was not done when the window ended.
func (s Spec) missing(c *conn) error {
	if s.Iterations == 0 {
		return nil
	}
	return fmt.Errorf("%d of %d iterations are done at the end of the window: set a longer duration", c.messages.Load()-c.from.messages, s.Iterations)
}

// lostAfter is the time after which a UDP message counts as lost, and the next is sent.
const lostAfter = 200 * time.Millisecond

// errLost means that a UDP message did not come back.
var errLost = errors.New("message lost")

// errOver ends a wait after the end of the run.
var errOver = errors.New("the run is over")

// sendAll sends a whole message. It waits for room until after has passed since the window's end, and then returns errOver.
func sendAll(fd int, b []byte, r *run, after time.Duration) error {
	for len(b) > 0 {
		n, err := send(fd, b)
		switch {
		case errors.Is(err, errStalled):
			if r.stopped.Load() || r.now() >= r.To+int64(after) {
				return errOver
			}
		case err != nil:
			return err
		}
		b = b[n:]
	}
	return nil
}

// putNumber writes the number of a UDP message, by which a client distinguishes the reply that it awaits from a late one. A message
// of less than 8 bytes has only as many of the number's low bytes.
func putNumber(b []byte, number uint64) {
	if len(b) >= 8 {
		binary.LittleEndian.PutUint64(b, number)
		return
	}
	for i := range b {
		b[i] = byte(number >> (8 * i))
	}
}

// hasNumber reports whether a message has this number.
func hasNumber(b []byte, number uint64) bool {
	if len(b) >= 8 {
		return binary.LittleEndian.Uint64(b) == number
	}
	for i := range b {
		if b[i] != byte(number>>(8*i)) {
			return false
		}
	}
	return true
}

// reply reads one message into in, until giveUp. Over UDP it reads the one with the number seq.
func (s Spec) reply(c *conn, r *run, in []byte, seq uint64, giveUp int64) error {
	for got := 0; ; {
		n, err := receive(c.fd, in[got:])
		switch {
		case errors.Is(err, errStalled):
			now := r.now()
			if s.UDP && now >= giveUp {
				return errLost
			}
			if r.over(now) {
				c.mark(r, now)
				return errOver
			}
		case err != nil:
			return err
		case s.UDP:
			if n > 0 && hasNumber(in, seq) {
				return nil
			}
		case n == 0:
			return io.ErrUnexpectedEOF
		default:
			if got += n; got == len(in) {
				return nil
			}
		}
	}
}

// echo sends back the messages that it receives.
func (s Spec) echo(c *conn, r *run) error {
	buf, hello := make([]byte, s.Size), s.hello()
	for got, last := 0, r.now(); ; {
		n, err := receive(c.fd, buf[got:])
		switch {
		case errors.Is(err, errStalled):
			now := r.now()
			c.mark(r, now)
			if s.served(r, now, last) {
				return nil
			}
			continue
		case err != nil:
			return c.ended(r, fmt.Errorf("receive: %w", err))
		case n == 0 && !s.UDP:
			c.mark(r, max(r.now(), r.To))
			return nil
		case s.UDP && string(buf[:n]) == hello:
			continue
		}
		if got += n; got < len(buf) && !s.UDP {
			continue
		}
		// The client reads, and may still send, for a while after the window. A server that closed earlier would reset the
		// connection, and the replies to messages of the window would be lost.
		switch err := sendAll(c.fd, buf[:got], r, linger); {
		case errors.Is(err, errOver):
			return nil
		case err != nil:
			return c.ended(r, fmt.Errorf("send: %w", err))
		}
		c.bytes.Add(uint64(got))
		c.messages.Add(1)
		got = 0
		last = r.now()
		c.mark(r, last)
		if s.served(r, last, last) {
			return nil
		}
	}
}

// record records a latency. One beyond the histogram's range, which only a stall causes, counts as the highest value.
func (c *conn) record(latency int64) {
	_ = c.hdr.RecordValue(min(latency, c.hdr.HighestTrackableValue()))
}

// ended returns the error of a connection. After the window it returns nil, because the other end may stop first: a client may
// stop with a message in progress, which resets the connection, and a server may stop after a message was lost.
func (c *conn) ended(r *run, err error) error {
	now := r.now()
	if now < r.To {
		return err
	}
	c.mark(r, now)
	return nil
}
