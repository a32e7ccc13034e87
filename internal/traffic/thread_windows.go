package traffic

import (
	"context"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/windows"
)

// spin is how early a sender stops sleeping before a message is due. High-resolution timers fire every 0.5 ms, others with the
// timer interrupt.
const spin = time.Millisecond

var (
	createTimer = kernel.NewProc("CreateWaitableTimerExW")
	setTimer    = kernel.NewProc("SetWaitableTimer")
)

// From synchapi.h and winnt.h.
const (
	timerHighResolution = 2
	timerAllAccess      = 0x1f0003
)

// sleeper makes a thread sleep.
type sleeper struct{ timer windows.Handle }

func newSleeper() (s sleeper, err error) {
	timer, _, errno := createTimer.Call(0, 0, timerHighResolution, timerAllAccess)
	if timer == 0 {
		return s, fmt.Errorf("create a high-resolution timer (Windows 10 1803 and later have them): %w", errno)
	}
	return sleeper{windows.Handle(timer)}, nil
}

// sleep returns when the clock of Now has reached until, or about then. now is the time on that clock.
func (s sleeper) sleep(now, until int64) error {
	due := -max(1, (until-now)/100) // in units of 100 ns; negative means relative to now
	if ok, _, errno := setTimer.Call(uintptr(s.timer), uintptr(unsafe.Pointer(&due)), 0, 0, 0, 0); ok == 0 {
		return fmt.Errorf("set a timer: %w", errno)
	}
	_, err := windows.WaitForSingleObject(s.timer, windows.INFINITE)
	return err
}

func (s sleeper) close() { _ = windows.CloseHandle(s.timer) }

// SleepUntil returns once the clock of Now has reached at. If ctx ends first, it returns the cause within 50 ms.
func SleepUntil(ctx context.Context, at int64) error {
	s, err := newSleeper()
	if err != nil {
		return err
	}
	defer s.close()
	for now := Now(); now < at; now = Now() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if left := at - int64(spin) - now; left > 0 {
			if err := s.sleep(now, now+min(left, int64(stallCheck))); err != nil {
				return err
			}
		}
	}
	return nil
}
