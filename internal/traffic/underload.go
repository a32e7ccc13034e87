package traffic

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
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
		sent <- s.pace(c.fd, r, &c.pace)
	}()
	answered, err := s.replies(c, r, &c.pace.sent)
	if err != nil {
		r.stopped.Store(true)
	}
	err = errors.Join(err, <-sent)
	c.to.lost = c.pace.sent.Load() - answered
	return err
}

// pace records how a sender kept its schedule.
type pace struct {
	// sent counts the messages of the window that were sent.
	sent atomic.Uint64
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
	buf := s.payload()
	for seq := int64(0); ; seq++ {
		now := r.now()
		due := now
		if s.Rate > 0 {
			due = s.due(r, seq)
			r.await(due, sleeper, s.Busy)
			now = r.now()
		}
		if due >= r.To || r.stopped.Load() {
			return nil
		}
		err := errOver
		if now < r.To+int64(lostAfter) {
			binary.LittleEndian.PutUint64(buf, uint64(due))
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

func (s Spec) due(r *run, seq int64) int64 {
	return r.Start + seq*int64(time.Second)/int64(s.Rate)
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

// replies receives replies until all sent messages of the window are answered, or lostAfter has passed since the window. It
// returns how many of these were answered.
func (s Spec) replies(c *conn, r *run, sent *atomic.Uint64) (answered uint64, err error) {
	in, hello := make([]byte, s.Size), s.hello()
	for got := 0; ; {
		n, err := receive(c.fd, in[got:])
		now := r.now()
		switch {
		case errors.Is(err, errStalled):
		case err != nil && now < r.To:
			return answered, fmt.Errorf("receive: %w", err)
		case err != nil, n == 0 && !s.UDP:
			if now < r.To && !r.stopped.Load() {
				return answered, fmt.Errorf("receive: the server closed before the window's end: %w", io.ErrUnexpectedEOF)
			}
			c.mark(r, max(now, r.To))
			return answered, nil
		case s.UDP && (string(in[:n]) == hello || n < len(in)):
		default:
			if got += n; got < len(in) {
				continue
			}
			got = 0
			if at := int64(binary.LittleEndian.Uint64(in)); at >= r.From && at < r.To {
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
		case now >= r.To && answered == sent.Load():
			return answered, nil
		}
	}
}
