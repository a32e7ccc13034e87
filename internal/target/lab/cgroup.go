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

// cgroupPath returns the cgroup of a lab's pods, at the top of the hierarchy. The programs attached to
// it are removed with it.
func cgroupPath(lab string) (string, error) {
	root, err := cgroupRoot("/proc/self/mountinfo")
	return filepath.Join(root, "slip-"+lab), err
}

// cgroupRoot returns where cgroup v2 is mounted.
func cgroupRoot(mountinfo string) (string, error) {
	text, err := os.ReadFile(mountinfo)
	if err != nil {
		return "", fmt.Errorf("find the cgroup v2 mount: %w", err)
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

var errNoCgroup = errors.New("services in mode ebpf need cgroup v2, which is not mounted: mkdir /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified")

// makeTranslation creates the cgroup of a lab, and attaches the programs that translate the service
// addresses to which its sockets connect.
func makeTranslation(c Config, services []service) error {
	path, err := cgroupPath(c.Name)
	if err != nil {
		return err
	}
	if err := os.Mkdir(path, 0o755); err != nil {
		return fmt.Errorf("create cgroup: %w", err)
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
	defer loaded.Close() // the cgroup holds them from then on
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

// translated reports whether the lab's pods have a cgroup.
func (c Config) translated() bool {
	return c.Services != nil && c.Services.Mode == v1alpha1.ServiceEBPF
}

// removeCgroup removes the cgroup of a lab whose processes have been killed, once the kernel has noticed
// that they are gone. It is no error if there is none.
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
			return fmt.Errorf("cgroup %s of the lab has a process that is not the lab's: %w", path, ctx.Err())
		case <-time.After(time.Millisecond):
		}
	}
}
