package flock

import (
	"os"

	"golang.org/x/sys/windows"
)

// ErrLocked means that another process, or another descriptor of this one, has the lock. TryLock returns
// it.
const ErrLocked = windows.ERROR_LOCK_VIOLATION

// all is the length of a lock on the whole file, whatever its size.
const all = ^uint32(0)

// Lock waits for the exclusive lock of f. The lock lasts until Release, or until the process ends in any
// way.
func Lock(f *os.File) error { return lock(f, 0) }

// TryLock does the same as Lock, but returns ErrLocked instead of waiting.
func TryLock(f *os.File) error { return lock(f, windows.LOCKFILE_FAIL_IMMEDIATELY) }

func lock(f *os.File, flags uint32) error {
	return windows.LockFileEx(windows.Handle(f.Fd()), flags|windows.LOCKFILE_EXCLUSIVE_LOCK, 0, all, all, new(windows.Overlapped))
}

// Release gives the lock back and closes f.
func Release(f *os.File) error {
	err := windows.UnlockFileEx(windows.Handle(f.Fd()), 0, all, all, new(windows.Overlapped))
	if closed := f.Close(); err == nil {
		err = closed
	}
	return err
}
