package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
)

// exitTime is how long a worker may take to put things right and exit once its
// stream has ended.
const exitTime = 20 * time.Second

// Spawn starts this program as a worker, in the place that start puts a command
// in, and connects to it. What the worker logs goes to log. Closing the client
// ends the worker and waits for it.
func Spawn(ctx context.Context, start func(*exec.Cmd) error, log io.Writer) (*Client, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	cmd := exec.Command(self, "worker")
	cmd.Stderr = log
	// Its traffic threads block in the kernel for as long as they like; signals
	// to have them preempted would only interrupt them.
	// There may be a hundred workers on a machine, each with little to do between
	// trials: they keep their heaps small.
	cmd.Env = append(os.Environ(), "GODEBUG=asyncpreemptoff=1", "GOGC=25")
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
