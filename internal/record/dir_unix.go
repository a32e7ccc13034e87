//go:build linux || darwin

package record

import (
	"fmt"
	"os"

	"slipstream.dev/internal/flock"
)

// lock holds the folder until release, or until the process ends however it does.
func lock(dir string) (release func() error, err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := flock.TryLock(f); err != nil {
		f.Close()
		if err == flock.ErrLocked {
			return nil, ErrLocked
		}
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	return func() error { return flock.Release(f) }, nil
}

// syncDir makes a new name in a folder last.
func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
