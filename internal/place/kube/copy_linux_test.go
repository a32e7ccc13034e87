package kube

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"slipstream.dev/internal/testenv"
)

// TestAwait: the first process becomes the program once that is there, and ends at SIGTERM before. As in a container it is the first of a
// PID namespace, which ignores a signal that it does not handle.
func TestAwait(t *testing.T) {
	testenv.NeedRoot(t)
	for _, shell := range needShells(t) {
		for _, arrives := range []bool{true, false} {
			file := filepath.Join(t.TempDir(), "slipstream")
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			// Its output shows that it handles SIGTERM.
			script := strings.Replace(await[2], "; ", "; echo awaits; ", 1)
			cmd := exec.CommandContext(ctx, shell[0], append(shell[1:], "-c", script, file, "worker", "--hold")...)
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			first := make([]byte, len("awaits\n"))
			if _, err := io.ReadFull(out, first); err != nil {
				t.Fatal(err)
			}
			want := ""
			if arrives {
				want = "ran worker --hold\n"
				if err := errors.Join(os.WriteFile(file+".new", []byte("#!/bin/sh\necho ran $*\n"), 0o700), os.Rename(file+".new", file)); err != nil {
					t.Fatal(err)
				}
			} else if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			got, _ := io.ReadAll(out)
			if err := cmd.Wait(); err != nil && arrives || ctx.Err() != nil || string(got) != want {
				t.Errorf("%s: %q, %v, want %q", shell, got, err, want)
			}
		}
	}
}
