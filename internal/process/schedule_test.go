//go:build linux

package process

import (
	"os"
	"runtime"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// Every thread has the slice, those that are started later too.
func TestPrompt(t *testing.T) {
	before, err := unix.SchedGetAttr(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	if before.Runtime == 0 {
		t.Skip("the kernel has no slices of a thread's own: it is older than 6.12")
	}
	if err := Prompt(); err != nil {
		t.Fatal(err)
	}
	late := make(chan uint64)
	go func() {
		runtime.LockOSThread() // and is not unlocked: its thread ends with it
		attr, err := unix.SchedGetAttr(0, 0)
		if err != nil {
			t.Error(err)
			attr = before
		}
		late <- attr.Runtime
	}()
	if got := <-late; got != uint64(slice) {
		t.Errorf("a later thread has a slice of %d ns", got)
	}
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, thread := range threads {
		tid, err := strconv.Atoi(thread.Name())
		if err != nil {
			t.Fatal(err)
		}
		attr, err := unix.SchedGetAttr(tid, 0)
		if err == nil && (attr.Runtime != uint64(slice) || attr.Policy != before.Policy || attr.Nice != before.Nice) {
			t.Errorf("thread %d has %+v, want it as %+v with a slice of %s", tid, attr, before, slice)
		}
	}
}
