package hosts

import (
	"os/exec"
	"syscall"

	"golang.org/x/sys/windows"
)

// canShare: Windows' ssh has no control sockets.
const canShare = false

// detach starts a command without a console. So it asks nobody, nor do the commands that it starts, such as the ssh of a
// jump host, and the keys that interrupt this program do not end it.
func detach(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{CreationFlags: windows.CREATE_NO_WINDOW}
	cmd.Env = append(cmd.Environ(), "SSH_ASKPASS_REQUIRE=never")
}

// end ends a command. What it has started ends with its input.
func end(cmd *exec.Cmd, _ bool) { _ = cmd.Process.Kill() }
