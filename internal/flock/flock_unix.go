//go:build unix

// Package flock locks files for as long as this process wants, or lives.
package flock

import (
	"os"

	"golang.org/x/sys/unix"
)

// ErrLocked is the error of TryLock where another process, or another descriptor of this one, has the lock.
const ErrLocked = unix.EWOULDBLOCK

// Lock waits for the exclusive lock of f. It ends with Release, or with the process, however that ends.
func Lock(f *os.File) error {
	for {
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != unix.EINTR {
			return err
		}
	}
}

// TryLock is Lock that returns ErrLocked instead of waiting.
func TryLock(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) }

// Release gives the lock back and closes f. To close f alone would not give it back at once: a lock lasts
// as long as any copy of its descriptor, and a child that another goroutine is just starting has one
// until it executes its program.
func Release(f *os.File) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_UN)
	if closed := f.Close(); err == nil {
		err = closed
	}
	return err
}
