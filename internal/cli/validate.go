package cli

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/spec"
)

func validateCommand(p Process) *cobra.Command {
	return &cobra.Command{
		Use:   "validate FILE...",
		Short: "Check experiment files, and run nothing",
		Long: `Check experiment files as slipstream run does before it starts, and run nothing.
Every problem is printed with its line, its column and the field. The exit code is
1 if any file has one.`,
		Example: `  slipstream validate my.yaml
  slipstream validate experiments/*.yaml`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, files []string) error {
			var problems []error
			for _, file := range files {
				if err := validate(file); err != nil {
					problems = append(problems, err)
					continue
				}
				fmt.Fprintf(p.Out, "%s: valid\n", file)
			}
			return errors.Join(problems...)
		},
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return []string{"yaml", "yml"}, cobra.ShellCompDirectiveFilterFileExt
		},
	}
}

func validate(file string) error {
	data, err := spec.ReadFile(file)
	if err != nil {
		return err
	}
	_, err = parseWith(file, data, nil)
	return err
}
