//go:build linux

package collect

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// From linux/membarrier.h.
const (
	membarrierPrivateExpedited         = 1 << 3
	membarrierRegisterPrivateExpedited = 1 << 4
)

// Limits of the number of rounds of InterruptTime, and of its duration.
const (
	fewestRounds  = 15
	mostRounds    = 301
	interruptTime = 200 * time.Millisecond
)

// InterruptTime measures the round trip of an interrupt between CPUs: the median of a few hundred, in about 5 ms on an idle
// machine. RPS and RFS cause one interrupt for each batch of packets that they steer. A round trip takes 1 to 3 µs on bare
// metal; with virtual CPUs it may cost a VM exit on both sides. The result is 0 if this thread may run on only one CPU.
func InterruptTime() (time.Duration, error) {
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return 0, fmt.Errorf("time an interrupt: %w", err)
	}
	var cpus []int
	for cpu := range len(allowed) * 64 {
		if allowed.IsSet(cpu) {
			cpus = append(cpus, cpu)
		}
	}
	if len(cpus) < 2 {
		return 0, nil
	}
	if err := membarrier(membarrierRegisterPrivateExpedited); err != nil {
		return 0, err
	}
	// membarrier interrupts every other CPU that runs a thread of this process, and returns when all have answered
	// (kernel/sched/membarrier.c). So a second thread keeps another CPU busy. It counts, which proves that it is running. Both
	// threads end with their goroutines, because they are locked and pinned to a CPU.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(max(3, runtime.GOMAXPROCS(0))))
	// The Go runtime of a worker does not preempt goroutines: a garbage collection would wait for the counting loop, and block
	// the thread that ends the loop. The loop also has a deadline, because other code may stop the world, too.
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	end := time.Now().Add(interruptTime)
	var count atomic.Uint64
	var done atomic.Bool
	go func() {
		runtime.LockOSThread()
		if pin(cpus[len(cpus)-1]) == nil {
			for !done.Load() && time.Now().Before(end) {
				count.Add(1)
			}
		}
	}()
	var took []time.Duration
	failed := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := pin(cpus[0])
		for err == nil && len(took) < mostRounds && time.Now().Before(end) {
			before := count.Load()
			for range 1000 {
				if count.Load() != before {
					break
				}
			}
			if count.Load() == before {
				runtime.Gosched()
				continue
			}
			began := time.Now()
			err = membarrier(membarrierPrivateExpedited)
			took = append(took, time.Since(began))
		}
		done.Store(true)
		failed <- err
	}()
	if err := <-failed; err != nil {
		return 0, err
	}
	if len(took) < fewestRounds {
		return 0, fmt.Errorf("time an interrupt: CPU %d was available only %d times in %s", cpus[len(cpus)-1], len(took), interruptTime)
	}
	slices.Sort(took)
	return took[len(took)/2], nil
}

func pin(cpu int) error {
	var set unix.CPUSet
	set.Set(cpu)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return fmt.Errorf("time an interrupt: pin to CPU %d: %w", cpu, err)
	}
	return nil
}

func membarrier(command uintptr) error {
	if _, _, errno := unix.RawSyscall(unix.SYS_MEMBARRIER, command, 0, 0); errno != 0 {
		return fmt.Errorf("time an interrupt: membarrier: %w", errno)
	}
	return nil
}
