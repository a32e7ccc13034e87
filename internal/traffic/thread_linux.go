package traffic

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// spin is how early a sender stops sleeping before a message is due: with a later wake-up, the message would be late.
const spin = 60 * time.Microsecond

// sleeper makes the thread that created it sleep.
type sleeper struct{}

// newSleeper makes the kernel wake the calling thread on time. By default the kernel may add the thread's timer slack, which
// would count as latency.
func newSleeper() (s sleeper, err error) {
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		return s, fmt.Errorf("set timer slack: %w", err)
	}
	return s, nil
}

// sleep returns once the clock of Now has reached until, or earlier if it is interrupted.
func (sleeper) sleep(_, until int64) error {
	at := unix.NsecToTimespec(until)
	return unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &at, nil)
}

func (sleeper) close() {}

// SleepUntil returns once the clock of Now has reached at. If ctx ends first, it returns the cause within 50 ms.
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
