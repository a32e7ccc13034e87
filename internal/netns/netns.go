// Package netns makes, opens, identifies and finds network namespaces, and runs code in them. It
// mounts the sysfs that shows the devices of a namespace, and lists what a namespace has.
// Everything else that is done in a namespace is up to the caller.
//
// A network namespace belongs to a thread, and a goroutine moves between threads: Do is the only
// way into another namespace. Everywhere else in this package, "this" namespace is that of the
// calling thread, which is certain only within Do or if the goroutine is locked to its thread.
package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Handle is an open network namespace. Until Close it cannot end, and its inode number cannot be
// used again. It has the type of the netns library, because the netlink library takes that.
type Handle = netns.NsHandle

// None is no namespace.
const None Handle = -1

// Current opens this namespace.
func Current() (Handle, error) {
	h, err := netns.Get()
	if err != nil {
		return None, fmt.Errorf("open this network namespace: %w", err)
	}
	return h, nil
}

// Open opens a file that stands for a network namespace, and never waits. Another kind of file,
// such as a FIFO, causes an error where the handle is used.
func Open(file string) (Handle, error) {
	fd, err := unix.Open(file, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return None, fmt.Errorf("open network namespace: %w", &fs.PathError{Op: "open", Path: file, Err: err})
	}
	return Handle(fd), nil
}

// New makes a network namespace. It lasts as long as something holds it.
func New() (h Handle, err error) {
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		h, err = Current()
		return err
	})
	if err != nil {
		return None, err
	}
	return h, nil
}

// Do runs fn in a network namespace, on a thread of its own.
func Do(h Handle, fn func() error) error {
	return onThread(func() error {
		if err := netns.Set(h); err != nil {
			return fmt.Errorf("enter network namespace %s: %w", name(h), err)
		}
		return fn()
	})
}

// DoAt runs fn in the namespace that a file stands for.
func DoAt(file string, fn func() error) error {
	h, err := Open(file)
	if err != nil {
		return err
	}
	defer h.Close()
	return Do(h, fn)
}

// name returns the file that a handle was opened from, for messages.
func name(h Handle) string {
	file, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", h))
	if err != nil {
		return h.String()
	}
	return file
}

// onThread runs fn on a thread of its own. fn may change the thread's network namespace. If the
// thread cannot return to its own, it is not used again: the goroutine stays locked to it, so
// the thread ends with the goroutine.
func onThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		// If a test fails within fn, the goroutine ends there.
		err := errors.New("what runs in a network namespace did not return")
		defer func() { done <- err }()
		runtime.LockOSThread()
		home, failed := Current()
		if failed != nil {
			runtime.UnlockOSThread()
			err = failed
			return
		}
		defer home.Close()
		defer func() {
			if back := netns.Set(home); back != nil {
				err = errors.Join(err, fmt.Errorf("leave network namespace: %w", back))
				return
			}
			runtime.UnlockOSThread()
		}()
		err = fn()
	}()
	return <-done
}

// Cookie is a network namespace's number, which the kernel never uses twice within a boot; 0
// stands for no namespace.
type Cookie uint64

// ID identifies a network namespace by its cookie. The inode makes the namespace quick to find.
type ID struct {
	Cookie Cookie `json:"cookie,omitempty"`
	Inode  uint64 `json:"inode,omitempty"`
}

// CurrentID returns the ID of this namespace.
func CurrentID() (ID, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return ID{}, fmt.Errorf("open a socket: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return ID{}, fmt.Errorf("read the network namespace's cookie (Linux 5.14 or newer): %w", err)
	}
	var stat unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &stat); err != nil {
		return ID{}, fmt.Errorf("stat this network namespace: %w", err)
	}
	return ID{Cookie(cookie), stat.Ino}, nil
}

// Files maps the link of a namespace, such as "net:[4026531840]", to files by which it may be
// entered. The number in a link is used again after the namespace has ended.
type Files map[string][]string

// ListFiles looks at all processes and at the mounts that are visible from here, which takes
// milliseconds on a machine with a thousand processes.
func ListFiles(proc string) (Files, error) {
	processes, err := filepath.Glob(filepath.Join(proc, "[0-9]*"))
	if err != nil {
		return nil, err
	}
	// /proc/PID/ns/net is the namespace of a process's main thread, so this thread's may not be
	// among these. Resolve thread-self here, because DoAt runs on another thread.
	if self, err := os.Readlink(filepath.Join(proc, "thread-self")); err == nil {
		processes = append(processes, filepath.Join(proc, self))
	}
	files := make(Files)
	for _, dir := range processes {
		file := filepath.Join(dir, "ns/net")
		if link, err := os.Readlink(file); err == nil {
			files[link] = append(files[link], file)
		}
	}
	// `ip netns`, container runtimes and the lab keep a namespace by mounting it somewhere.
	// In the line of such a mount the root is the link, and the mount point follows
	// (proc(5)).
	mounts, err := os.ReadFile(filepath.Join(proc, "self/mountinfo"))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[3], "net:[") {
			files[f[3]] = append(files[f[3]], unescapeMount.Replace(f[4]))
		}
	}
	return files, nil
}

// Find returns a file by which a namespace can be entered, or "" if none of the files is one.
func (f Files) Find(id ID) (string, error) {
	for _, file := range f[fmt.Sprintf("net:[%d]", id.Inode)] {
		var there ID
		err := DoAt(file, func() (err error) {
			there, err = CurrentID()
			return err
		})
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.EINVAL): // it ended while we looked
		case err != nil:
			return "", err
		case there.Cookie == id.Cookie:
			return file, nil
		}
	}
	return "", nil
}

var unescapeMount = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
