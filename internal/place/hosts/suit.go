package hosts

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"slipstream.dev/internal/place/build"
	"slipstream.dev/internal/words"
)

// choose drops the folders without room for a program.
func (f *facts) choose(size int64) {
	f.folders = slices.DeleteFunc(f.folders, func(folder string) bool {
		room, known := f.room[folder]
		if !known || room >= size {
			return false
		}
		f.others = append(f.others, fmt.Sprintf("%s has %d MiB free, and the program needs %d", folder, room>>20, size>>20+1))
		return true
	})
}

// The least hard limits with which a worker runs. Go reserves address space, which takes no memory.
const (
	leastAddresses = 4 << 20 // in KiB
	leastFiles     = 256
)

// The minimum for three workers, as many as a run with one pair has on a host, while no traffic flows: memory in addition to
// the copy of the program, which most folders keep in memory too, and threads.
const (
	leastMemory = 48 << 20
	leastTasks  = 60
)

// tooSmall names the first limit of the user's control groups that is too low for the workers of a run, with a program of a size: "memory.max"
// is of version 2 of control groups, "memory.limit_in_bytes" of version 1.
func (f *facts) tooSmall(size int64) string {
	for _, l := range []struct {
		file, what, unit, field string
		least                   int64
		per                     int64
	}{
		{"memory.max", "memory", " MiB", "MemoryMax", size + leastMemory, 1 << 20},
		{"memory.limit_in_bytes", "memory", " MiB", "MemoryLimit", size + leastMemory, 1 << 20},
		{"pids.max", "processes and threads", "", "TasksMax", leastTasks, 1},
	} {
		if n, limited := f.limits[l.file]; limited && n < l.least {
			return fmt.Sprintf("%s to %d%s (%s of a control group), and a run needs %d there: raise %s of the systemd unit, or the limit of the container",
				l.what, n/l.per, l.unit, l.file, l.least/l.per, l.field)
		}
	}
	return ""
}

// tooLow describes the first of the user's limits that is too low for a program of this size, or returns "".
func (f *facts) tooLow(size int64) string {
	for _, l := range []struct {
		option, what, unit, field string
		least                     int64
	}{
		{"f", "the size of files", " blocks of 512 bytes", "fsize", (size + 511) / 512},
		{"v", "the addresses of a process", " KiB", "as", leastAddresses},
		{"n", "open files", "", "nofile", leastFiles},
	} {
		if n, limited := f.limits[l.option]; limited && n < l.least {
			return fmt.Sprintf("%s to %d%s (ulimit -%s), and a worker needs %d: raise %s in /etc/security/limits.conf there", l.what, n, l.unit, l.option, l.least, l.field)
		}
	}
	return ""
}

// sudoRefusals maps error messages of sudo to what they mean and what to do.
var sudoRefusals = []struct {
	said          *regexp.Regexp
	means, remedy string
}{
	{regexp.MustCompile(`must have a tty`), "sudo there refuses commands without a terminal", "exempt the user (Defaults:USER !requiretty in sudoers)"},
	{regexp.MustCompile(`a password is required|interactive authentication is required`), "sudo there wants a password from the user, or lets the user do nothing", "allow it without one (USER ALL=(ALL) NOPASSWD: ALL in sudoers)"},
	{regexp.MustCompile(`Permission denied`), "sudo there lets no command start another (NOEXEC)", "allow it (USER ALL=(ALL) NOPASSWD: EXEC: ALL in sudoers)"},
	{regexp.MustCompile(`not allowed to|not in the sudoers|may not run sudo`), "sudo there does not let the user run every command", "allow them all (USER ALL=(ALL) NOPASSWD: ALL in sudoers)"},
}

// noRoot says why the user cannot become root, and what to do.
func (f *facts) noRoot() string {
	if f.noSudo {
		return "the user there is not root, and there is no sudo: install it and allow it without a password"
	}
	for _, r := range sudoRefusals {
		if r.said.MatchString(f.refused) {
			return r.means + ": " + r.remedy
		}
	}
	return fmt.Sprintf("sudo there fails (%s): repair it", cmp.Or(f.refused, "it says nothing"))
}

// suit returns the build for a host, or why the host cannot take part in the run.
func (h *host) suit() (build.Build, error) {
	f, root, config := h.facts, h.root(), h.all.config
	b, err := fitting(h.all.builds, f.name, f.system)
	switch {
	case h.windows && config.ReadOnly:
		return b, fmt.Errorf("host %s runs Windows, and doctor looks at Linux machines: leave it out", f.name)
	case h.windows && root != "":
		return b, fmt.Errorf("host %s runs Windows, and %s needs Linux: leave that out, or select other hosts by their labels", f.name, root)
	case h.windows && config.Linux[f.name] != "":
		return b, fmt.Errorf("host %s runs Windows, and %s needs Linux: leave that out, or select other hosts by their labels", f.name, config.Linux[f.name])
	case !h.windows && config.Windows[f.name] != "":
		return b, fmt.Errorf("host %s does not run Windows, and %s needs it: leave that out, or select other hosts by their labels", f.name, config.Windows[f.name])
	case err != nil:
		return b, err
	case len(f.lacks) > 0:
		return b, fmt.Errorf("host %s lacks %s, which the copy of the program needs: install it (package coreutils)", f.name, words.And(f.lacks))
	}
	h.facts.choose(b.Size)
	low := cmp.Or(f.tooLow(b.Size), f.tooSmall(b.Size))
	switch {
	case low != "":
		return b, fmt.Errorf("host %s limits %s", f.name, low)
	case len(h.facts.folders) == 0:
		return b, fmt.Errorf("host %s has no folder in which the program can run: %s. Free some space, or give the user a home or /run/user folder that runs programs", f.name, strings.Join(h.facts.others, ", "))
	case root != "" && f.user != "0" && !f.sudo:
		return b, fmt.Errorf("host %s: %s needs root, and %s, log in as root, or leave that out", f.name, root, f.noRoot())
	}
	return b, nil
}

// twin returns an error if an earlier host is the same machine: traffic between the two would not leave it, and each worker
// would take the other for one of a lost connection.
func (h *host) twin() error {
	for _, other := range h.all.hosts {
		if other == h {
			return nil
		}
		if h.facts.machine != "" && other.facts.machine == h.facts.machine {
			boot, _, _ := strings.Cut(h.facts.machine, " ")
			id := "boot ID " + boot
			if h.windows {
				id = "computer name " + h.facts.computer
			}
			return refusedError{fmt.Errorf("hosts %s and %s are one machine by two names (%s and %s; %s): name two machines", other.name, h.name, other.facts.address, h.facts.address, id)}
		}
	}
	return nil
}
