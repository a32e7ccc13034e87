// Package command runs the commands by which an experiment's switches change a target. They
// run where this program runs. It knows no switches, see internal/experiment.
package command

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"slipstream.dev/internal/target"
)

// Run runs a program with arguments, without a shell and without input, and kills it and
// what it started when ctx ends. The error ends with the last of what the command printed, and is an
// *exec.ExitError if it exited with another code than 0. If this process dies, so does the
// command, on Linux: whoever undoes a change must not meet one that goes on.
func Run(ctx context.Context, argv []string) error {
	// The command dies with the thread that started it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	isolate(cmd)
	cmd.WaitDelay = time.Second // one that it leaves running may hold the pipe
	var out target.Tail         // commands say at the end what went wrong
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	if err == nil || err == exec.ErrWaitDelay {
		return nil
	}
	return fmt.Errorf("%s: %w%s", strings.Join(argv, " "), err, out.Last())
}

// Find finds a program beside this one, or else in PATH.
func Find(name string) (string, error) {
	if self, err := os.Executable(); err == nil {
		if path, err := exec.LookPath(filepath.Join(filepath.Dir(self), name)); err == nil {
			return path, nil
		}
	}
	return exec.LookPath(name)
}
