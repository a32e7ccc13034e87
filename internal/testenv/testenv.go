//go:build linux

// Package testenv has what tests of several packages need of their environment: rights, network
// namespaces, and patience. Only tests import it.
package testenv

import (
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// NeedRoot skips a test that cannot do without root. Where CI is set, tools/gotest makes that a
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

// Stalled reports by a trial's error whether connections stalled: one at the end of the window, or all of them throughout it. That
// happens on a busy machine, and a run repeats the trial.
func Stalled(err string) bool {
	return strings.Contains(err, "a connection was stalled at the end of the window") ||
		strings.Contains(err, "no answer arrived within the window")
}
