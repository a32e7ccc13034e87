package traffic

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// SleepUntil returns at a time of Now, or with the cause of a context's end up to
// 50 ms after it.
func SleepUntil(ctx context.Context, at int64) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for now := Now(); now < at; now = Now() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		until := unix.NsecToTimespec(min(at, now+int64(stallCheck)))
		err := unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &until, nil)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("sleep: %w", err)
		}
	}
	return nil
}
