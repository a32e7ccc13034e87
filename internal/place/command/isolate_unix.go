//go:build unix

package command

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
)

// isolate puts a command into a process group of its own, which Ctrl-C does not reach, and which is killed as a
// whole. A guard leads the group. It waits for the end of a pipe that only this process holds, so it kills the
// group if this process dies. release ends only the guard: what the command has left running continues.
func isolate(cmd *exec.Cmd) (release func(), err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("guard the command: %w", err)
	}
	guard := exec.Command("/bin/sh", "-c", "read end; kill -KILL -$$")
	guard.Stdin, guard.SysProcAttr = r, &syscall.SysProcAttr{Setpgid: true}
	err = guard.Start()
	r.Close()
	if err != nil {
		w.Close()
		return nil, fmt.Errorf("guard the command: %w", err)
	}
	group := guard.Process.Pid
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pgid: group}
	cmd.Cancel = func() error { return syscall.Kill(-group, syscall.SIGKILL) }
	return func() {
		_ = guard.Process.Kill() // the group may have been killed as a whole
		_ = guard.Wait()
		w.Close()
	}, nil
}
