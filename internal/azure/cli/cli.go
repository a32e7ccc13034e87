// Package cli is the command line of slipstream-azure, one file per command. It connects internal/azure
// and internal/azure/cluster.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/azure"
	"slipstream.dev/internal/azure/cluster"
	"slipstream.dev/internal/plain"
)

// Exit codes, the same as slipstream's.
const (
	exitGood       = 0
	exitFailed     = 1
	exitUsage      = 2
	exitFound      = 3
	exitIncomplete = 4
)

// Process holds what the command line uses of its process, and its connections to the outside.
type Process struct {
	Args     []string
	Version  string
	Out, Err io.Writer
	// Azure connects to Azure; nil means azure.Open.
	Azure func(azure.Options) (*azure.Cloud, error)
	// Cluster connects to a cluster, given the path of a kubeconfig and the name of a context; nil means
	// cluster.Open.
	Cluster func(path, name string) (*cluster.Cluster, error)
}

// Main runs the command line and returns the exit code.
func Main(ctx context.Context, p Process) int {
	p.Out, p.Err = plain.Writer(p.Out), plain.Writer(p.Err)
	root := rootCommand(p)
	root.SetArgs(p.Args[1:])
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitGood
	}
	exit := exitError{code: exitFailed, err: err}
	errors.As(err, &exit)
	if exit.err != nil {
		fmt.Fprintln(p.Err, "slipstream:", strings.ReplaceAll(exit.err.Error(), "\n", "\nslipstream: "))
	}
	return exit.code
}

// exitError is an error with its own exit code.
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

// usage marks an error as a usage error: nothing has been changed yet.
func usage(err error) error { return exitError{code: exitUsage, err: err} }

// Command returns the tree of all commands, for the reference documentation.
func Command() *cobra.Command { return rootCommand(Process{}) }

func rootCommand(p Process) *cobra.Command {
	root := &cobra.Command{
		Use:   "azure",
		Short: "Audit Accelerated Networking in Azure, and switch it",
		Long: `Read from Azure's control plane where Accelerated Networking is possible and
wanted, and switch it.

These commands are in a separate program, slipstream-azure: install it in the folder of
slipstream or in PATH. It takes credentials from the environment, a managed identity or
the Azure CLI (az login).`,
		Version:       p.Version,
		SilenceErrors: true,
		SilenceUsage:  true,
		// Users run it under this name.
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: "slipstream azure"},
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usage(fmt.Errorf("there is no command %q (see slipstream azure --help)", args[0]))
			}
			return nil
		},
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.CompletionOptions.DisableDefaultCmd = true
	root.SetHelpCommand(&cobra.Command{Hidden: true})
	root.SetOut(p.Out)
	root.SetErr(p.Err)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usage(fmt.Errorf("%w (see %s --help)", err, c.CommandPath()))
	})
	root.AddCommand(auditCommand(p), switchCommand(p, "enable", true), switchCommand(p, "disable", false), migrateCommand(p))
	for _, c := range root.Commands() {
		check := c.Args
		c.Args = func(c *cobra.Command, args []string) error {
			if err := check(c, args); err != nil {
				return usage(fmt.Errorf("%w: %s (see %s --help)", err, c.UseLine(), c.CommandPath()))
			}
			return nil
		}
	}
	return root
}

// subscriptionFlag holds the subscriptions that a command may query.
type subscriptionFlag struct{ ids []string }

func (f *subscriptionFlag) add(c *cobra.Command) {
	c.Flags().StringSliceVar(&f.ids, "subscription", nil, "subscription ID; repeat for several (default $AZURE_SUBSCRIPTION_ID)")
}

func (f *subscriptionFlag) open(p Process) (*azure.Cloud, error) {
	ids := f.ids
	if id := os.Getenv("AZURE_SUBSCRIPTION_ID"); len(ids) == 0 && id != "" {
		ids = []string{id}
	}
	connect := p.Azure
	if connect == nil {
		connect = azure.Open
	}
	cloud, err := connect(azure.Options{Subscriptions: ids})
	if err != nil {
		return nil, usage(err)
	}
	return cloud, nil
}
