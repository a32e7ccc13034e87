//go:build linux

package collect

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// HostCgroups is where a container in the host's PID namespace finds all cgroups of the host. Its own mount may show only those
// of the container.
const HostCgroups = "/proc/1/root/sys/fs/cgroup"

// PodGroup is the cgroup that kubelet creates for a pod. Its values include all containers.
type PodGroup struct {
	cpu, memory string // folders; the same in cgroup v2
	v2          bool
}

// FindPods returns the cgroups of pods, by UID, below a cgroup mount. The result lacks pods that it does not find.
func FindPods(mount string, uids ...string) map[string]PodGroup {
	found := make(map[string]PodGroup)
	if len(uids) == 0 {
		return found
	}
	cpu, v2 := mount, exists(filepath.Join(mount, "cgroup.controllers"))
	if !v2 {
		cpu = filepath.Join(mount, "cpu,cpuacct")
		if !exists(cpu) {
			cpu = filepath.Join(mount, "cpuacct")
		}
	}
	_ = filepath.WalkDir(cpu, func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil //nolint:nilerr // groups end meanwhile
		}
		uid := podOf(d.Name(), uids)
		if uid == "" {
			return nil
		}
		found[uid] = PodGroup{cpu: name, memory: name, v2: v2}
		if !v2 {
			found[uid] = PodGroup{cpu: name, memory: filepath.Join(mount, "memory", strings.TrimPrefix(name, cpu))}
		}
		if len(found) == len(uids) {
			return fs.SkipAll
		}
		return fs.SkipDir
	})
	return found
}

// podOf returns the UID of the pod to which a cgroup belongs, or "". The name is pod<uid> with kubelet's driver cgroupfs, and
// kubepods[-burstable|-besteffort]-pod<uid>.slice with the driver systemd, where the UID has _ instead of -.
func podOf(group string, uids []string) string {
	for _, uid := range uids {
		if group == "pod"+uid || strings.HasPrefix(group, "kubepods-") && strings.HasSuffix(group, "pod"+strings.ReplaceAll(uid, "-", "_")+".slice") {
			return uid
		}
	}
	return ""
}

// PodUsage holds what a pod has used up to an instant.
type PodUsage struct {
	at  int64         // CLOCK_MONOTONIC in ns
	cpu time.Duration // since the cgroup was created
	// memory is the working set in bytes, as kubelet computes it: without inactive file pages.
	memory     uint64
	containers []string
}

// errRestarts is the error for a pod whose values would be the sum of two processes.
var errRestarts = errors.New("a container of its pod started or ended within the window")

// Usage reads what the pod has used so far. The containers with these IDs must run: otherwise a container that restarted within
// a window, and was waiting for a restart at both edges, would go unnoticed.
func (g PodGroup) Usage(containers ...string) (u PodUsage, err error) {
	cpuFile, cpuKey, unit := "cpuacct.usage", "", time.Nanosecond
	memoryFile, inactive := "memory.usage_in_bytes", "total_inactive_file"
	if g.v2 {
		cpuFile, cpuKey, unit = "cpu.stat", "usage_usec", time.Microsecond
		memoryFile, inactive = "memory.current", "inactive_file"
	}
	cpu, err := readValue(filepath.Join(g.cpu, cpuFile), cpuKey)
	u.at, u.cpu = monotonic(), time.Duration(cpu)*unit
	if err != nil {
		return u, err
	}
	all, err := readValue(filepath.Join(g.memory, memoryFile), "")
	if err != nil {
		return u, err
	}
	unused, err := readValue(filepath.Join(g.memory, "memory.stat"), inactive)
	if err != nil {
		return u, err
	}
	u.memory = all - min(all, unused)
	entries, err := os.ReadDir(g.cpu)
	for _, e := range entries {
		if e.IsDir() {
			u.containers = append(u.containers, e.Name())
		}
	}
	for _, id := range containers {
		// The name of the cgroup is the ID, or the ID between the runtime's name and .scope.
		if err == nil && !slices.ContainsFunc(u.containers, func(group string) bool { return strings.Contains(group, id) }) {
			err = errRestarts
		}
	}
	return u, err
}

// Use returns how many CPUs a pod used on average between two readings, and the mean of its memory in bytes. It returns an
// error if a container started or ended in between.
func (u PodUsage) Use(later PodUsage) (cpus, memory float64, err error) {
	if !slices.Equal(u.containers, later.containers) {
		return 0, 0, errRestarts
	}
	if later.at <= u.at || later.cpu < u.cpu {
		return 0, 0, errors.New("the counters of its pod did not grow")
	}
	return float64(later.cpu-u.cpu) / float64(later.at-u.at), (float64(u.memory) + float64(later.memory)) / 2, nil
}

// readValue reads the number after a key in a cgroup file or, without a key, the only number in it.
func readValue(file, key string) (uint64, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	n, err := parseValue(b, key)
	if err != nil {
		return 0, fmt.Errorf("parse %s: %w", file, err)
	}
	return n, nil
}

func parseValue(b []byte, key string) (uint64, error) {
	if key == "" {
		return strconv.ParseUint(string(bytes.TrimSpace(b)), 10, 64)
	}
	for line := range bytes.Lines(b) {
		if value, ok := bytes.CutPrefix(line, []byte(key+" ")); ok {
			return strconv.ParseUint(string(bytes.TrimSpace(value)), 10, 64)
		}
	}
	return 0, fmt.Errorf("no %s", key)
}
