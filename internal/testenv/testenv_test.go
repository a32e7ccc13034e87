//go:build linux

package testenv

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// failing stands in for a test that fails: it records the message, and ends its goroutine as a test would.
type failing struct {
	testing.TB
	said string
}

func (f *failing) Helper() {}

func (f *failing) Logf(string, ...any) {}

func (f *failing) Fatalf(format string, args ...any) {
	f.said = format
	for _, a := range args {
		f.said += fmt.Sprint(" ", a)
	}
	panic(f)
}

func (f *failing) Skip(args ...any) { f.Skipf("%s", fmt.Sprint(args...)) }

func (f *failing) Skipf(format string, args ...any) {
	f.said = "skipped: " + fmt.Sprintf(format, args...)
	panic(f)
}

// TestStepped: only the wall clock reading differs.
func TestStepped(t *testing.T) {
	now := time.Now()
	for _, by := range []time.Duration{time.Hour, -time.Hour, 30 * 24 * time.Hour} {
		stepped := Stepped(now, by)
		if wall, monotonic := stepped.Round(0).Sub(now.Round(0)), stepped.Sub(now); wall != by || monotonic != 0 {
			t.Errorf("stepped by %s: the wall clock by %s, the monotonic one by %s", by, wall, monotonic)
		}
	}
}

// TestNeeds checks that a test runs if the machine has what it needs, and is skipped otherwise.
func TestNeeds(t *testing.T) {
	skips := func(need func(testing.TB)) string {
		f := new(failing)
		func() {
			defer func() { _ = recover() }()
			need(f)
		}()
		return f.said
	}
	for got, want := range map[string]string{
		skips(func(t testing.TB) { NeedCPUs(t, 1<<20) }): "skipped: needs 1048576 CPUs",
		skips(func(t testing.TB) { NeedCPUs(t, 1) }):     "",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	NeedMachine(t)
	if got := skips(func(t testing.TB) { NeedProgram(t, "no-such-program", "nowhere") }); got != "skipped: needs no-such-program: nowhere" {
		t.Errorf("a program that is missing: %q", got)
	}
	if file, err := os.Stat(NeedProgram(t, "go", "https://go.dev")); err != nil || file.IsDir() {
		t.Errorf("the program is %v, %v", file, err)
	}
}

// TestEventually checks that Eventually returns as soon as nothing is lacking, and otherwise fails with the text.
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

// TestRetry checks that Retry ends with the first attempt that succeeds, and fails with the error of the last attempt.
func TestRetry(t *testing.T) {
	calls := 0
	fails := func() error {
		calls++
		return errors.New("the sky falls")
	}
	Retry(t, 3, func() error {
		if err := fails(); calls < 3 {
			return err
		}
		return nil
	})
	if calls != 3 {
		t.Errorf("%d calls, want 3", calls)
	}
	f := new(failing)
	calls = 0
	func() {
		defer func() { _ = recover() }()
		Retry(f, 2, fails)
	}()
	if calls != 2 || !strings.Contains(f.said, "the sky falls") {
		t.Errorf("after %d calls it fails with %q", calls, f.said)
	}
}

// TestEnterNamespace checks that the namespace contains only a loopback device, and that the test has its own mounts.
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

// TestPinThread checks that the test's thread keeps to one CPU.
func TestPinThread(t *testing.T) {
	PinThread(t)
	var may unix.CPUSet
	if err := unix.SchedGetaffinity(0, &may); err != nil || may.Count() != 1 {
		t.Errorf("the thread may use %d CPUs, %v", may.Count(), err)
	}
}
