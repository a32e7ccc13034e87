package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/place/command"
)

// azureProgram implements the commands of slipstream azure. Azure's SDK is in a program of its own, so that
// agents and workers do without it.
const azureProgram = "slipstream-azure"

func azureCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "azure",
		Short: "Audit and switch Azure's Accelerated Networking (" + azureProgram + ")",
		// The program itself knows its flags, and prints its own help.
		DisableFlagParsing: true,
		RunE: func(c *cobra.Command, args []string) error {
			path, err := command.Find(azureProgram)
			if err != nil {
				return usage(fmt.Errorf("there is no program %s beside slipstream or in PATH: install it, or build it with make build", azureProgram))
			}
			code, err := command.Become(c.Context(), append([]string{path}, args...))
			if err != nil {
				return fmt.Errorf("run %s: %w", path, err)
			}
			if code != exitGood {
				return exitError{code: code}
			}
			return nil
		},
	}
}
