//go:build unix

package command

import (
	"context"
	"os"
	"syscall"
)

// Become replaces this process by a program, and returns only if that fails.
func Become(_ context.Context, argv []string) (code int, err error) {
	return 0, syscall.Exec(argv[0], argv, os.Environ())
}
