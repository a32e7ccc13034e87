package cli

import (
	"context"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/traffic"
	"slipstream.dev/internal/worker"
)

// journalDir keeps what accelerators changed. It is on a file system that a
// restart of the machine clears, as it clears the settings.
const journalDir = "/run/slipstream/journal"

func workerCommand(p Process) *cobra.Command {
	return &cobra.Command{
		Use:    "worker",
		Short:  "Act in this place for a controller (what targets start; not for people)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := traffic.QuietRuntime(); err != nil {
				return err
			}
			// A worker whose controller died must not die of telling it: it has
			// things to put right. Go ends a process that writes to a closed
			// standard output unless told otherwise.
			signal.Ignore(syscall.SIGPIPE)
			// Ctrl-C in a terminal reaches the controller's whole process group;
			// a worker ends when its stream does, after it has put things right.
			return worker.Serve(context.WithoutCancel(c.Context()), p.In, p.Out, worker.Options{JournalDir: journalDir, Log: newLog(p)})
		},
	}
}
