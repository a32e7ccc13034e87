//go:build linux

package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"

	"slipstream.dev/internal/process"
	"slipstream.dev/internal/traffic"
)

// exitTime limits how long a worker may take to revert and exit after its stream has ended.
const exitTime = 20 * time.Second

var keepProgram = sync.OnceFunc(func() { _ = process.KeepProgram() })

// Spawn starts this program as a worker and connects to it. start runs a command in a place. The worker logs to log. Closing
// the client ends the worker and waits for it.
func Spawn(ctx context.Context, start func(*exec.Cmd) error, log io.Writer) (*Client, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	// Workers release pages of the program that they do not need right now. This process keeps them in memory, so that workers
	// find them again. If it lacks the permission, it does not.
	keepProgram()
	cmd := exec.Command(self, "worker")
	cmd.Stderr = log
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start worker: %w", err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start worker: %w", err)
	}
	if err := start(cmd); err != nil {
		return nil, err
	}
	c, err := Connect(ctx, out, in)
	if err != nil {
		return nil, errors.Join(err, reap(cmd))
	}
	c.reap = func() error { return reap(cmd) }
	// The worker shares this machine's clock, so the offset is zero. A measured offset would be less exact, in particular when
	// a hundred workers start at once.
	c.base, c.mono = traffic.Instant()
	return c, nil
}

// reap waits for a worker whose stream has ended, and kills it after exitTime.
func reap(cmd *exec.Cmd) error {
	timer := time.AfterFunc(exitTime, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("worker, process %d: %w", cmd.Process.Pid, err)
	}
	return nil
}
