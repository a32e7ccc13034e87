package traffic

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// spin is how long before a message is due its sender stops sleeping: a thread
// that is woken on time is late by a wake-up.
const spin = 60 * time.Microsecond

// load sends on a schedule that waits for nothing, or as fast as the connection
// takes it. A message carries when it was due, and the latency of its reply counts
// from then: a sender that the network holds up must not hide how long messages
// waited for it (coordinated omission). Sending and receiving have a thread each.
func (s Spec) load(c *conn, r *run) error {
	var due atomic.Uint64 // messages within the window
	sent := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		sent <- s.pace(c.fd, r, &due)
	}()
	answered, err := s.replies(c, r, &due)
	if err != nil {
		r.stopped.Store(true)
	}
	err = errors.Join(err, <-sent)
	c.to.lost = due.Load() - answered
	return err
}

// pace sends each message when it is due, and late ones at once.
func (s Spec) pace(fd int, r *run, within *atomic.Uint64) error {
	defer shutdownWrite(fd)
	buf := make([]byte, s.Size)
	for seq := int64(0); ; seq++ {
		due := r.now()
		if s.Rate > 0 {
			due = r.Start + seq*int64(time.Second)/int64(s.Rate)
			r.await(due)
		}
		if due >= r.To || r.stopped.Load() {
			return nil
		}
		binary.LittleEndian.PutUint64(buf, uint64(due))
		if err := sendAll(fd, buf, r); errors.Is(err, errOver) {
			return nil
		} else if err != nil {
			return fmt.Errorf("send: %w", err)
		}
		if due >= r.From {
			within.Add(1)
		}
	}
}

// await returns at a time of Now, or when the run is stopped.
func (r *run) await(at int64) {
	for now := r.now(); now < at && !r.stopped.Load(); now = r.now() {
		if left := at - int64(spin) - now; left > 0 {
			until := unix.NsecToTimespec(now + min(left, int64(stallCheck)))
			// Interrupted or not, the clock decides.
			_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &until, nil)
		}
	}
}

// replies takes what comes back until all has that was due in the window, or
// lostAfter has passed since, and returns how many of those came.
func (s Spec) replies(c *conn, r *run, due *atomic.Uint64) (answered uint64, err error) {
	in := make([]byte, s.Size)
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
		case s.UDP && (isHello(in[:n]) || n < len(in)):
		default:
			if got += n; got < len(in) {
				continue
			}
			got = 0
			if at := int64(binary.LittleEndian.Uint64(in)); at >= r.From && at < r.To {
				answered++
				_ = c.hdr.RecordValue(min(now-at, c.hdr.HighestTrackableValue()))
			}
			c.bytes.Add(uint64(len(in)))
			c.messages.Add(1)
		}
		c.mark(r, now)
		switch {
		case r.stopped.Load(), now >= r.To+int64(lostAfter):
			return answered, nil
		case now >= r.To && answered == due.Load():
			return answered, nil
		}
	}
}
