//go:build unix

package hosts

import (
	"os/exec"
	"syscall"
	"time"
)

// canShare: several commands can share a connection of ssh.
const canShare = true

// detach starts a command without a terminal. So it asks nobody, nor do the commands that it starts, such as the ssh of a
// jump host, and the keys that interrupt this program do not end it.
func detach(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Env = append(cmd.Environ(), "SSH_ASKPASS_REQUIRE=never")
}

// end ends a command, with what it has started if group is set: the command is detached.
func end(cmd *exec.Cmd, group bool) {
	if cmd.Process.Signal(syscall.SIGTERM) != nil {
		return // it has ended
	}
	if group {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
	}
	time.AfterFunc(time.Second, func() { _ = cmd.Process.Kill() })
}
