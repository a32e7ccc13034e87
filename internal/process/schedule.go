//go:build linux

package process

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// slice is how long a thread of a prompt process asks to run at a time: the shortest
// that the kernel grants.
const slice = 100 * time.Microsecond

// Prompt asks the scheduler to run this process soon rather than long, for one that
// has little to do but is waited for. Who asks for short slices comes the earlier and
// gets no more than its share: with the default of a few milliseconds, and the
// share of a container that asks for a tenth of a CPU, it waits for many slices
// of others where CPUs are short. Kernels before 6.12 take the wish and do not heed it.
func Prompt() error {
	set := make(map[string]bool)
	// A thread is born with the slice of the one that starts it, which may not have
	// had its own yet.
	for last := -1; len(set) != last; {
		last = len(set)
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return fmt.Errorf("list threads: %w", err)
		}
		for _, t := range threads {
			if set[t.Name()] {
				continue
			}
			set[t.Name()] = true
			tid, err := strconv.Atoi(t.Name())
			if err != nil {
				return fmt.Errorf("list threads: %w", err)
			}
			if err := askFor(tid, slice); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("ask for short slices: %w", err)
			}
		}
	}
	return nil
}

// askFor sets a thread's slice, and leaves all else as it is.
func askFor(tid int, slice time.Duration) error {
	attr, err := unix.SchedGetAttr(tid, 0)
	if err != nil {
		return err
	}
	attr.Runtime = uint64(slice)
	return unix.SchedSetAttr(tid, attr, 0)
}
