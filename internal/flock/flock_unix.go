//go:build unix

// Package flock locks files until this process releases them or ends.
package flock

import (
	"os"

	"golang.org/x/sys/unix"
)

// ErrLocked means that another process, or another descriptor of this one, has the lock. TryLock returns
// it.
const ErrLocked = unix.EWOULDBLOCK

// Lock waits for the exclusive lock of f. The lock lasts until Release, or until the process ends in any
// way.
func Lock(f *os.File) error {
	for {
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != unix.EINTR {
			return err
		}
	}
}

// TryLock does the same as Lock, but returns ErrLocked instead of waiting.
func TryLock(f *os.File) error {
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err != ErrLocked {
			return err
		}
		// Locked takes the shared lock for an instant. If we get that too, nobody has the exclusive one: try again.
		if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); err != nil {
			return err
		}
	}
}

// Locked reports whether another process has the lock. Two that ask at the same time do not disturb each other.
func Locked(f *os.File) bool {
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); err != nil {
		return err == ErrLocked
	}
	_ = unix.Flock(int(f.Fd()), unix.LOCK_UN)
	return false
}

// Release gives the lock back and closes f. Closing f alone might keep the lock for a while: it lasts as
// long as any copy of the descriptor. If another goroutine is just starting a child process, the child has
// a copy until it executes its program.
func Release(f *os.File) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_UN)
	if closed := f.Close(); err == nil {
		err = closed
	}
	return err
}
