package traffic

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// watcherSlack is by how much the kernel may delay the timers of the Go runtime's
// watching thread, to serve them along with others. It looks around every 10 ms or
// sooner for as long as any other thread runs. With its timer that near an idle
// CPU keeps its tick, and does not stop it and start it again with every message:
// where the CPU is virtual that took 10 µs off a round trip of 73, which no
// application without such a thread would have seen (docs/measuring.md).
//
// Every other thread keeps the 50 µs that the kernel gives everybody: a scheduler
// that sleeps 3 µs between two looks for work must not sleep 100 ms.
const watcherSlack = 100 * time.Millisecond

// runtimeSettings are of the environment, where the runtime reads them before
// the program begins.
var runtimeSettings = []string{
	// Traffic threads block in the kernel for as long as they like; signals to
	// have them preempted would only interrupt them.
	"GODEBUG=asyncpreemptoff=1",
	// There may be a hundred workers on a machine, each with little to do
	// between trials: they keep their heaps small.
	"GOGC=25",
	// What blocks in the kernel holds its P until the watching thread looks around:
	// there are always more.
	"GOMAXPROCS=24",
}

// QuietRuntime replaces this process by the same program with a Go runtime that
// disturbs no measurement, and in one that has its settings already slows the
// runtime's watching thread and returns. It is for the beginning of a program.
//
// The thread is another than the caller's, so the kernel asks for CAP_SYS_NICE.
// Without it, as in a pod without privileges, everything else is done.
func QuietRuntime() error {
	env := os.Environ()
	if !slices.ContainsFunc(runtimeSettings, func(s string) bool { return !slices.Contains(env, s) }) {
		return slowWatcher()
	}
	env = slices.DeleteFunc(env, func(s string) bool {
		name, _, _ := strings.Cut(s, "=")
		return slices.ContainsFunc(runtimeSettings, func(r string) bool { return strings.HasPrefix(r, name+"=") })
	})
	err := unix.Exec("/proc/self/exe", os.Args, append(env, runtimeSettings...))
	return fmt.Errorf("start this program again: %w", err)
}

// slowWatcher finds the watching thread as the first that the runtime starts
// (runtime.main in proc.go; the kernel lists threads in the order of their start).
func slowWatcher() error {
	tasks, err := os.Open("/proc/self/task")
	if err != nil {
		return fmt.Errorf("list threads: %w", err)
	}
	defer tasks.Close()
	names, err := tasks.Readdirnames(2)
	if err != nil || len(names) < 2 {
		return errors.Join(errors.New("list threads: the runtime's own is not among them"), err)
	}
	slack := strconv.FormatInt(int64(watcherSlack), 10)
	err = os.WriteFile("/proc/"+names[1]+"/timerslack_ns", []byte(slack), 0)
	if err != nil && !errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("set timer slack of the runtime's own thread: %w", err)
	}
	return nil
}

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
