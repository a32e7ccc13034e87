//go:build linux

package testenv

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

// failing stands for a test that fails: it records how, and ends its goroutine as a test would.
type failing struct {
	testing.TB
	said string
}

func (f *failing) Helper() {}

func (f *failing) Fatalf(format string, args ...any) {
	f.said = format
	for _, a := range args {
		if s, ok := a.(string); ok {
			f.said += " " + s
		}
	}
	panic(f)
}

// TestEventually checks that Eventually returns as soon as nothing is lacking, and fails with what is.
func TestEventually(t *testing.T) {
	calls := 0
	Eventually(t, time.Minute, "three calls", func() string {
		if calls++; calls < 3 {
			return "too few"
		}
		return ""
	})
	if calls != 3 {
		t.Errorf("%d calls, want 3", calls)
	}
	f := new(failing)
	func() {
		defer func() { _ = recover() }()
		Eventually(f, time.Millisecond, "the moon", func() string { return "cheese" })
	}()
	if !strings.Contains(f.said, "the moon") || !strings.Contains(f.said, "cheese") {
		t.Errorf("it fails with %q", f.said)
	}
}

// TestEnterNamespace checks that the test is alone with its loopback device, and its mounts are its own.
func TestEnterNamespace(t *testing.T) {
	before, err := os.Readlink("/proc/thread-self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	EnterNamespace(t)
	links, err := netlink.LinkList()
	if err != nil || len(links) != 1 || links[0].Attrs().OperState == netlink.OperDown {
		t.Errorf("links %v, %v", links, err)
	}
	PrivateMounts(t)
	if after, err := os.Readlink("/proc/thread-self/ns/mnt"); err != nil || after == before {
		t.Errorf("mount namespace %s, %v", after, err)
	}
}
