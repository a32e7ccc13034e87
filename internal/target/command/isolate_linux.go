package command

import (
	"os/exec"
	"syscall"
)

// isolate makes a command a process group of its own, which Ctrl-C does not reach, and
// which is killed as one.
func isolate(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
}
