package cli

import (
	"errors"
	"fmt"
	"path/filepath"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report"
	"slipstream.dev/internal/stats"
)

func compareCommand(p Process) *cobra.Command {
	var gate bool
	c := &cobra.Command{
		Use:   "compare DIR DIR",
		Short: "Tell how a second run differs from a first, cell by cell",
		Long: `Tell how a second run differs from a first, cell by cell. With --gate the exit
code is 3 where a primary metric is slower, 4 where one cannot be told, else 0.`,
		Args: cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			var results [2]stats.Result
			for i, path := range args {
				dir, err := record.Open(path)
				if err != nil {
					return usage(err)
				}
				exp, trials, err := readExperiment(dir)
				if err != nil {
					return err
				}
				results[i] = stats.Result{Name: filepath.Base(dir.Path), Experiment: exp, Trials: trials}
			}
			comparison, err := stats.Compare(results[0], results[1])
			if err != nil {
				return err
			}
			tw := tabwriter.NewWriter(p.Out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(tw, "VARIANT\tWORKLOAD\tPAIRS\tMETRIC\tBEFORE\tAFTER\tRATIO\tVERDICT")
			for _, row := range comparison.Changes {
				if !row.Primary || row.Versus == nil {
					continue
				}
				fmt.Fprintf(tw, "%s\t%s\t%d\t%s\t%s\t%s\t%.3f (%.3f–%.3f)\t%s\n", report.PlainLine(row.Variant), report.PlainLine(row.Workload), row.Pairs, row.Metric,
					report.Quantity(row.Before, row.Metric), report.Quantity(row.Mean, row.Metric),
					row.Versus.Ratio, row.Versus.CI95[0], row.Versus.CI95[1], row.Versus.Verdict)
			}
			if err := tw.Flush(); err != nil {
				return err
			}
			for _, missing := range comparison.Missing {
				fmt.Fprintln(p.Out, "missing:", report.PlainLine(missing))
			}
			if !gate {
				return nil
			}
			switch comparison.Gate {
			case stats.GateSlower:
				return exitError{code: exitSlower, err: errors.New("gate: the second run is slower")}
			case stats.GateUnclear:
				return exitError{code: exitUnclear, err: errors.New("gate: the runs are too few or too noisy to tell")}
			}
			return nil
		},
	}
	c.Flags().BoolVar(&gate, "gate", false, "exit with 3 where the second run is slower, 4 where it cannot be told")
	return c
}
