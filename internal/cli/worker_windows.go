package cli

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/place/hosts"
	"slipstream.dev/internal/process"
	"slipstream.dev/internal/worker"
)

// workerCommands returns the command worker. On Windows it only makes traffic.
func workerCommands(p Process) []*cobra.Command {
	var hold, remote bool
	var claim string
	c := &cobra.Command{
		Use:    "worker",
		Short:  "Make traffic for a controller (started by targets)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			process.CollectAtRest()
			if hold {
				<-c.Context().Done() // a container ends with the processes in it
				return nil
			}
			if claim != "" {
				run, who, _ := strings.Cut(claim, "/")
				if err := worker.Claim(run, who, func() {
					// The worker has nothing to revert, and the tools' processes end with it. It does not
					// close the input, because that would wait for the pending read.
					fmt.Fprintln(p.Err, "slipstream: the run goes on with another worker")
					os.Exit(exitFailed)
				}); err != nil {
					return err
				}
				if err := hosts.Sweep(); err != nil {
					return err
				}
			}
			return worker.Serve(context.WithoutCancel(c.Context()), p.Stdin, p.Stdout, worker.Options{Log: newLog(p), Remote: remote})
		},
	}
	c.Flags().BoolVar(&hold, "hold", false, "keep the container running until it is stopped")
	c.Flags().BoolVar(&remote, "remote", false, "end if the controller, on another machine, is silent")
	c.Flags().StringVar(&claim, "claim", "", "be the only run on this host: RUN/WHO")
	return []*cobra.Command{c}
}
