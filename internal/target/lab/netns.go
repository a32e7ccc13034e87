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

// netnsDir is where `ip netns` looks for namespaces by name. `ip netns` also bind-mounts the folder onto
// itself, so that names propagate to other mount namespaces; this package does not, as removing a name
// has not needed it since Linux 3.19 (unlink detaches what is mounted on the name anywhere).
const netnsDir = "/run/netns"

func netnsPath(name string) string { return filepath.Join(netnsDir, name) }

// namespace is an open network namespace: its file, and a netlink socket in it.
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

// fd is the form in which netlink takes a namespace for a device.
func (ns *namespace) fd() netlink.NsFd { return netlink.NsFd(ns.file.Fd()) }

// createNamespace creates a named namespace, and runs setup in it.
func createNamespace(name string, setup func() error) (ns *namespace, err error) {
	path := netnsPath(name)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return nil, fmt.Errorf("name network namespace: %w", err)
	}
	f.Close()
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("create network namespace %s: %w", name, err)
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

// openNamespace opens a namespace by its name.
func openNamespace(name string) (ns *namespace, err error) {
	err = inside(name, func() error {
		ns, err = openHere(name)
		return err
	})
	return ns, err
}

// openHere opens the namespace of the thread.
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

// onThread runs f on its own thread, whose network namespace f may change. If the thread cannot return
// to its namespace, it is not reused: it ends with the goroutine that is still locked to it.
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

// removeNamespace removes the name of a namespace, which disappears once nothing else holds it. It is no
// error if the name does not exist or was not bound yet.
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

// sysctl sets sysctls such as "net/ipv4/ip_forward=1" in the thread's namespace.
func sysctl(settings ...string) error {
	for _, s := range settings {
		key, value, _ := strings.Cut(s, "=")
		if err := os.WriteFile("/proc/sys/"+key, []byte(value), 0); err != nil {
			return fmt.Errorf("set sysctl %s: %w", s, err)
		}
	}
	return nil
}

// openSysfs opens a file of a sysfs that shows the thread's namespace. /sys shows the devices of the
// namespace that it was mounted in, so this mounts another one, detached, which ends with the file.
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
