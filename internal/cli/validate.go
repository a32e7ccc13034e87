package cli

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/spec"
)

func validateCommand(p Process) *cobra.Command {
	var format outputFormat
	c := &cobra.Command{
		Use:   "validate FILE|PRESET|-...",
		Short: "Check experiment files, and run nothing",
		Long: `Check experiment files as slipstream run does before it starts, and run nothing.
Every problem is printed with its line, its column and the field. The exit code
is 1 if any file has one.`,
		Example: `  slipstream validate my.yaml
  slipstream validate experiments/*.yaml
  slipstream preset demo | slipstream validate -`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, files []string) error {
			checked := make([]validated, len(files))
			var errs []error
			for i, file := range files {
				err := validate(file, p.Stdin)
				checked[i] = validated{File: file, Valid: err == nil, Problems: problemsOf(err)}
				errs = append(errs, err)
				if err == nil && format == asText {
					fmt.Fprintf(p.Out, "%s: valid\n", file)
				}
			}
			if format == asText {
				return errors.Join(errs...)
			}
			if err := writeJSON(p.Out, checked); err != nil {
				return err
			}
			if errors.Join(errs...) != nil {
				return exitError{code: exitFailed}
			}
			return nil
		},
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return []string{"yaml", "yml"}, cobra.ShellCompDirectiveFilterFileExt
		},
	}
	format.addFlag(c.Flags())
	return c
}

// validated is an element of validate's JSON.
type validated struct {
	File     string    `json:"file"`
	Valid    bool      `json:"valid"`
	Problems []problem `json:"problems,omitempty"`
}

// problem is a problem of a file. Line and Column count from 1, and are 0 if the file cannot be read.
type problem struct {
	Line    int    `json:"line,omitempty"`
	Column  int    `json:"column,omitempty"`
	Field   string `json:"field,omitempty"`
	Message string `json:"message"`
}

func problemsOf(err error) []problem {
	var found spec.Errors
	if err == nil {
		return nil
	}
	if !errors.As(err, &found) {
		return []problem{{Message: err.Error()}}
	}
	all := make([]problem, len(found))
	for i, e := range found {
		all[i] = problem{e.Line, e.Column, e.Field, e.Problem}
	}
	return all
}

func validate(file string, stdin io.Reader) error {
	data, err := readSource(file, stdin)
	if err != nil {
		return err
	}
	_, err = parseWith(sourceName(file), data, nil)
	return err
}
