//go:build unix

package hosts

import (
	"os/exec"
	"syscall"
	"time"
)

// canShare means that several commands can share a connection of ssh.
const canShare = true

// detach makes a command start without a terminal. So neither it nor what it starts, such as the ssh of a jump host, can ask
// anybody, and Ctrl-C does not end it.
func detach(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Env = append(cmd.Environ(), "SSH_ASKPASS_REQUIRE=never")
}

// end ends a command and, if group is set, everything in its process group: the command must be detached.
func end(cmd *exec.Cmd, group bool) {
	if cmd.Process.Signal(syscall.SIGTERM) != nil {
		return // it has ended
	}
	if group {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
	}
	time.AfterFunc(time.Second, func() { _ = cmd.Process.Kill() })
}
