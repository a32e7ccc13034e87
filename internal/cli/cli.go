// Package cli is the command line: one file a verb. It wires targets, workers,
// accelerators, statistics and reports together, which know nothing of one
// another; it decides nothing that they could.
package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/report"
)

// Exit codes.
const (
	exitGood   = 0
	exitFailed = 1
	exitUsage  = 2
	// exitSlower and exitUnclear are the gate's: it is slower, it cannot tell.
	exitSlower  = 3
	exitUnclear = 4
)

// Process is what the command line has of its process.
type Process struct {
	Args    []string
	Version string
	// Hurry is closed when the user asks a second time to stop.
	Hurry        <-chan struct{}
	In, Out, Err *os.File
}

// Main runs the command line and returns the exit code.
func Main(ctx context.Context, p Process) int {
	if err := begin(); err != nil {
		return tell(p, err)
	}
	return execute(ctx, p)
}

func execute(ctx context.Context, p Process) int {
	root := rootCommand(p)
	root.SetArgs(p.Args[1:])
	return tell(p, root.ExecuteContext(ctx))
}

// tell says what went wrong, and returns the exit code.
func tell(p Process, err error) int {
	if err == nil {
		return exitGood
	}
	var exit exitError
	if !errors.As(err, &exit) {
		exit = exitError{code: exitFailed, err: err}
	}
	if exit.err != nil {
		fmt.Fprintln(p.Err, "slipstream:", strings.ReplaceAll(report.Plain(exit.err.Error()), "\n", "\nslipstream: "))
	}
	return exit.code
}

// exitError is an error with an exit code of its own.
type exitError struct {
	code int
	err  error
}

func (e exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e exitError) Unwrap() error { return e.err }

// usage makes an error one of usage: nothing was touched.
func usage(err error) error {
	if err == nil {
		return nil
	}
	return exitError{code: exitUsage, err: err}
}

func rootCommand(p Process) *cobra.Command {
	root := &cobra.Command{
		Use:   "slipstream",
		Short: "Measure what a container network costs, and prove what makes it faster",
		Long: `slipstream measures what a container network costs against the raw network
under it, applies accelerations, and proves with interleaved runs and
confidence intervals which of them help.

Start with: slipstream run demo   (as root; it makes its own lab and removes it)`,
		Version:       p.Version,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	if strings.HasPrefix(filepath.Base(p.Args[0]), "kubectl-") {
		// kubectl runs it as a plugin, by the name that people typed.
		root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl slipstream"}
	}
	// Without a function of its own cobra prints help for an unknown verb, or
	// fails with an error that cannot be told from a run's.
	root.Args = cobra.NoArgs
	root.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
	root.SetIn(p.In)
	root.SetOut(p.Out)
	root.SetErr(p.Err)
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usage(fmt.Errorf("%w (see %s --help)", err, c.CommandPath()))
	})
	root.AddCommand(runCommand(p), reportCommand(p), compareCommand(p), policyCommand(p), cleanupCommand(p))
	root.AddCommand(linuxCommands(p)...)
	usageOfArgs(root)
	return root
}

// usageOfArgs makes a wrong number of arguments an error of usage.
func usageOfArgs(c *cobra.Command) {
	if check := c.Args; check != nil {
		c.Args = func(c *cobra.Command, args []string) error {
			if err := check(c, args); err != nil {
				return usage(fmt.Errorf("%w (see %s --help)", err, c.CommandPath()))
			}
			return nil
		}
	}
	for _, sub := range c.Commands() {
		usageOfArgs(sub)
	}
}

// newLog is where the program speaks of itself: warnings and worse, to stderr.
func newLog(p Process) *slog.Logger {
	return slog.New(slog.NewTextHandler(p.Err, &slog.HandlerOptions{Level: slog.LevelWarn}))
}
