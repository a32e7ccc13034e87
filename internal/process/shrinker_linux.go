package process

import (
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
)

const (
	// soonerPercent is GOGC of a process that should stay small.
	soonerPercent = 50
	// mayGrow is how much a process may grow before it gives memory back, in bytes.
	mayGrow = 8 << 20
)

// CollectSooner sets GOGC to 50, half of Go's default, unless the environment sets it.
func CollectSooner() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(soonerPercent)
	}
}

// Shrinker gives back memory in a process that works in bursts. Without it the process would keep the memory of its
// largest burst. The zero value is ready to use.
type Shrinker struct {
	mu sync.Mutex
	// least is the resident memory after the last Shrink, in bytes.
	least int64
}

// Shrink calls the function Shrink if this process has grown by 8 MiB since the last time.
func (s *Shrinker) Shrink() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	now, err := resident()
	if err != nil {
		return fmt.Errorf("shrink: %w", err)
	}
	if now < s.least+mayGrow {
		return nil
	}
	if err := Shrink(); err != nil {
		return err
	}
	s.least, err = resident()
	return err
}

// resident returns the memory of this process, in bytes, with the pages of its program: proc_pid_statm(5).
func resident() (int64, error) {
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return 0, fmt.Errorf("/proc/self/statm is %q", text)
	}
	pages, err := strconv.ParseInt(fields[1], 10, 64)
	return pages * int64(os.Getpagesize()), err
}
