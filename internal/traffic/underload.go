package traffic

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"time"

	"slipstream.dev/internal/record"
)

// load sends on a schedule that waits for nothing, or as fast as the connection permits. A message carries the time when it was
// due, from which the latency of its reply counts: a sender that the network delays must not hide how long messages waited
// (coordinated omission). Sending and receiving have a thread each.
func (s Spec) load(c *conn, r *run) error {
	sent := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // for good, because no other goroutine must get its timer slack
		err := s.pace(c.fd, r, &c.pace)
		c.pace.ended.Store(true)
		sent <- err
	}()
	answered, err := s.replies(c, r, &c.pace)
	if err != nil {
		r.stopped.Store(true)
	}
	err = errors.Join(err, <-sent)
	c.to.lost = c.pace.unanswered(answered)
	return err
}

// first returns when the first message of a connection is due: at a random time within the first interval of the schedule. All
// connections of all pairs start at the same time. Without an offset, each message would be due together with one of every other
// connection, and its latency would include the wait behind these.
func (s Spec) first(r *run) int64 {
	if s.Rate == 0 {
		return r.Start
	}
	return r.Start + rand.Int64N(max(1, s.after(1)))
}

// numbers reports whether messages under load carry a number, by which a client recognises a second copy of a reply. Over UDP they
// do, if there is room.
func (s Spec) numbers() bool { return s.UDP && s.Size >= datagramHeader }

// stamp writes into a message when it was due, and its number.
func (s Spec) stamp(b []byte, due, seq int64) {
	if s.numbers() {
		putHeader(b, uint64(seq)+1, false, due)
		return
	}
	binary.LittleEndian.PutUint64(b, uint64(due))
}

// stamped returns when a message was due.
func (s Spec) stamped(b []byte) int64 {
	if s.numbers() {
		b = b[8:]
	}
	return int64(binary.LittleEndian.Uint64(b))
}

// answers returns what recognises a second copy of a reply, or nil if messages carry no number.
func (s Spec) answers() *arrivals {
	if !s.numbers() {
		return nil
	}
	return new(arrivals)
}

// after returns the time from the first message of a connection to the one with the number seq, counted from 0.
func (s Spec) after(seq int64) int64 { return seq * int64(time.Second) / int64(s.Rate) }

// pace records how a sender kept its schedule.
type pace struct {
	// sent counts the messages of the window that were sent.
	sent atomic.Uint64
	// ended means that a sender with a thread of its own will send nothing more.
	ended atomic.Bool
	// due counts all messages of the window, and behind those that were not sent by its end. full is the part of the window in
	// which the connection had no room.
	due, behind uint64
	full        time.Duration
}

// pace sends each message when it is due, and late ones immediately, until all messages of the window are sent or lostAfter has
// passed since the window.
func (s Spec) pace(fd int, r *run, p *pace) error {
	defer shutdownWrite(fd)
	sleeper, err := newSleeper()
	if err != nil {
		return err
	}
	defer sleeper.close()
	buf, first := s.payload(), s.first(r)
	for seq := int64(0); ; seq++ {
		now := r.now()
		due := now
		if s.Rate > 0 {
			due = first + s.after(seq)
			r.await(min(due, r.To), sleeper, s.Busy)
			now = r.now()
		}
		if due >= r.To || r.stopped.Load() {
			return nil
		}
		err := errOver
		if now < r.To+int64(lostAfter) {
			s.stamp(buf, due, seq)
			err = s.sendNow(fd, buf, r, p)
		}
		switch {
		case errors.Is(err, errOver), err != nil && r.now() >= r.To: // after the window the other end may stop first
			p.abandon(r, due, s.Rate)
			return nil
		case err != nil:
			return fmt.Errorf("send: %w", err)
		}
		p.account(r, due, now)
	}
}

// account counts a sent message. begun is when sending it began.
func (p *pace) account(r *run, due, begun int64) {
	if due < r.From {
		return
	}
	if begun >= r.To {
		p.behind++
	}
	p.due++
	p.sent.Add(1)
}

// unanswered returns how many of the sent messages have no answer. Two copies of an answer may both count if one comes so late
// that its number is no longer remembered.
func (p *pace) unanswered(answered uint64) uint64 {
	sent := p.sent.Load()
	return sent - min(answered, sent)
}

// abandon counts the messages from a time on, which will not be sent.
func (p *pace) abandon(r *run, from int64, rate int) {
	unsent := uint64(float64(r.To-max(from, r.From)) * float64(rate) / 1e9)
	p.due += unsent
	p.behind += unsent
}

// held adds the time since from, during which the connection had no room.
func (p *pace) held(r *run, from int64) {
	if wait := min(r.now(), r.To) - max(from, r.From); wait > 0 {
		p.full += time.Duration(wait)
	}
}

// sendNow sends a whole message, and counts the time for which it waits for room.
func (s Spec) sendNow(fd int, b []byte, r *run, p *pace) error {
	n, err := trySend(fd, b)
	if err == nil && n == len(b) {
		return nil
	}
	if err != nil && !errors.Is(err, errStalled) {
		return err
	}
	from := r.now()
	err = sendAll(fd, b[n:], r, tail)
	p.held(r, from)
	return err
}

// await returns once the clock of Now has reached at, or when the run is stopped. If busy is set, it never sleeps.
func (r *run) await(at int64, s sleeper, busy bool) {
	for now := r.now(); now < at && !r.stopped.Load(); now = r.now() {
		if left := at - int64(spin) - now; left > 0 && !busy {
			// The sleep may have been interrupted: the clock decides.
			_ = s.sleep(now, now+min(left, int64(stallCheck)))
		}
	}
}

// behindShare is the share of messages that may be sent after the window while the set rate still counts as reached.
const behindShare = 0.01

// pacing sums up how all senders of an end kept their schedules.
type pacing struct {
	due, behind uint64
	full        time.Duration
}

func (p *pacing) add(of *pace) {
	p.due += of.due
	p.behind += of.behind
	p.full += of.full
}

// warnings returns a warning if the set rate was not reached. It says what was too slow: the connections or the senders.
// seconds is the length of the window times the number of connections.
func (p pacing) warnings(seconds float64) []record.Warning {
	share := ratio(p.behind, p.due)
	if share <= behindShare {
		return nil
	}
	w := record.Warnf(record.WarnGeneratorBound,
		"the rate that was set was not reached: %.1f%% of the messages due in the window were not sent by its end, "+
			"and the latencies are those of a sender that was behind", 100*share)
	if full := p.full.Seconds() / seconds; full > 0.5*share {
		w.Code = record.WarnSaturated
		w.Message += fmt.Sprintf("; the connection accepted nothing for %.0f%% of the window: the path cannot carry that rate", 100*full)
	} else {
		w.Message += ": it lacks CPU time for that rate (set a lower one, or more connections if there are more CPUs)"
	}
	return []record.Warning{w}
}

func ratio(a, b uint64) float64 { return float64(a) / float64(max(1, b)) }

// replies receives replies until all messages of the window are sent and answered, or lostAfter has passed since the window. It
// returns how many of these were answered.
func (s Spec) replies(c *conn, r *run, p *pace) (answered uint64, err error) {
	in, hello, seen := make([]byte, s.Size), s.hello(), s.answers()
	for got := 0; ; {
		n, err := receive(c.fd, in[got:])
		now := r.now()
		switch {
		case errors.Is(err, errStalled):
			c.passed(r, now)
		case err != nil && now < r.To:
			return answered, fmt.Errorf("receive: %w", err)
		case err != nil, n == 0 && !s.UDP:
			if now < r.To && !r.stopped.Load() {
				return answered, fmt.Errorf("receive: the server closed before the window's end: %w", io.ErrUnexpectedEOF)
			}
			c.mark(r, max(now, r.To))
			return answered, nil
		case s.UDP && (string(in[:n]) == hello || n < len(in) || seen != nil && !seen.take(in, now)):
		default:
			if got += n; got < len(in) {
				continue
			}
			got = 0
			at := s.stamped(in)
			c.passed(r, at)
			if at >= r.From && at < r.To {
				answered++
				c.record(now - at)
			}
			c.bytes.Add(uint64(len(in)))
			c.messages.Add(1)
		}
		c.mark(r, now)
		switch {
		case r.stopped.Load(), now >= r.To+int64(lostAfter):
			return answered, nil
		case now >= r.To && p.ended.Load() && answered >= p.sent.Load():
			return answered, nil
		}
	}
}
