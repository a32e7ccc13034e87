package hosts

import (
	"os/exec"
	"syscall"

	"golang.org/x/sys/windows"
)

// canShare is false because the ssh of Windows has no control sockets.
const canShare = false

// detach makes a command start without a console. So neither it nor what it starts, such as the ssh of a jump host, can ask
// anybody, and Ctrl-C does not end it.
func detach(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{CreationFlags: windows.CREATE_NO_WINDOW}
	cmd.Env = append(cmd.Environ(), "SSH_ASKPASS_REQUIRE=never")
}

// end ends a command. What it has started ends with its input.
func end(cmd *exec.Cmd, _ bool) { _ = cmd.Process.Kill() }
