//go:build linux

package collect

import (
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestInterruptTime(t *testing.T) {
	var before, after unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		t.Fatal(err)
	}
	took, err := InterruptTime()
	if err != nil {
		t.Fatal(err)
	}
	// A call that interrupted nobody takes some 100 ns.
	if before.Count() > 1 && (took < 300*time.Nanosecond || took > 10*time.Millisecond) {
		t.Errorf("an interrupt takes %s", took)
	}
	if err := unix.SchedGetaffinity(0, &after); err != nil || before != after {
		t.Errorf("the affinity went from %v to %v: %v", before, after, err)
	}
}

// TestInterruptTimeAlone measures in a thread that may run on one CPU only.
func TestInterruptTimeAlone(t *testing.T) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // ends with the goroutine
		var set unix.CPUSet
		if err := unix.SchedGetaffinity(0, &set); err != nil {
			t.Error(err)
			return
		}
		one := 0
		for !set.IsSet(one) {
			one++
		}
		if err := pin(one); err != nil {
			t.Error(err)
			return
		}
		if took, err := InterruptTime(); took != 0 || err != nil {
			t.Errorf("got %s, %v", took, err)
		}
	}()
	<-done
}
