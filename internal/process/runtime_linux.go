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

// watcherSlack is by how much the kernel may delay the timers of the Go runtime's
// watching thread, to serve them along with others. It looks around every 10 ms or
// sooner for as long as any other thread runs. With its timer that near an idle
// CPU keeps its tick, and does not stop it and start it again with every message:
// where the CPU is virtual that took 10 µs off a round trip of 73, which no
// application without such a thread would have seen (docs/explanation/measuring.md).
//
// Every other thread keeps the 50 µs that the kernel gives everybody: a scheduler
// that sleeps 3 µs between two looks for work must not sleep 100 ms.
const watcherSlack = 100 * time.Millisecond

const (
	// noPreemption is of the environment, where the runtime reads it before the
	// program begins. Traffic threads block in the kernel for as long as they like;
	// signals to have them preempted would only interrupt them.
	noPreemption = "GODEBUG=asyncpreemptoff=1"
	// processors is how many goroutines may run at once. What blocks in the kernel
	// counts until the watching thread looks around: there are always more.
	processors = 24
)

// Quiet replaces this process by the same program with a Go runtime that disturbs
// no measurement. In one that is so already it only shrinks, and returns.
func Quiet() error {
	if quiet() {
		return Shrink()
	}
	env := slices.DeleteFunc(os.Environ(), func(s string) bool { return strings.HasPrefix(s, "GODEBUG=") })
	err := unix.Exec("/proc/self/exe", os.Args, append(env, noPreemption))
	return fmt.Errorf("start this program again: %w", err)
}

func quiet() bool { return slices.Contains(os.Environ(), noPreemption) }

// Begin is the first thing that the program does. Where Quiet started it, it does
// the rest of that: it shrinks before anything is added to what the start left, and
// slows the runtime's watching thread.
//
// The thread is another than the caller's, so the kernel asks for CAP_SYS_NICE.
// Without it, as in a pod without privileges, everything else is done.
func Begin() error {
	if !quiet() {
		return nil
	}
	if err := Shrink(); err != nil { // before there are 24 Ps with a cache each
		return err
	}
	debug.SetGCPercent(collectAt)
	runtime.GOMAXPROCS(processors)
	return slowWatcher()
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
