//go:build linux

package cluster

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
)

// stateDir has a folder for each cluster of the machine. The folder is created before
// anything else of the cluster, and removed last.
const stateDir = "/run/slipstream-cluster"

// A cluster's processes, and all that they start, are created in one control group
// (clone3's CLONE_INTO_CGROUP). So whoever finds the group can end them all, even if
// the process that started them has gone.
//
// It contains the group "processes", and one group per node for the pods. In each
// version 1 hierarchy, the nodes have groups with the same names.
const cgroupDir = "/sys/fs/cgroup"

func cgroupName(id string) string { return "slipstream-cluster-" + id }

// unified returns where version 2 of control groups is mounted, whether alone or
// beside version 1.
func unified() (string, error) {
	for _, dir := range []string{cgroupDir, filepath.Join(cgroupDir, "unified")} {
		if _, err := os.Stat(filepath.Join(dir, "cgroup.controllers")); err == nil {
			return dir, nil
		}
	}
	return "", fmt.Errorf("control groups of version 2 are neither at %s nor at %[1]s/unified: mount them (mount -t cgroup2 cgroup2 %[1]s/unified)", cgroupDir)
}

// hierarchies returns the folders of all control group hierarchies.
func hierarchies() ([]string, error) {
	if _, err := os.Stat(filepath.Join(cgroupDir, "cgroup.procs")); err == nil {
		return []string{cgroupDir}, nil
	}
	entries, err := os.ReadDir(cgroupDir)
	if err != nil {
		return nil, fmt.Errorf("list control groups: %w", err)
	}
	var all []string
	for _, e := range entries {
		dir := filepath.Join(cgroupDir, e.Name())
		if _, err := os.Stat(filepath.Join(dir, "cgroup.procs")); err == nil && e.IsDir() {
			all = append(all, dir)
		}
	}
	return all, nil
}

// makeCgroups creates the groups of a cluster, and opens the one for processes.
func makeCgroups(id string) (processes *os.File, err error) {
	all, err := hierarchies()
	if err != nil {
		return nil, err
	}
	v2, err := unified()
	if err != nil {
		return nil, err
	}
	top := cgroupName(id)
	for _, root := range all {
		if err := makeGroup(filepath.Join(root, top)); err != nil {
			return nil, err
		}
	}
	if err := makeGroup(filepath.Join(v2, top, "processes")); err != nil {
		return nil, err
	}
	processes, err = os.Open(filepath.Join(v2, top, "processes"))
	if err != nil {
		return nil, fmt.Errorf("open control group: %w", err)
	}
	return processes, nil
}

// makeNodeCgroups creates the groups of a node in those of its cluster.
func makeNodeCgroups(id, node string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, root := range all {
		if err := makeGroup(filepath.Join(root, cgroupName(id), node)); err != nil {
			return err
		}
	}
	return nil
}

func makeGroup(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return fmt.Errorf("make control group: %w", err)
	}
	if err := delegate(filepath.Dir(dir), dir); err != nil {
		return fmt.Errorf("set up control group %s: %w", dir, err)
	}
	return nil
}

// delegate gives a group the resources of its parent: in version 1 a new cpuset has
// no CPUs, and in version 2 every new group has no controllers.
func delegate(parent, dir string) error {
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		data, err := os.ReadFile(filepath.Join(parent, file))
		if errors.Is(err, fs.ErrNotExist) || err == nil && len(strings.TrimSpace(string(data))) == 0 {
			continue // another hierarchy, or version 2, which inherits the parent's CPUs
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, file), data, 0)
		}
		if err != nil {
			return err
		}
	}
	controllers, err := os.ReadFile(filepath.Join(parent, "cgroup.controllers"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, c := range strings.Fields(string(controllers)) {
		if err := os.WriteFile(filepath.Join(parent, "cgroup.subtree_control"), []byte("+"+c), 0); err != nil {
			return fmt.Errorf("hand on controller %s: %w", c, err)
		}
	}
	return nil
}

// gone bounds how long killed processes and removed groups may take to disappear.
const gone = 20 * time.Second

// killAll kills every process of a cluster, and waits until they are gone.
func killAll(ctx context.Context, id string) error {
	v2, err := unified()
	if err != nil {
		return err
	}
	dir := filepath.Join(v2, cgroupName(id))
	err = os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("end the cluster's processes: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, gone)
	defer cancel()
	if err := poll(ctx, 10*time.Millisecond, func() (bool, error) {
		events, err := os.ReadFile(filepath.Join(dir, "cgroup.events"))
		return strings.Contains(string(events), "populated 0"), err
	}); err != nil {
		return fmt.Errorf("wait for the cluster's processes to end: %w", err)
	}
	return nil
}

// removeCgroups removes the group of a cluster or a node from each hierarchy,
// including its children. Its processes must have ended.
func removeCgroups(ctx context.Context, group string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, gone)
	defer cancel()
	for _, root := range all {
		// A group stays busy for a moment after its last process has ended.
		var last error
		if err := poll(ctx, 10*time.Millisecond, func() (bool, error) {
			last = removeGroup(filepath.Join(root, group))
			return last == nil || !errors.Is(last, unix.EBUSY), nil
		}); err != nil {
			last = errors.Join(last, err)
		}
		if last != nil {
			return fmt.Errorf("remove control group: %w", last)
		}
	}
	return nil
}

// removeGroup removes a group and its children. The files in it disappear with it.
func removeGroup(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeGroup(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("%s: %w", dir, err)
	}
	return nil
}

// ownerFile is a file in a cluster's folder. The process that owns the cluster holds
// a lock on it as long as it lives.
const ownerFile = "owner"

// newState creates the folder of a new cluster.
func newState(ctx context.Context) (dir string, owner *os.File, err error) {
	if err := os.MkdirAll(stateDir, 0o755); err != nil {
		return "", nil, fmt.Errorf("make folder for clusters: %w", err)
	}
	// The lock keeps Sweep away while the folder exists without an owner.
	lock, err := flock(ctx, filepath.Join(stateDir, "lock"))
	if err != nil {
		return "", nil, err
	}
	defer lock.Close()
	if err := holdFlowTable(); err != nil {
		return "", nil, err
	}
	if dir, err = os.MkdirTemp(stateDir, ""); err != nil {
		return "", nil, fmt.Errorf("make folder of the cluster: %w", err)
	}
	// Pods may run as any user, and must reach the files that are mounted from there.
	err = os.Chmod(dir, 0o755)
	if err == nil {
		owner, err = flock(ctx, filepath.Join(dir, ownerFile))
	}
	if err != nil {
		return "", nil, errors.Join(fmt.Errorf("take the cluster's folder: %w", err), os.RemoveAll(dir))
	}
	return dir, owner, nil
}

// Sweep removes clusters whose process ended without removing them.
func Sweep(ctx context.Context) error {
	if _, err := os.Stat(stateDir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	lock, err := flock(ctx, filepath.Join(stateDir, "lock"))
	if err != nil {
		return err
	}
	defer lock.Close()
	entries, err := os.ReadDir(stateDir)
	if err != nil {
		return fmt.Errorf("list clusters: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		dir := filepath.Join(stateDir, e.Name())
		// A folder without the file has been half removed.
		owner, err := os.Open(filepath.Join(dir, ownerFile))
		if err == nil {
			err = unix.Flock(int(owner.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		}
		switch {
		case errors.Is(err, unix.EWOULDBLOCK):
			// Another process owns it.
		case err == nil || errors.Is(err, fs.ErrNotExist):
			errs = append(errs, remove(ctx, dir))
		default:
			errs = append(errs, fmt.Errorf("tell whose cluster %s is: %w", e.Name(), err))
		}
		owner.Close()
	}
	return errors.Join(append(errs, releaseFlowTable())...)
}

// RFS steers by a flow table that belongs to the machine, and every node would take
// it for its own: if one node set and restored it, the next would find it changed. So
// the table has the size that RFS asks for as long as there are clusters.
const (
	flowTable     = "/proc/sys/net/core/rps_sock_flow_entries"
	flowTableSize = "32768"
)

// flowTableWas keeps the original size. The caller of holdFlowTable and
// releaseFlowTable holds the lock of stateDir.
var flowTableWas = filepath.Join(stateDir, "rps_sock_flow_entries")

func holdFlowTable() error {
	_, err := os.Stat(flowTableWas)
	if errors.Is(err, fs.ErrNotExist) {
		var was []byte
		if was, err = os.ReadFile(flowTable); err == nil {
			err = os.WriteFile(flowTableWas, was, 0o644)
		}
	}
	if err == nil {
		err = os.WriteFile(flowTable, []byte(flowTableSize), 0)
	}
	if err != nil {
		return fmt.Errorf("size the machine's flow table: %w", err)
	}
	return nil
}

func releaseFlowTable() error {
	entries, err := os.ReadDir(stateDir)
	if err != nil {
		return fmt.Errorf("list clusters: %w", err)
	}
	for _, e := range entries {
		if e.IsDir() {
			return nil // another cluster exists
		}
	}
	was, err := os.ReadFile(flowTableWas)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = os.WriteFile(flowTable, was, 0)
	}
	if err == nil {
		err = os.Remove(flowTableWas)
	}
	if err != nil {
		return fmt.Errorf("put back the size of the machine's flow table: %w", err)
	}
	return nil
}

// remove ends and removes everything that belongs to a cluster. Its namespaces, with
// their mounts and devices, end with its processes.
func remove(ctx context.Context, dir string) error {
	id := filepath.Base(dir)
	if err := killAll(ctx, id); err != nil {
		return err
	}
	if err := removeCgroups(ctx, cgroupName(id)); err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove the cluster's folder: %w", err)
	}
	return nil
}
