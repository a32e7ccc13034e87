package worker

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"syscall"
	"time"

	"slipstream.dev/internal/collect"
	"slipstream.dev/internal/traffic/tools"
)

// runs returns an error that says why this operating system cannot run a tool, or nil.
func runs(string) error { return nil }

func congestionControls(port uint16, remote bool) ([]string, error) {
	return collect.CongestionControl(port, remote)
}

// spawn starts the process. An application may fork, so it gets a PID namespace, whose processes all end with the first one,
// and an IPC namespace, with which its shared memory disappears. It runs as nobody, if this process may change its user.
func (t *toolEnd) spawn(ctx context.Context) (*exec.Cmd, error) {
	program := tools.Find(os.Getenv("PATH"), t.argv[0])
	if program == "" {
		return nil, exec.ErrNotFound
	}
	start := func(change func(*syscall.SysProcAttr)) (*exec.Cmd, error) {
		cmd := exec.CommandContext(ctx, program, t.argv[1:]...)
		cmd.Stdout, cmd.Stderr = t.output, t.output
		cmd.WaitDelay = time.Second // a grandchild may hold the pipe
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if t.home != nil {
			cmd.Dir = t.home.path()
			cmd.SysProcAttr.Setpgid = true
			cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
		}
		change(cmd.SysProcAttr)
		return cmd, cmd.Start()
	}
	asThis := func(*syscall.SysProcAttr) {}
	if t.home == nil || os.Geteuid() != 0 {
		return start(asThis)
	}
	asNobody := func(a *syscall.SysProcAttr) { a.Credential = &syscall.Credential{Uid: nobody, Gid: nobody} }
	cmd, err := start(func(a *syscall.SysProcAttr) {
		asNobody(a)
		a.Cloneflags = syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC
	})
	for _, less := range []func(*syscall.SysProcAttr){asNobody, asThis} { // root in a container may lack the capabilities
		if !errors.Is(err, syscall.EPERM) {
			break
		}
		cmd, err = start(less)
	}
	return cmd, err
}
