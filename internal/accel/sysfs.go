package accel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/netns"
)

// store is where settings stand. Values go without their newline; otherwise
// they are the kernel's bytes.
type store interface {
	read(path string) (string, error)
	write(path, value string) error
}

// sysfs holds the settings of one network namespace's devices.
type sysfs struct{ *os.Root }

func (s sysfs) read(path string) (string, error) {
	b, err := s.ReadFile(path)
	return strings.TrimSuffix(string(b), "\n"), err
}

func (s sysfs) write(path, value string) error {
	// Not Root.WriteFile: it would create a file that has gone.
	f, err := s.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
	if errors.Is(err, unix.EROFS) {
		// A network namespace has one sysfs, and whoever mounted it first, as a
		// container runtime does for /sys, may have made all of it read-only. It is
		// writable for this one write; the container's own mount stays read-only.
		if err := s.reconfigure("rw"); err != nil {
			return err
		}
		defer func() { _ = s.reconfigure("ro") }() // busy while another writes, who does the same
		f, err = s.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
	}
	if err != nil {
		return err
	}
	return writeAndClose(f, value)
}

// reconfigure sets a flag of the file system, and not only of this mount of it.
func (s sysfs) reconfigure(flag string) error {
	dir, err := s.Open(".")
	if err != nil {
		return err
	}
	defer dir.Close()
	picked, err := unix.Fspick(int(dir.Fd()), "", unix.FSPICK_EMPTY_PATH|unix.FSPICK_CLOEXEC)
	if err != nil {
		return fmt.Errorf("fspick sysfs: %w", err)
	}
	defer unix.Close(picked)
	if err := unix.FsconfigSetFlag(picked, flag); err != nil {
		return fmt.Errorf("make sysfs %s: %w", flag, err)
	}
	if err := unix.FsconfigReconfigure(picked); err != nil {
		return fmt.Errorf("make sysfs %s: %w", flag, err)
	}
	return nil
}

// list names what is in a folder.
func (s sysfs) list(path string) ([]string, error) {
	f, err := s.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.Readdirnames(-1)
}

// heldSysfs is a sysfs for who reads much of it: its folder is open, so that a path
// is one call and not the dozen that os.Root makes of a path with a link in it.
type heldSysfs struct {
	sysfs
	dir *os.File
}

func holdSysfs(root *os.Root) (heldSysfs, error) {
	dir, err := root.Open(".")
	return heldSysfs{sysfs{root}, dir}, err
}

func (h heldSysfs) Close() error { return errors.Join(h.dir.Close(), h.Root.Close()) }

// open opens a path beneath the folder as os.Root would. The kernel can ask to try
// again, where something was mounted or renamed anywhere meanwhile; then os.Root does.
func (h heldSysfs) open(path string, flags uint64) (fd int, ok bool, err error) {
	fd, err = unix.Openat2(int(h.dir.Fd()), path, &unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH})
	switch {
	case err == nil:
		return fd, true, nil
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV):
		return -1, true, &fs.PathError{Op: "openat2", Path: path, Err: err}
	}
	return -1, false, nil
}

func (h heldSysfs) read(path string) (string, error) {
	fd, ok, err := h.open(path, unix.O_RDONLY)
	if !ok {
		return h.sysfs.read(path)
	}
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	// A value of sysfs is at most a page, and comes whole.
	var page [4096]byte
	for {
		n, err := unix.Read(fd, page[:])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return "", &fs.PathError{Op: "read", Path: path, Err: err}
		}
		return strings.TrimSuffix(string(page[:n]), "\n"), nil
	}
}

func (h heldSysfs) list(path string) ([]string, error) {
	fd, ok, err := h.open(path, unix.O_RDONLY|unix.O_DIRECTORY)
	if !ok {
		return h.sysfs.list(path)
	}
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	return f.Readdirnames(-1)
}

func writeAndClose(f *os.File, value string) error {
	_, err := f.WriteString(value)
	return errors.Join(err, f.Close())
}

// gone tells that the device went away, or took another name: its files are not
// there any more, or were open when it went.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV)
}

// sysctls holds the settings that are one for the whole machine, below proc/sys.
type sysctls struct{ proc string }

func (s sysctls) read(path string) (value string, err error) {
	err = s.at(path, func(file string) error {
		b, err := os.ReadFile(file)
		value = strings.TrimSuffix(string(b), "\n")
		return err
	})
	return value, err
}

func (s sysctls) write(path, value string) error {
	return s.at(path, func(file string) error {
		f, err := os.OpenFile(file, os.O_WRONLY|os.O_TRUNC, 0)
		if errors.Is(err, unix.EROFS) {
			f, err = openSysctl(path)
		}
		if err != nil {
			return err
		}
		return writeAndClose(f, value)
	})
}

// openSysctl opens a sysctl of the calling thread's namespaces past a /proc/sys that is
// read-only, as a container runtime mounts it for who is not privileged.
func openSysctl(path string) (*os.File, error) {
	proc, err := netns.Mount("proc")
	if err != nil {
		return nil, fmt.Errorf("/proc/sys is read-only, and a proc of its own cannot be mounted: %w", err)
	}
	defer proc.Close()
	return proc.OpenFile("sys/"+path, os.O_WRONLY|os.O_TRUNC, 0)
}

// at calls fn where path can be seen. The kernel shows sysctls such as
// net.core.rps_sock_flow_entries in its first network namespace alone
// (sysctl_core_net_init in net/core/sysctl_net_core.c), and /proc/sys is that of
// whoever looks. From any other namespace, fn runs in that of the nearest
// ancestor that sees the file: whoever started a worker in a pod is on the host.
// Process 1 is only the last of them, as it may be closed even to root (to enter
// takes CAP_SYS_PTRACE, or no fewer capabilities than it has).
func (s sysctls) at(path string, fn func(file string) error) error {
	file := filepath.Join(s.proc, "sys", path)
	_, err := os.Stat(file)
	if !errors.Is(err, fs.ErrNotExist) {
		return fn(file)
	}
	for pid := os.Getpid(); pid > 0; {
		found := false
		nearest := netns.DoAt(filepath.Join(s.proc, strconv.Itoa(pid), "ns/net"), func() error {
			if _, err := os.Stat(file); err != nil {
				return err
			}
			found = true
			return fn(file)
		})
		if found {
			return nearest
		}
		status, err := readStat(s.proc, pid)
		if err != nil {
			return err
		}
		pid = status.parent
	}
	return fmt.Errorf("%w: no process from this one up to process 1 is in a network namespace that shows it and can be entered; "+
		"start from the host, with its PID namespace, on a kernel with CONFIG_RPS", err)
}
