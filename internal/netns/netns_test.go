package netns

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newNS makes a network namespace, and returns its ID.
func newNS(t *testing.T) (h Handle, id ID) {
	t.Helper()
	testenv.NeedRoot(t)
	h, err := New()
	must(t, err)
	t.Cleanup(func() { h.Close() })
	must(t, Do(h, func() (err error) {
		id, err = CurrentID()
		return err
	}))
	return h, id
}

// TestDo enters namespaces, one from within another, and checks that this thread returns to its
// own.
func TestDo(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	here, err := CurrentID()
	must(t, err)
	_, outer := newNS(t)
	h, inner := newNS(t)
	if outer == here || inner == here || outer == inner || inner.Cookie == 0 || inner.Inode == 0 {
		t.Errorf("a namespace and two new ones are %v, %v and %v", here, outer, inner)
	}
	failed := errors.New("it failed")
	if err := Do(h, func() error { return failed }); err != failed {
		t.Errorf("an error became %v", err)
	}
	if err := Do(h, func() error { runtime.Goexit(); return nil }); err == nil {
		t.Error("what ended its goroutine seems to have returned")
	}
	if after, err := CurrentID(); after != here || err != nil {
		t.Errorf("the thread is in %v (%v), and was in %v", after, err, here)
	}
	// No thread that goroutines share is left in another namespace.
	for range 100 {
		done := make(chan ID)
		go func() {
			id, _ := CurrentID()
			done <- id
		}()
		if id := <-done; id != here {
			t.Fatalf("a goroutine is in %v, want %v", id, here)
		}
	}
}

// TestOpenRefuses opens a file that is not a namespace, without waiting for it, and one that
// does not exist.
func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	must(t, unix.Mkfifo(fifo, 0o600))
	never := func() error {
		t.Error("something was run")
		return nil
	}
	if err := DoAt(fifo, never); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a FIFO: %v, want EINVAL", err)
	}
	if err := DoAt(filepath.Join(dir, "nothing"), never); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("nothing: %v, want that it does not exist", err)
	}
}

// TestFind finds a namespace by a mount, or only by the thread that is in it, and no longer
// after it has ended.
func TestFind(t *testing.T) {
	h, id := newNS(t)
	find := func(id ID) (string, error) {
		files, err := ListFiles("/proc")
		must(t, err)
		return files.Find(id)
	}
	if file, err := find(id); file != "" || err != nil {
		t.Errorf("held by a descriptor alone, it is found at %q, %v", file, err)
	}
	check := func(file string) {
		t.Helper()
		var there ID
		err := DoAt(file, func() (err error) {
			there, err = CurrentID()
			return err
		})
		if there != id || err != nil {
			t.Errorf("%q is %v, %v, want %v", file, there, err, id)
		}
	}
	must(t, Do(h, func() error {
		file, err := find(id)
		check(file)
		return err
	}))
	mount := filepath.Join(t.TempDir(), "name of a place")
	must(t, os.WriteFile(mount, nil, 0o600))
	must(t, Do(h, func() error { return unix.Mount("/proc/thread-self/ns/net", mount, "", unix.MS_BIND, "") }))
	t.Cleanup(func() { _ = unix.Unmount(mount, unix.MNT_DETACH) })
	if file, err := find(id); file != mount || err != nil {
		t.Errorf("it is found at %q, %v, want %s", file, err, mount)
	}
	if file, err := find(ID{Cookie: id.Cookie + 1<<40, Inode: id.Inode}); file != "" || err != nil {
		t.Errorf("one that had the same inode is found at %q, %v", file, err)
	}
}

// TestSysfs looks for a device of another namespace, in a sysfs that shows it and in /sys.
func TestSysfs(t *testing.T) {
	h, _ := newNS(t)
	must(t, Do(h, func() error {
		must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "only-here"}, PeerName: "peer"}))
		root, err := Sysfs()
		must(t, err)
		defer root.Close()
		if _, err := root.Stat("class/net/only-here/ifindex"); err != nil {
			t.Error(err)
		}
		if root, err := openSysfs("/sys"); err == nil {
			root.Close()
			t.Error("/sys of another namespace was taken for this one's")
		}
		return nil
	}))
	root, err := openSysfs("/sys")
	must(t, err)
	defer root.Close()
	if _, err := root.Stat("class/net/only-here"); err == nil {
		t.Error("/sys shows a device of another namespace")
	}
}
