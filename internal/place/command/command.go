// Package command runs the commands by which an experiment's switches change a target. They
// run where this program runs. It knows no switches, see internal/experiment.
package command

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"slipstream.dev/internal/place"
)

// Run runs a program with arguments, without a shell and without input, and kills it and what it started when ctx
// ends. The error ends with the last of what the command printed, and is an *exec.ExitError if it exited with
// another code than 0. If this process dies, so do the command and what it started, except on Windows: a change must
// not continue while somebody undoes it.
func Run(ctx context.Context, argv []string) error { return run(ctx, 0, argv) }

// Interrupt is Run for a program that cleans up when it is interrupted. When ctx ends it interrupts the program, and
// kills it if it still runs after grace.
func Interrupt(ctx context.Context, grace time.Duration, argv []string) error {
	return run(ctx, grace, argv)
}

func run(ctx context.Context, grace time.Duration, argv []string) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	release, err := isolate(cmd)
	if err != nil {
		return fmt.Errorf("%s: %w", strings.Join(argv, " "), err)
	}
	defer release()
	cmd.WaitDelay = time.Second // a process that it leaves running may hold the pipe
	kill := cmd.Cancel
	if grace > 0 {
		cmd.WaitDelay, cmd.Cancel = grace, func() error {
			if cmd.Process.Signal(os.Interrupt) != nil { // as on Windows
				return kill()
			}
			return nil
		}
	}
	var out place.Tail // commands say at the end what went wrong
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	if grace > 0 && ctx.Err() != nil {
		_ = kill() // what it has left running
	}
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
