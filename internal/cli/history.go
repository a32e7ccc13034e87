package cli

import (
	"cmp"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/history"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/report"
	"slipstream.dev/internal/spec"
)

// historyOptions are the flags of history.
type historyOptions struct {
	experiment, since string
	match             []string
	limit             int
	format            outputFormat
}

func historyCommand(p Process) *cobra.Command {
	var o historyOptions
	c := &cobra.Command{
		Use:   "history [DIR]",
		Short: "List the results in a folder, newest first",
		Long: `List the results in a folder, newest first: when each began, whether it is
complete, what it proved, and the machine. DIR is results by default. Only
folders with the name that run and import give them, NAME-TIMESTAMP, are
results.`,
		Example: `  slipstream history
  slipstream history --experiment demo --since 30d
  slipstream history --match slower --match 6.12     by verdict, and by kernel, CPU, NIC or version`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error { return o.run(p, args) },
	}
	f := c.Flags()
	f.StringVar(&o.experiment, "experiment", "", "only results of this experiment")
	f.StringVar(&o.since, "since", "", "only results that began since a day (2026-01-31) or within a time (30d, 12h)")
	f.StringArrayVar(&o.match, "match", nil, "only results with this text in their name, state, verdicts or environment")
	f.IntVar(&o.limit, "limit", 25, "at most this many results")
	o.format.addFlag(f)
	return c
}

// openHistory opens the folder of results that a command's argument names.
func openHistory(args []string) (*history.Folder, error) {
	path := resultsDir
	if len(args) > 0 {
		path = args[0]
	}
	folder, err := history.Open(path)
	return folder, usage(err)
}

func (o historyOptions) run(p Process, args []string) error {
	folder, err := openHistory(args)
	if err != nil {
		return err
	}
	by := history.Filter{Experiment: o.experiment, Words: o.match}
	if by.Since, err = parseSince(o.since, time.Now()); err != nil {
		return usage(fmt.Errorf("--since %s: %w", o.since, err))
	}
	if o.limit < 1 {
		return usage(fmt.Errorf("--limit %d: must be at least 1", o.limit))
	}
	results, total, err := folder.List(by, 0, o.limit)
	if err != nil {
		return err
	}
	if o.format == asJSON {
		return writeJSON(p.Out, struct {
			Total   int              `json:"total"`
			Results []history.Result `json:"results"`
		}{total, append([]history.Result{}, results...)})
	}
	return printHistory(p.Out, results, total)
}

// parseSince parses a day, or a duration before now. An empty text gives the zero time, which selects everything.
func parseSince(text string, now time.Time) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if day, err := time.Parse(time.DateOnly, text); err == nil {
		return day, nil
	}
	var days int
	if _, err := fmt.Sscanf(text, "%dd", &days); err == nil && fmt.Sprintf("%dd", days) == text && days > 0 {
		return now.AddDate(0, 0, -days), nil
	}
	if d, err := time.ParseDuration(text); err == nil && d > 0 {
		return now.Add(-d), nil
	}
	return time.Time{}, fmt.Errorf("must be a day such as 2026-01-31, or a time such as 30d or 12h")
}

func printHistory(w io.Writer, results []history.Result, total int) error {
	if total == 0 {
		_, err := fmt.Fprintln(w, "no results")
		return err
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "STARTED\tEXPERIMENT\tSTATE\tVERDICTS\tSAYS\tKERNEL\tSLIPSTREAM")
	for _, r := range results {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", r.Started.Format("2006-01-02 15:04:05"), plain.Line(r.Experiment), r.State, cmp.Or(report.Verdicts(r.Verdicts), "–"),
			plain.Line(cmp.Or(report.Says(r), "–")), plain.Line(cmp.Or(r.Fact(history.FactKernel), "–")), plain.Line(cmp.Or(r.Fact(history.FactProgram), "–")))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	if total > len(results) {
		_, err := fmt.Fprintf(w, "\nThe newest %d of %d results: --limit shows more.\n", len(results), total)
		return err
	}
	return nil
}

func trendCommand(p Process) *cobra.Command {
	var s history.Selection
	var format outputFormat
	c := &cobra.Command{
		Use:   "trend METRIC [DIR]",
		Short: "Show the course of a metric over the results in a folder",
		Long: `Show the course of a metric over the results of one experiment, with the 95%
interval of each, what differs from the run before (kernel, CPU, NIC, overlay,
version, labels), and where the level changed. METRIC is one of those in
summary.json, or primary: the throughput of a stream, the median latency of
everything else.`,
		Example: `  slipstream trend throughput --variant fastpath
  slipstream trend primary results --experiment demo --pairs 4
  slipstream trend latency_p99 --ratio               relative to the baseline of each run`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(_ *cobra.Command, args []string) error {
			if err := checkTrend(&s, args[0]); err != nil {
				return usage(err)
			}
			folder, err := openHistory(args[1:])
			if err != nil {
				return err
			}
			trend, err := folder.Trend(s)
			if err != nil {
				return usage(err)
			}
			if format == asJSON {
				return writeJSON(p.Out, trend)
			}
			return report.TrendText(p.Out, trend)
		},
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveFilterDirs
			}
			return append(trendMetrics(), primaryMetric), cobra.ShellCompDirectiveNoFileComp
		},
	}
	f := c.Flags()
	f.StringVar(&s.Experiment, "experiment", "", "the experiment (default that of the newest result)")
	f.StringVar(&s.Variant, "variant", "", "only this variant")
	f.StringVar(&s.Workload, "workload", "", "only this workload")
	f.IntVar(&s.Pairs, "pairs", 0, "only this number of pairs")
	f.BoolVar(&s.Ratio, "ratio", false, "ratios to the baseline of each run, in which changes of the machine cancel")
	f.IntVar(&s.Last, "last", 200, "read this many of the newest results")
	format.addFlag(f)
	return c
}

// primaryMetric stands for the primary metric of each workload.
const primaryMetric = "primary"

// checkTrend sets the metric of a selection.
func checkTrend(s *history.Selection, metric string) error {
	if s.Last < 1 {
		return fmt.Errorf("--last %d: must be at least 1", s.Last)
	}
	if metric == primaryMetric {
		return nil
	}
	if _, ok := metrics.Lookup(metric); !ok {
		return fmt.Errorf("there is no metric %q; %s", metric, spec.Suggest(metric, append(trendMetrics(), primaryMetric)))
	}
	if s.Ratio && metrics.Get(metric).NotComparedBecause != "" {
		return fmt.Errorf("--ratio: there is none for %s: %s", metric, metrics.Get(metric).NotComparedBecause)
	}
	s.Metric = metric
	return nil
}

// trendMetrics returns the names of the metrics of trials that have a name of their own.
func trendMetrics() (all []string) {
	for _, m := range metrics.OfTrials() {
		if !m.ByDaemonSet {
			all = append(all, m.Name)
		}
	}
	return all
}
