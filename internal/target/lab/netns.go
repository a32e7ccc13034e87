//go:build linux

package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// netnsDir is where `ip netns` looks for namespaces by name. Its bind mount of
// the folder onto itself is left to it: it lets other mount namespaces follow
// along, and to remove a name the kernel has done without since 3.19 (unlink
// detaches what is mounted on the name anywhere).
const netnsDir = "/run/netns"

func netnsPath(name string) string { return filepath.Join(netnsDir, name) }

// namespace is a network namespace that is at hand: its file, and a netlink
// socket in it.
type namespace struct {
	name string
	file *os.File
	nl   *netlink.Handle
}

func (ns *namespace) close() {
	if ns != nil {
		ns.nl.Close()
		ns.file.Close()
	}
}

// fd is how netlink takes a namespace to put a device in.
func (ns *namespace) fd() netlink.NsFd { return netlink.NsFd(ns.file.Fd()) }

// createNamespace makes a namespace and its name, and runs setup in it.
func createNamespace(name string, setup func() error) (ns *namespace, err error) {
	path := netnsPath(name)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return nil, fmt.Errorf("name network namespace: %w", err)
	}
	f.Close()
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make network namespace %s: %w", name, err)
		}
		if err := unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind network namespace to %s: %w", path, err)
		}
		if ns, err = openHere(name); err != nil {
			return err
		}
		return setup()
	})
	if err != nil {
		ns.close()
		return nil, err
	}
	return ns, nil
}

// openNamespace takes a namespace by its name.
func openNamespace(name string) (ns *namespace, err error) {
	err = inside(name, func() error {
		ns, err = openHere(name)
		return err
	})
	return ns, err
}

// openHere takes the namespace that the thread is in.
func openHere(name string) (*namespace, error) {
	f, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, err
	}
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("open netlink in network namespace %s: %w", name, err)
	}
	return &namespace{name: name, file: f, nl: nl}, nil
}

// inside runs f on a thread that is in the namespace.
func inside(name string, f func() error) error {
	file, err := os.Open(netnsPath(name))
	if err != nil {
		return fmt.Errorf("enter network namespace: %w", err)
	}
	defer file.Close()
	return insideFile(file, f)
}

func insideFile(file *os.File, f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(file.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace %s: %w", file.Name(), err)
		}
		return f()
	})
}

// onThread runs f on a thread of its own, whose network namespace f may change.
// A thread that does not find back is not used again: it ends with its
// goroutine, as that is still locked to it.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			runtime.UnlockOSThread()
			done <- err
			return
		}
		defer home.Close()
		err = f()
		if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
			done <- errors.Join(err, fmt.Errorf("leave network namespace: %w", back))
			return
		}
		runtime.UnlockOSThread()
		done <- err
	}()
	return <-done
}

// removeNamespace takes a name away; the namespace goes when nothing else holds
// it. A name that is not there, or was not bound yet, is no error.
func removeNamespace(name string) error {
	path := netnsPath(name)
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount network namespace %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove name of network namespace: %w", err)
	}
	return nil
}

// sysctl sets "net/ipv4/ip_forward=1" and the like in the thread's namespace.
func sysctl(settings ...string) error {
	for _, s := range settings {
		key, value, _ := strings.Cut(s, "=")
		if err := os.WriteFile("/proc/sys/"+key, []byte(value), 0); err != nil {
			return fmt.Errorf("set sysctl %s: %w", s, err)
		}
	}
	return nil
}

// openSysfs opens a file of the sysfs that shows the thread's namespace. /sys
// shows the devices of the namespace that it was mounted in, so this mounts
// another, which has no place in the file tree and ends with the file.
func openSysfs(path string, flags int) (*os.File, error) {
	fsfd, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("open sysfs: %w", err)
	}
	defer unix.Close(fsfd)
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return nil, fmt.Errorf("create sysfs: %w", err)
	}
	mount, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("mount sysfs: %w", err)
	}
	defer unix.Close(mount)
	fd, err := unix.Openat(mount, path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s in sysfs: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}
