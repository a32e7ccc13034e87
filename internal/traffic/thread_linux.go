package traffic

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// spin is how long before a message is due its sender stops sleeping: a thread
// that is woken on time is late by a wake-up.
const spin = 60 * time.Microsecond

// sleeper has the thread that made it sleep.
type sleeper struct{}

// newSleeper has the kernel wake the calling thread on time: it may wake a sleeper by the
// thread's timer slack later, which would count as latency.
func newSleeper() (s sleeper, err error) {
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		return s, fmt.Errorf("set timer slack: %w", err)
	}
	return s, nil
}

// sleep returns at a time of Now, or earlier if it is interrupted.
func (sleeper) sleep(_, until int64) error {
	at := unix.NsecToTimespec(until)
	return unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &at, nil)
}

func (sleeper) close() {}

// SleepUntil returns at a time of Now, or with the cause of a context's end up to
// 50 ms after it.
func SleepUntil(ctx context.Context, at int64) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var s sleeper
	for now := Now(); now < at; now = Now() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := s.sleep(now, min(at, now+int64(stallCheck))); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("sleep: %w", err)
		}
	}
	return nil
}
