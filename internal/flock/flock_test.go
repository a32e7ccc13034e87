//go:build linux

package flock

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// open opens a file, and creates it if there is none. It is closed when the test ends.
func open(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// TestTryLockBesideLocked checks that asking whether a file is locked never makes TryLock fail.
func TestTryLockBesideLocked(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	asks, takes := open(t, path), open(t, path)
	ctx, end := context.WithCancel(t.Context())
	var asking sync.WaitGroup
	asking.Go(func() {
		for ctx.Err() == nil {
			Locked(asks)
		}
	})
	for range 10000 {
		if err := TryLock(takes); err != nil {
			t.Error(err)
			break
		}
		if err := unix.Flock(int(takes.Fd()), unix.LOCK_UN); err != nil {
			t.Error(err)
		}
	}
	end()
	asking.Wait()
}

func TestReleaseBesideAChildThatStarts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, second := open(t, path), open(t, path)
	if err := TryLock(first); err != nil {
		t.Fatal(err)
	}
	if err := TryLock(second); !errors.Is(err, ErrLocked) {
		t.Errorf("locked twice: %v, want ErrLocked", err)
	}
	childs, err := unix.Dup(int(first.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(childs)
	if err := Release(first); err != nil {
		t.Fatal(err)
	}
	if err := TryLock(second); err != nil {
		t.Errorf("after Release: %v", err)
	}
}
