// Package kernel reads and writes the kernel's settings of network devices, in sysfs and in /proc/sys, from any namespace and
// even if these are mounted read-only. internal/accel and its journal decide which settings to change, and restore them.
package kernel

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

// Store reads and writes settings. Values are the kernel's bytes without the trailing newline.
type Store interface {
	Read(path string) (string, error)
	Write(path, value string) error
}

// FlowTable is the number of entries of the table that maps flows to the CPUs on which their sockets were last read. All
// network namespaces share it. It is a setting of Sysctls.
const FlowTable = "net/core/rps_sock_flow_entries"

// Queue returns the path of a setting of receive queue i of a device: a setting of Sysfs.
func Queue(device string, i int, setting string) string {
	return fmt.Sprintf("class/net/%s/queues/rx-%d/%s", device, i, setting)
}

// SplitQueue splits the path of a queue's setting.
func SplitQueue(path string) (device, setting string, ok bool) {
	f := strings.Split(path, "/")
	if len(f) != 6 || f[0] != "class" || f[1] != "net" || f[3] != "queues" {
		return "", "", false
	}
	n, isRx := strings.CutPrefix(f[4], "rx-")
	if _, err := strconv.ParseUint(n, 10, 16); err != nil || !isRx {
		return "", "", false
	}
	return f[2], f[5], true
}

// IsOf reports whether a setting belongs to a device.
func IsOf(path, device string) bool { return strings.HasPrefix(path, "class/net/"+device+"/") }

// Renamed returns the path of a setting with another device name.
func Renamed(path, device string) string {
	f := strings.Split(path, "/")
	f[2] = device
	return strings.Join(f, "/")
}

// Gone reports whether an error means that the device was removed or renamed: its files no longer exist, or were open at that
// moment.
func Gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV)
}

// Sysfs reads and writes the settings of the devices of one network namespace. It keeps the folder open, so that opening a path
// takes one system call; os.Root takes a dozen for a path with a symbolic link.
type Sysfs struct {
	*os.Root
	dir *os.File
}

// OpenSysfs opens the sysfs of the calling thread's network namespace, or the one at dir if dir is
// not empty.
func OpenSysfs(dir string) (s Sysfs, err error) {
	if dir == "" {
		s.Root, err = netns.Sysfs()
	} else {
		s.Root, err = os.OpenRoot(dir)
	}
	if err != nil {
		return Sysfs{}, err
	}
	if s.dir, err = s.Open("."); err != nil {
		_ = s.Root.Close()
		return Sysfs{}, err
	}
	return s, nil
}

// Close closes the folder.
func (s Sysfs) Close() error { return errors.Join(s.dir.Close(), s.Root.Close()) }

// open opens a path beneath the folder, as os.Root would. If something is mounted or renamed anywhere at the same time, openat2
// may return EAGAIN; then open uses os.Root. It returns a file descriptor, because the system calls and the garbage of an
// *os.File matter with a thousand devices.
func (s Sysfs) open(path string, flags int) (fd int, err error) {
	beneath := func(path string) (int, error) {
		return unix.Openat2(int(s.dir.Fd()), path, &unix.OpenHow{Flags: uint64(flags) | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH})
	}
	if device, ok := strings.CutPrefix(path, "class/net/"); ok {
		// class/net/DEVICE is a symbolic link. Most devices are virtual, and their real path has half as many folders to
		// resolve.
		if fd, err = beneath("devices/virtual/net/" + device); err == nil {
			return fd, nil
		}
	}
	fd, err = beneath(path)
	switch {
	case err == nil:
		return fd, nil
	case Gone(err):
		return -1, &fs.PathError{Op: "openat2", Path: path, Err: err}
	}
	f, err := s.OpenFile(path, flags, 0)
	if err != nil {
		return -1, err
	}
	defer f.Close()
	if fd, err = unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return -1, fmt.Errorf("open %s: %w", path, err)
	}
	return fd, nil
}

// Write writes a setting.
func (s Sysfs) Write(path, value string) error {
	// Root.WriteFile would create the file if it is gone.
	f, err := s.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
	if errors.Is(err, unix.EROFS) {
		// A network namespace has one sysfs superblock. Whoever mounted it first, such as a container runtime for /sys, may
		// have made it read-only. Make it writable for this one write; the container's own mount stays read-only.
		if err := s.reconfigure("rw"); err != nil {
			return err
		}
		defer func() { _ = s.reconfigure("ro") }() // fails while another process writes, and that one will do the same
		f, err = s.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
	}
	if err != nil {
		return err
	}
	return writeAndClose(f, value)
}

// reconfigure sets a flag of the superblock, not only of this mount.
func (s Sysfs) reconfigure(flag string) error {
	picked, err := unix.Fspick(int(s.dir.Fd()), "", unix.FSPICK_EMPTY_PATH|unix.FSPICK_CLOEXEC)
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

// Read reads a setting.
func (s Sysfs) Read(path string) (string, error) {
	fd, err := s.open(path, unix.O_RDONLY)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	var page [4096]byte // the kernel returns a sysfs value of at most one page in one read
	n, err := unix.Read(fd, page[:])
	if err != nil {
		return "", &fs.PathError{Op: "read", Path: path, Err: err}
	}
	return strings.TrimSuffix(string(page[:n]), "\n"), nil
}

// List returns the names of the entries of a folder.
func (s Sysfs) List(path string) ([]string, error) {
	fd, err := s.open(path, unix.O_RDONLY|unix.O_DIRECTORY)
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

// Sysctls reads and writes the machine-wide settings, below sys in a procfs.
type Sysctls struct{ Proc string }

// Read reads a setting.
func (s Sysctls) Read(path string) (value string, err error) {
	err = s.at(path, func(file string) error {
		b, err := os.ReadFile(file)
		value = strings.TrimSuffix(string(b), "\n")
		return err
	})
	return value, err
}

// Write writes a setting.
func (s Sysctls) Write(path, value string) error {
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

// openSysctl opens a sysctl of the calling thread's namespaces even if /proc/sys is mounted read-only, as in an unprivileged
// container.
func openSysctl(path string) (*os.File, error) {
	proc, err := netns.Mount("proc")
	if err != nil {
		return nil, fmt.Errorf("/proc/sys is read-only, and a proc of its own cannot be mounted: %w", err)
	}
	defer proc.Close()
	return proc.OpenFile("sys/"+path, os.O_WRONLY|os.O_TRUNC, 0)
}

// at calls fn in a network namespace in which the file of a sysctl exists. The kernel shows sysctls such as
// net.core.rps_sock_flow_entries only in the initial network namespace (sysctl_core_net_init in net/core/sysctl_net_core.c).
// From another one, at enters that of the nearest ancestor process that sees the file: the process that started a worker in a
// pod is on the host. Process 1 comes last, because even root may not be allowed to enter its namespaces (that takes
// CAP_SYS_PTRACE, or at least the capabilities of process 1).
func (s Sysctls) at(path string, fn func(file string) error) error {
	file := filepath.Join(s.Proc, "sys", path)
	_, err := os.Stat(file)
	if !errors.Is(err, fs.ErrNotExist) {
		return fn(file)
	}
	for pid := os.Getpid(); pid > 0; {
		found := false
		nearest := netns.DoAt(filepath.Join(s.Proc, strconv.Itoa(pid), "ns/net"), func() error {
			if _, err := os.Stat(file); err != nil {
				return err
			}
			found = true
			return fn(file)
		})
		if found {
			return nearest
		}
		status, err := ReadStat(s.Proc, pid)
		if err != nil {
			return err
		}
		pid = status.Parent
	}
	return fmt.Errorf("%w: no process from this one up to process 1 is in a network namespace that shows it and can be entered; "+
		"start from the host, with its PID namespace, on a kernel with CONFIG_RPS", err)
}
