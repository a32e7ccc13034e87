//go:build linux

// Package testenv has what tests of several packages need of their environment: rights, network
// namespaces, and patience. Only tests import it.
package testenv

import (
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
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

// Eventually waits until lacking returns "". If that takes longer than within, the test fails with
// what it last returned.
func Eventually(t testing.TB, within time.Duration, what string, lacking func() string) {
	t.Helper()
	for deadline := time.Now().Add(within); ; time.Sleep(min(within/1000, 100*time.Millisecond)) {
		last := lacking()
		if last == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s: %s", what, within, last)
		}
	}
}
