package journal

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/accel/kernel/kerneltest"
	"slipstream.dev/internal/flock"
)

// TestEachListsBeforeTheLock checks that Each looks for the namespaces of all ledgers in one list of processes and mounts, made
// before it takes the lock, and makes one more list if a namespace is missing.
func TestEachListsBeforeTheLock(t *testing.T) {
	dir, proc := t.TempDir(), kerneltest.Proc(t, nil)
	write := func(file, text string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	for _, cookie := range []string{"7", "8", "9"} {
		write(filepath.Join(dir, "netns-"+cookie+".json"), strings.Replace(goodLedger, `"cookie":9`, `"cookie":`+cookie, 1))
	}
	// Each waits at this pipe whenever it lists mounts.
	mounts := filepath.Join(proc, "self/mountinfo")
	write(filepath.Join(proc, "self/exists"), "")
	if err := unix.Mkfifo(mounts, 0o600); err != nil {
		t.Fatal(err)
	}
	visited, ended := 0, make(chan error, 1)
	go func() {
		ended <- Each(t.Context(), dir, proc, func(*Book) error {
			visited++
			return nil
		})
	}()
	for i, want := range []error{nil, flock.ErrLocked} {
		listing := make(chan *os.File, 1)
		go func() {
			f, err := os.OpenFile(mounts, os.O_WRONLY, 0)
			// The next list needs another pipe, because this one may still be open.
			if err := errors.Join(err, os.Remove(mounts), unix.Mkfifo(mounts, 0o600)); err != nil {
				t.Error(err)
			}
			listing <- f
		}()
		select {
		case f := <-listing:
			if err := tryLock(t, dir); !errors.Is(err, want) {
				t.Errorf("list %d: the lock: %v, want %v", i+1, err, want)
			}
			f.Close()
		case err := <-ended:
			t.Fatalf("it ended after %d lists: %v", i, err)
		case <-time.After(10 * time.Second):
			t.Fatalf("no list %d within 10 s", i+1)
		}
	}
	select {
	case err := <-ended:
		if err != nil || visited != 4 {
			t.Errorf("%v, visited %d ledgers, want 4", err, visited)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("it makes a third list, or hangs")
	}
}

// tryLock takes and releases the lock of a journal.
func tryLock(t *testing.T, dir string) error {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := flock.TryLock(f); err != nil {
		return errors.Join(err, f.Close())
	}
	if err := flock.Release(f); err != nil {
		return fmt.Errorf("release: %w", err)
	}
	return nil
}
