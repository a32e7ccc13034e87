package traffic

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Timer slack is by how much the kernel may delay a thread's timers, which it
// uses to serve them along with others.
const (
	// applicationSlack is what a thread has that asked for nothing.
	applicationSlack = 50 * time.Microsecond
	// runtimeSlack keeps the Go runtime quiet. One of its threads looks around
	// every 10 ms or sooner for as long as any other runs. With its timer that
	// near an idle CPU keeps its tick, and does not stop it and start it again
	// with every message: where the CPU is virtual that took 10 µs off a round
	// trip of 73, which no application without such a thread would have seen
	// (docs/measuring.md).
	runtimeSlack = 100 * time.Millisecond
)

// runtimeSettings are of the environment, where the runtime reads them before
// the program begins.
var runtimeSettings = []string{
	// Traffic threads block in the kernel for as long as they like; signals to
	// have them preempted would only interrupt them.
	"GODEBUG=asyncpreemptoff=1",
	// There may be a hundred workers on a machine, each with little to do
	// between trials: they keep their heaps small.
	"GOGC=25",
}

// QuietRuntime replaces this process by the same program with a Go runtime that
// disturbs no measurement, and returns nil in one that has it already. It is for
// the beginning of a program: threads and children inherit what it sets.
func QuietRuntime() error {
	env := os.Environ()
	if !slices.ContainsFunc(runtimeSettings, func(s string) bool { return !slices.Contains(env, s) }) {
		return nil
	}
	env = slices.DeleteFunc(env, func(s string) bool {
		name, _, _ := strings.Cut(s, "=")
		return slices.ContainsFunc(runtimeSettings, func(r string) bool { return strings.HasPrefix(r, name+"=") })
	})
	runtime.LockOSThread()
	if err := setSlack(runtimeSlack); err != nil {
		return err
	}
	err := unix.Exec("/proc/self/exe", os.Args, append(env, runtimeSettings...))
	return fmt.Errorf("start this program again: %w", err)
}

// Precise ties the calling goroutine to a thread with timers as exact as an
// application's, which processes that it starts have too. The function that it
// returns undoes it.
func Precise() (restore func()) {
	runtime.LockOSThread()
	before, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
	if err != nil || setSlack(applicationSlack) != nil {
		return runtime.UnlockOSThread // as exact as the thread was
	}
	return func() {
		_ = setSlack(time.Duration(before))
		runtime.UnlockOSThread()
	}
}

func setSlack(d time.Duration) error {
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(d), 0, 0, 0); err != nil {
		return fmt.Errorf("set timer slack: %w", err)
	}
	return nil
}

// SleepUntil returns at a time of Now, or with the cause of a context's end up to
// 50 ms after it.
func SleepUntil(ctx context.Context, at int64) error {
	defer Precise()()
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
