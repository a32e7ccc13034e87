//go:build linux

package flock

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestReleaseBesideAChildThatStarts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	open := func() *os.File {
		t.Helper()
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	first, second := open(), open()
	defer second.Close()
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
