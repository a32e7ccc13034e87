package command

import (
	"os/exec"
	"syscall"
)

// isolate puts a command into a process group of its own, which Ctrl-C does not
// reach.
func isolate(cmd *exec.Cmd) (release func(), err error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{CreationFlags: syscall.CREATE_NEW_PROCESS_GROUP}
	return func() {}, nil
}
