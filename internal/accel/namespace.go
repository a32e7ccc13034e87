package accel

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

// within runs fn in the network namespace that file stands for, on this thread.
func within(file string, fn func() error) error {
	there, err := openNamespace(file)
	if err != nil {
		return err
	}
	defer there.Close()
	return inside(there, file, fn)
}

// openNamespace opens a file that stands for a network namespace, and never
// waits: a file that is something else, such as a FIFO, is for setns to refuse.
func openNamespace(file string) (netns.NsHandle, error) {
	fd, err := unix.Open(file, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return netns.None(), fmt.Errorf("open network namespace: %w", &fs.PathError{Op: "open", Path: file, Err: err})
	}
	return netns.NsHandle(fd), nil
}

// inside runs fn in a network namespace that is open, on this thread. The name
// is for messages.
func inside(there netns.NsHandle, name string, fn func() error) (err error) {
	runtime.LockOSThread()
	here, err := netns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open this network namespace: %w", err)
	}
	defer here.Close()
	defer func() {
		if back := netns.Set(here); back != nil {
			// The thread stays locked, so that no other goroutine gets it in a
			// namespace not its own.
			err = errors.Join(err, fmt.Errorf("return from network namespace %s: %w", name, back))
			return
		}
		runtime.UnlockOSThread()
	}()
	if err := netns.Set(there); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", name, err)
	}
	return fn()
}

// namespace identifies a network namespace: by its cookie, which the kernel
// never uses twice; the inode is what makes it quick to find.
type namespace struct {
	Cookie uint64 `json:"cookie,omitempty"`
	Inode  uint64 `json:"inode,omitempty"`
}

// currentNamespace is that of the calling thread.
func currentNamespace() (namespace, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return namespace{}, fmt.Errorf("open a socket: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return namespace{}, fmt.Errorf("read the network namespace's cookie (Linux 5.14 or newer): %w", err)
	}
	var stat unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &stat); err != nil {
		return namespace{}, fmt.Errorf("stat this network namespace: %w", err)
	}
	return namespace{Cookie: cookie, Inode: stat.Ino}, nil
}

// findNamespace returns a file by which id can be entered, or "" if no process
// and no mount that can be seen from here has it.
func findNamespace(proc string, id namespace) (string, error) {
	link := fmt.Sprintf("net:[%d]", id.Inode)
	// This thread may be where no process shows it.
	candidates := []string{filepath.Join(proc, "thread-self/ns/net")}
	processes, err := filepath.Glob(filepath.Join(proc, "[0-9]*/ns/net"))
	if err != nil {
		return "", err
	}
	for _, file := range processes {
		if target, err := os.Readlink(file); err == nil && target == link {
			candidates = append(candidates, file)
		}
	}
	// `ip netns`, container runtimes and the lab keep a namespace by mounting it
	// somewhere: its line has the link as root and then the place (proc(5)).
	mounts, err := os.ReadFile(filepath.Join(proc, "self/mountinfo"))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 4 && f[3] == link {
			candidates = append(candidates, unescapeMount.Replace(f[4]))
		}
	}
	for _, file := range candidates {
		var there namespace
		err := within(file, func() (err error) {
			there, err = currentNamespace()
			return err
		})
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.EINVAL): // it went while we looked
		case err != nil:
			return "", err
		case there.Cookie == id.Cookie:
			return file, nil
		}
	}
	return "", nil
}

var unescapeMount = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
