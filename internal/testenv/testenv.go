//go:build linux

// Package testenv has what tests of several packages need of their environment: rights, network
// namespaces, and patience. Only tests import it.
package testenv

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// NeedRoot skips a test that cannot do without root. Where CI is set, .ci/gotest makes that a
// failure.
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
}

// EnterNamespace moves the test's thread into a new network namespace, whose loopback device is up.
// The namespace goes when nothing refers to it any more: neither the thread, which ends with the
// test's goroutine, nor the handle, which is closed when the test ends.
func EnterNamespace(t testing.TB) netns.NsHandle {
	t.Helper()
	NeedRoot(t)
	runtime.LockOSThread()
	ns, err := netns.New()
	if err != nil {
		t.Fatalf("make a network namespace: %v", err)
	}
	t.Cleanup(func() { ns.Close() })
	if err := netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 1}}); err != nil {
		t.Fatalf("set the loopback device up: %v", err)
	}
	return ns
}

// PrivateMounts moves the test's thread into a mount namespace of its own, which nothing outside sees.
func PrivateMounts(t testing.TB) {
	t.Helper()
	NeedRoot(t)
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		t.Fatalf("make a mount namespace: %v", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Fatalf("make the mounts private: %v", err)
	}
}

// Disk mounts a file system of a size, such as "64k", in a mount namespace of the test's own thread: should the test
// die, the mount goes with it. Other threads do not see it.
func Disk(t testing.TB, size string) (dir string) {
	t.Helper()
	PrivateMounts(t)
	dir = t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // runs on this thread too
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Fill takes all space of a file system but a number of bytes, until free is called.
func Fill(t testing.TB, dir string, but int64) (free func()) {
	t.Helper()
	name := filepath.Join(dir, "filler")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	block, size := make([]byte, 4096), int64(0)
	for err == nil {
		var n int
		n, err = f.Write(block)
		size += int64(n)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	if err := f.Truncate(max(0, size-but)); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
}

// Eventually waits until lacking returns "". If that takes longer than within, the test fails with
// what it last returned. Between two calls it pauses for 1/300 of within: 200 ms of a minute.
func Eventually(t testing.TB, within time.Duration, what string, lacking func() string) {
	t.Helper()
	for deadline := time.Now().Add(within); ; time.Sleep(within / 300) {
		last := lacking()
		if last == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s: %s", what, within, last)
		}
	}
}

// Await is Eventually for a condition that has nothing to say.
func Await(t testing.TB, within time.Duration, what string, holds func() bool) {
	t.Helper()
	Eventually(t, within, what, func() string {
		if holds() {
			return ""
		}
		return "it does not hold"
	})
}

// Retry makes up to so many attempts, and fails with the error of the last: on a busy machine a thread may wait for a CPU
// at an edge of a window, or all through it.
func Retry(t testing.TB, attempts int, try func() error) {
	t.Helper()
	for n := 1; ; n++ {
		err := try()
		if err == nil {
			return
		}
		if n == attempts {
			t.Fatalf("attempt %d: %v", n, err)
		}
		t.Logf("attempt %d: %v", n, err)
	}
}
