//go:build linux

package network

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/netns"
)

// Dir is the folder in which `ip netns` looks for namespaces by name.
const Dir = "/run/netns"

// Path returns the path of a namespace.
func Path(name string) string { return filepath.Join(Dir, name) }

// Namespace is an open network namespace: its handle, and a netlink socket in it.
type Namespace struct {
	Handle  netns.Handle
	Netlink *netlink.Handle
}

// Close closes the handle and the socket. ns may be nil.
func (ns *Namespace) Close() {
	if ns != nil {
		ns.Netlink.Close()
		ns.Handle.Close()
	}
}

// FD returns the namespace as netlink takes it for a device.
func (ns *Namespace) FD() netlink.NsFd { return netlink.NsFd(ns.Handle) }

// Do runs f in the namespace.
func (ns *Namespace) Do(f func() error) error { return netns.Do(ns.Handle, f) }

// propagate makes a folder a mount point with shared propagation, unless it is one, so that names in it appear in other mount
// namespaces. `ip netns add` does the same. It has to happen before a name is bound in the folder: a later mount would cover
// the name, which could then not be removed.
func propagate(dir string) error {
	err := unix.Mount("", dir, "none", unix.MS_SHARED|unix.MS_REC, "")
	if !errors.Is(err, unix.EINVAL) {
		return err
	}
	if err := unix.Mount(dir, dir, "none", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	return unix.Mount("", dir, "none", unix.MS_SHARED|unix.MS_REC, "")
}

// Create creates a network namespace with a name, and runs setup in it.
func Create(name string, setup func() error) (*Namespace, error) {
	if err := propagate(Dir); err != nil {
		return nil, fmt.Errorf("share the names in %s: %w", Dir, err)
	}
	path := Path(name)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return nil, fmt.Errorf("name network namespace: %w", err)
	}
	f.Close()
	h, err := netns.New()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if err := netns.Do(h, func() error {
		if err := unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind network namespace to %s: %w", path, err)
		}
		return setup()
	}); err != nil {
		h.Close()
		return nil, err
	}
	return Adopt(name, h)
}

// Open opens a namespace by its name.
func Open(name string) (*Namespace, error) {
	h, err := netns.Open(Path(name))
	if err != nil {
		return nil, err
	}
	return Adopt(name, h)
}

// Adopt opens a netlink socket in a network namespace, and takes over its handle. The name is for errors.
func Adopt(name string, h netns.Handle) (*Namespace, error) {
	var nl *netlink.Handle
	if err := netns.Do(h, func() (err error) {
		nl, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	}); err != nil {
		h.Close()
		return nil, fmt.Errorf("open netlink in network namespace %s: %w", name, err)
	}
	return &Namespace{h, nl}, nil
}

// Inside runs f in the network namespace with this name.
func Inside(name string, f func() error) error { return netns.DoAt(Path(name), f) }

// Remove removes the name of a network namespace, which ends once nothing else holds it. If the name does not exist or is not
// bound yet, that is no error.
func Remove(name string) error {
	path := Path(name)
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount network namespace %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove name of network namespace: %w", err)
	}
	return nil
}

// Sysctl sets sysctls such as "net/ipv4/ip_forward=1" in the thread's namespace.
func Sysctl(settings ...string) error {
	for _, s := range settings {
		key, value, _ := strings.Cut(s, "=")
		if err := os.WriteFile("/proc/sys/"+key, []byte(value), 0); err != nil {
			return fmt.Errorf("set sysctl %s: %w", s, err)
		}
	}
	return nil
}
