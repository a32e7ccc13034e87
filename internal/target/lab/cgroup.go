//go:build linux

package lab

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/target/lab/programs"
)

// cgroupPath is the cgroup of a lab's pods' processes: one of the lab's own, at the
// top of the hierarchy. The programs that are attached to it go with it.
func cgroupPath(lab string) (string, error) {
	root, err := cgroupRoot("/proc/self/mountinfo")
	return filepath.Join(root, "slip-"+lab), err
}

// cgroupRoot is where cgroups of version 2 are mounted.
func cgroupRoot(mountinfo string) (string, error) {
	text, err := os.ReadFile(mountinfo)
	if err != nil {
		return "", fmt.Errorf("look for cgroups: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		// "36 35 98:0 /root /mount/point options … - type source options" (proc(5))
		mount, kind, _ := strings.Cut(line, " - ")
		fields := strings.Fields(mount)
		if len(fields) > 4 && strings.HasPrefix(kind, "cgroup2 ") {
			return fields[4], nil
		}
	}
	return "", errNoCgroup
}

var errNoCgroup = errors.New("services in mode ebpf need cgroups of version 2, and none are mounted: mkdir /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified")

// makeTranslation makes the cgroup of a lab, and has what its sockets connect to
// translated.
func makeTranslation(c Config, services []service) error {
	path, err := cgroupPath(c.Name)
	if err != nil {
		return err
	}
	if err := os.Mkdir(path, 0o755); err != nil {
		return fmt.Errorf("make cgroup: %w", err)
	}
	dir, err := openCgroup(c.Name)
	if err != nil {
		return err
	}
	defer dir.Close()
	backends := 0
	for _, s := range services {
		backends += len(s.backends)
	}
	loaded, err := programs.LoadServices(len(services), backends)
	if err != nil {
		return err
	}
	defer loaded.Close() // the cgroup holds them then
	numbers := map[string]uint8{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP}
	for _, s := range services {
		if err := loaded.Add(programs.Backends{Service: s.address, Protocol: numbers[s.transport.Protocol], Backends: s.backends}); err != nil {
			return err
		}
	}
	return loaded.Attach(int(dir.Fd()))
}

func openCgroup(lab string) (*os.File, error) {
	path, err := cgroupPath(lab)
	if err != nil {
		return nil, err
	}
	dir, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open cgroup of the lab: %w", err)
	}
	return dir, nil
}

// translated tells whether the processes of a lab's pods are in a cgroup of its own.
func (c Config) translated() bool {
	return c.Services != nil && c.Services.Mode == v1alpha1.ServiceEBPF
}

// removeCgroup removes that of a lab, whose processes have been ended. The kernel may
// take a moment to see them leave. One that is not there is no error.
func removeCgroup(ctx context.Context, c Config) error {
	path, err := cgroupPath(c.Name)
	if errors.Is(err, errNoCgroup) {
		return nil
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, gone)
	defer cancel()
	for {
		switch err := os.Remove(path); {
		case err == nil || errors.Is(err, fs.ErrNotExist):
			return nil
		case !errors.Is(err, unix.EBUSY):
			return fmt.Errorf("remove cgroup: %w", err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("a process that is not the lab's is in its cgroup %s: %w", path, ctx.Err())
		case <-time.After(time.Millisecond):
		}
	}
}
