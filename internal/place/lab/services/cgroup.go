//go:build linux

package services

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

	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/programs"
)

// CgroupPath returns the path of the cgroup of a lab's pods, below the root of the hierarchy. Programs that are attached to it
// are removed with it.
func CgroupPath(lab string) (string, error) {
	root, err := cgroupRoot("/proc/self/mountinfo")
	return filepath.Join(root, "slip-"+lab), err
}

// cgroupRoot returns the mount point of cgroup v2.
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

// Attach creates the cgroup of a lab, and attaches the programs that translate service addresses for its sockets. It returns
// how long that took.
func (s *Config) Attach(lab string, nodes []network.Node) (took time.Duration, err error) {
	services := s.services(nodes)
	begin := time.Now()
	err = makeTranslation(lab, services)
	return time.Since(begin), err
}

var protocolNumbers = map[string]uint8{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP}

func makeTranslation(lab string, services []service) error {
	path, err := CgroupPath(lab)
	if err != nil {
		return err
	}
	if err := os.Mkdir(path, 0o755); err != nil {
		return fmt.Errorf("create cgroup: %w", err)
	}
	dir, err := OpenCgroup(lab)
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
	defer loaded.Close() // the cgroup holds the attached programs
	for _, s := range services {
		if err := loaded.Add(programs.Backends{Service: s.address, Protocol: protocolNumbers[s.transport.Protocol], Backends: s.backends}); err != nil {
			return err
		}
	}
	return loaded.Attach(int(dir.Fd()))
}

// OpenCgroup opens the cgroup of a lab's pods.
func OpenCgroup(lab string) (*os.File, error) {
	path, err := CgroupPath(lab)
	if err != nil {
		return nil, err
	}
	dir, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open cgroup of the lab: %w", err)
	}
	return dir, nil
}

// emptied limits how long the kernel may take to notice that the processes of a cgroup are gone.
const emptied = 10 * time.Second

// RemoveCgroup removes the cgroup of a lab whose processes have been killed, once the kernel has noticed that they are gone. If
// there is no cgroup, that is no error.
func RemoveCgroup(ctx context.Context, lab string) error {
	path, err := CgroupPath(lab)
	if errors.Is(err, errNoCgroup) {
		return nil
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, emptied)
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
