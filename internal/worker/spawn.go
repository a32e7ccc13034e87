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

// exitTime is how long a worker may take to put things right and exit once its
// stream has ended.
const exitTime = 20 * time.Second

var keepProgram = sync.OnceFunc(func() { _ = process.KeepProgram() })

// Spawn starts this program as a worker, in the place that start puts a command
// in, and connects to it. What the worker logs goes to log. Closing the client
// ends the worker and waits for it.
func Spawn(ctx context.Context, start func(*exec.Cmd) error, log io.Writer) (*Client, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	// Workers give back what of the program they do not need at once, and find it again here.
	// Who may not keep it does without.
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
	// It runs on this machine, by this machine's clock: what was found by asking
	// is off by what the answers took, and a hundred workers that start at once
	// take their time.
	c.base, c.mono = traffic.Instant()
	return c, nil
}

// reap waits for a worker whose stream has ended, and kills it in the end.
func reap(cmd *exec.Cmd) error {
	timer := time.AfterFunc(exitTime, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("worker, process %d: %w", cmd.Process.Pid, err)
	}
	return nil
}
