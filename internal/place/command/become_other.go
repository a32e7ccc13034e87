//go:build !unix

package command

import (
	"context"
	"errors"
	"os"
	"os/exec"
)

// Become runs a program with this process's files until it ends, and returns its exit code: no process
// can be replaced here.
func Become(ctx context.Context, argv []string) (code int, err error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err = cmd.Run()
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		return exit.ExitCode(), nil
	}
	return 0, err
}
