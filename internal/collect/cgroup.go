//go:build linux

package collect

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"slipstream.dev/internal/record"
)

// Limits are the CPU limits of this process: those of its cgroup and of that cgroup's ancestors.
type Limits []limit

// OpenLimits opens the CPU limits of this process. There may be none.
func OpenLimits(o Options) (Limits, error) {
	o = o.withDefaults()
	limits, err := openLimits(o.Proc, o.Cgroup)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open CPU limits: %w", err), limits.Close())
	}
	return limits, nil
}

// Close closes the files.
func (l Limits) Close() error {
	var errs []error
	for _, limit := range l {
		errs = append(errs, limit.stat.file.Close())
	}
	return errors.Join(errs...)
}

// Snapshot reads how often each limit has throttled so far.
func (l Limits) Snapshot() (s Snapshot, err error) {
	for _, limit := range l {
		if err := limit.stat.read(s.parseThrottled); err != nil {
			return s, err
		}
	}
	return s, nil
}

// Warnings returns a warning for each limit that throttled this process between two snapshots.
func (l Limits) Warnings(before, after Snapshot) (out []record.Warning) {
	for i, limit := range l {
		if t := after.throttled[i].since(before.throttled[i]); t.times > 0 {
			out = append(out, record.Warnf(record.WarnThrottled,
				"the CPU limit of cgroup %s throttled it %d times, its threads for %.2g s in total", limit.cgroup, t.times, seconds(int64(t.ns))))
		}
	}
	return out
}

// limit is a cgroup whose CPU limit applies to this process: its own, or an ancestor, such as that of a container's pod.
type limit struct {
	cgroup string // as in /proc/self/cgroup
	stat   *source
}

// throttled counts how often the threads of a cgroup were throttled, and for how many nanoseconds.
type throttled struct{ times, ns uint64 }

func (t throttled) since(b throttled) throttled { return throttled{t.times - b.times, t.ns - b.ns} }

// openLimits opens the cpu.stat files that count throttling, of this process's cgroup and its ancestors, in cgroup v1 and v2.
// If there are none, that is no error.
func openLimits(proc, mount string) (Limits, error) {
	b, err := os.ReadFile(filepath.Join(proc, "self/cgroup"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // a kernel without cgroups
	}
	if err != nil {
		return nil, err
	}
	var limits Limits
	for line := range strings.Lines(string(b)) {
		// The line has the form hierarchy:controllers:path (cgroups(7)), without controllers for v2. Assume systemd's mount
		// points.
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(f) != 3 {
			return limits, fmt.Errorf("parse %s/self/cgroup: %q", proc, line)
		}
		at := filepath.Join(mount, f[1])
		if f[1] == "" {
			if unified := filepath.Join(mount, "unified"); exists(unified) {
				at = unified
			}
		} else if !slices.Contains(strings.Split(f[1], ","), "cpu") {
			continue
		}
		for cgroup := path.Clean("/" + f[2]); ; cgroup = path.Dir(cgroup) {
			stat, err := openSource(filepath.Join(at, cgroup, "cpu.stat"))
			switch {
			case errors.Is(err, fs.ErrNotExist): // above the container's cgroup namespace
			case err != nil:
				return limits, err
			case stat.read(hasThrottled) != nil:
				_ = stat.file.Close()
			default:
				limits = append(limits, limit{cgroup, stat})
			}
			if cgroup == "/" {
				break
			}
		}
	}
	return limits, nil
}

// Throttling counts how often a CPU limit has throttled a cgroup, and for how long, in total of all threads.
type Throttling struct {
	Times uint64
	Time  time.Duration
}

// Throttled returns, by path, the cgroups below a cgroup mount that a CPU limit has throttled so far. It supports v2, and the
// hierarchies of v1 with the CPU controller.
func Throttled(mount string) map[string]Throttling {
	all := make(map[string]Throttling)
	for _, hierarchy := range []string{"unified", "cpu,cpuacct", "cpu", "."} {
		at := filepath.Join(mount, hierarchy)
		if !exists(at) {
			continue
		}
		if hierarchy == "." && !exists(filepath.Join(at, "cgroup.controllers")) { // not v2 but the parent of the hierarchies' mount points
			continue
		}
		readThrottled(at, all)
	}
	return all
}

// readThrottled adds the throttled cgroups below a path. It skips cgroups that it cannot read, or that have just ended.
func readThrottled(at string, all map[string]Throttling) {
	_ = filepath.WalkDir(at, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() != "cpu.stat" {
			return nil
		}
		b, err := os.ReadFile(name)
		var s Snapshot
		if err != nil || s.parseThrottled(b) != nil || s.throttled[0].times == 0 {
			return nil
		}
		cgroup := path.Clean("/" + strings.TrimPrefix(filepath.Dir(name), at))
		all[cgroup] = Throttling{s.throttled[0].times, time.Duration(s.throttled[0].ns)}
		return nil
	})
}

func exists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}

// hasThrottled returns an error for a cgroup without CPU controller.
func hasThrottled(b []byte) error {
	if !bytes.Contains(b, []byte("nr_throttled ")) {
		return errors.New("no nr_throttled")
	}
	return nil
}

// parseThrottled parses the cpu.stat of a cgroup and appends the counts. v2 has throttled_usec, v1 throttled_time in ns.
func (s *Snapshot) parseThrottled(b []byte) error {
	var t throttled
	for line := range bytes.Lines(b) {
		key, value, _ := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		to, unit := &t.ns, uint64(1)
		switch string(key) {
		case "nr_throttled":
			to = &t.times
		case "throttled_time":
		case "throttled_usec":
			unit = 1000
		default:
			continue
		}
		n, err := strconv.ParseUint(string(value), 10, 64)
		if err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		*to = n * unit
	}
	s.throttled = append(s.throttled, t)
	return nil
}
