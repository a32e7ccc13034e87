package process

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// watcherSlack bounds how much the kernel may delay the timers of the Go runtime's
// watching thread (sysmon), to serve them along with others. The thread wakes up every
// 10 ms or sooner for as long as any other thread runs. A timer that is always near
// keeps the tick of an idle CPU running, so the CPU does not stop and restart the tick
// with every message. On a virtual CPU that took 10 µs off a round trip of 73 µs, a
// saving that an application without such a thread does not have
// (docs/explanation/measuring.md).
//
// Every other thread keeps the default slack of 50 µs: a scheduler thread that sleeps 3
// µs between two looks for work must not sleep 100 ms.
const watcherSlack = 100 * time.Millisecond

const (
	// noPreemption is a setting in the environment, because the runtime reads it
	// before the program begins. Traffic threads block in the kernel for as long as
	// they like; signals to preempt them would only interrupt them.
	noPreemption = "GODEBUG=asyncpreemptoff=1"
	// processors is GOMAXPROCS, the number of goroutines that may run at once. A
	// goroutine that blocks in the kernel counts until the watching thread notices
	// it. 24 leaves enough for the others.
	processors = 24
)

// Quiet replaces this process by the same program with a Go runtime that disturbs no
// measurement. If the runtime is quiet already, Quiet only shrinks the process, and
// returns.
func Quiet() error {
	if quiet() {
		return Shrink()
	}
	env := slices.DeleteFunc(os.Environ(), func(s string) bool { return strings.HasPrefix(s, "GODEBUG=") })
	err := unix.Exec("/proc/self/exe", os.Args, append(env, noPreemption))
	return fmt.Errorf("start this program again: %w", err)
}

func quiet() bool { return slices.Contains(os.Environ(), noPreemption) }

// Begin must run before anything else in the program. In a process that Quiet started,
// it completes Quiet's work: it shrinks the process before the program allocates more,
// and slows the runtime's watching thread.
//
// The watching thread is not the calling one, so the kernel requires CAP_SYS_NICE.
// Without it, as in an unprivileged pod, Begin does everything else.
func Begin() error {
	if !quiet() {
		return nil
	}
	if err := Shrink(); err != nil { // before there are 24 Ps, each with a cache
		return err
	}
	debug.SetGCPercent(collectAt)
	runtime.GOMAXPROCS(processors)
	return slowWatcher()
}

// slowWatcher sets the timer slack of the watching thread. It is the first thread that
// the runtime starts (runtime.main in proc.go), and the kernel lists threads in the
// order of their start.
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
