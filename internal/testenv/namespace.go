//go:build linux

package testenv

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// EnterNamespace moves the test's thread into a new network namespace, whose loopback device is up. The namespace ends
// when nothing refers to it: the thread ends with the test's goroutine, and the handle is closed when the test ends.
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

// PinThread binds the test's thread to one of the CPUs that it may use: the thread ends with the test's goroutine. So all steps of the
// test see the same per-CPU state, and packets wait in one queue.
func PinThread(t testing.TB) {
	t.Helper()
	runtime.LockOSThread()
	var may, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &may); err != nil {
		t.Fatalf("read which CPUs the thread may use: %v", err)
	}
	for cpu := 0; one.Count() == 0; cpu++ {
		if may.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		t.Fatalf("bind the thread to a CPU: %v", err)
	}
}

// PrivateMounts moves the test's thread into a new mount namespace. Nothing outside sees its mounts.
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

// Disk mounts a file system of a size, such as "64k", in a new mount namespace of the test's thread. If the test dies,
// the mount goes with it. Other threads do not see it.
func Disk(t testing.TB, size string) (dir string) {
	t.Helper()
	PrivateMounts(t)
	dir = t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // this runs on the same thread
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Fill uses up all space of a file system except for a number of bytes, until free is called.
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
