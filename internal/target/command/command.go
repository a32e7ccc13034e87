// Package command runs the commands by which an experiment's switches change a target. They
// run where this program runs. It knows no switches, see internal/experiment.
package command

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"runtime"
	"strings"
	"time"
)

// shown is how much of its output an error quotes: the end, where commands say what went wrong.
const shown = 2000

// Run runs a program with arguments, without a shell and without input, and kills it and
// what it started when ctx ends. The error has what the command printed, and is an
// *exec.ExitError if it exited with another code than 0. If this process dies, so does the
// command, on Linux: whoever undoes a change must not meet one that goes on.
func Run(ctx context.Context, argv []string) error {
	// The command dies with the thread that started it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	isolate(cmd)
	cmd.WaitDelay = time.Second // one that it leaves running may hold the pipe
	out, err := cmd.CombinedOutput()
	if err == nil || err == exec.ErrWaitDelay {
		return nil
	}
	text := strings.TrimSpace(string(bytes.ToValidUTF8(out[max(0, len(out)-shown):], nil)))
	if text == "" {
		return fmt.Errorf("%s: %w", strings.Join(argv, " "), err)
	}
	return fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, text)
}
