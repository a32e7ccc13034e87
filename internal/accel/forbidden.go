package accel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// rights lists the capabilities that accelerators need. CAP_SYS_ADMIN includes CAP_BPF and CAP_PERFMON.
var rights = []struct {
	number int
	name   string
}{
	{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN"},
	{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"},
	{unix.CAP_NET_RAW, "CAP_NET_RAW"},
	{unix.CAP_SYS_PTRACE, "CAP_SYS_PTRACE"},
	{unix.CAP_DAC_OVERRIDE, "CAP_DAC_OVERRIDE"},
}

// Forbidden explains a permission error: why the kernel probably refused, and what to do. It returns other errors, and errors
// that already have an explanation, unchanged.
func Forbidden(err error) error {
	return explain(err, "/proc/thread-self/status", "/sys/kernel/security/lockdown")
}

// errForbidden is a permission error with its explanation.
type errForbidden struct {
	error
	why string
}

func (e errForbidden) Error() string { return e.error.Error() + ": " + e.why }
func (e errForbidden) Unwrap() error { return e.error }

func explain(err error, status, lockdown string) error {
	if !errors.Is(err, fs.ErrPermission) { // EPERM and EACCES
		return err
	}
	if errors.As(err, new(errForbidden)) {
		return err
	}
	text, readErr := os.ReadFile(status)
	if readErr != nil {
		return err
	}
	lacks := Lacks(string(text))
	if len(lacks) > 0 {
		return errForbidden{err, fmt.Sprintf("this process lacks %s: run it as root and give it that (a container's securityContext.capabilities.add, a service's CapabilityBoundingSet)",
			strings.Join(lacks, " and "))}
	}
	why := []string{"this process has the capabilities for it, so something else forbids it"}
	if _, filtered := parseStatus(string(text)); filtered {
		why = append(why, "a seccomp filter is on it, which has to permit bpf, fsopen, fsconfig, fsmount, fspick, setns and unshare, as RuntimeDefault does for a container with CAP_SYS_ADMIN")
	}
	if mode, err := os.ReadFile(lockdown); err == nil && strings.Contains(string(mode), "[confidentiality]") {
		why = append(why, "the kernel is locked down (lockdown=confidentiality), which forbids eBPF programs that read the kernel: boot with lockdown=integrity or without")
	}
	if len(why) == 1 {
		why = append(why, "look in the kernel's log for AppArmor or SELinux")
	}
	return errForbidden{err, strings.Join(why, "; ")}
}

// Lacks returns the capabilities that a process would need to apply accelerators but lacks. status is the text of its
// /proc/PID/status.
func Lacks(status string) (names []string) {
	effective, _ := parseStatus(status)
	for _, r := range rights {
		if effective&(1<<r.number) == 0 {
			names = append(names, r.name)
		}
	}
	return names
}

// parseStatus returns the effective capabilities, and whether a seccomp filter is active, from the
// text of /proc/PID/status (proc_pid_status(5)).
func parseStatus(text string) (effective uint64, filtered bool) {
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch key {
		case "CapEff":
			effective, _ = strconv.ParseUint(value, 16, 64)
		case "Seccomp":
			filtered = value == "2"
		}
	}
	return effective, filtered
}
