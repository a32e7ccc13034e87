package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/importer"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/shell"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/words"
)

func importCommand(p Process) *cobra.Command {
	var o importer.Options
	var out string
	c := &cobra.Command{
		Use:   "import FILE|DIR...",
		Short: "Turn the output of iperf3, sockperf and others into a result",
		Long: `Create a results folder from the output of iperf3 -J, iperf 2, sockperf, qperf,
ab, wrk, fortio, k6, latte and mpstat. import recognises each file's format by
its content, and counts a duplicated run only once. --pattern describes the file
names: {variant} and {block} or {run}, and if needed {workload}, {pairs}, {pair}
and {node}. * matches anything but /.

Use {block} if the variants took turns: runs with the same number are compared
with each other. Use {run} if each variant was measured on its own: a difference
may then come from the time of the measurement, and the report warns of that.

import lists and skips files whose names do not match. If it cannot read another
file, it lists all such files with the reasons, and writes nothing.`,
		Example: `  slipstream import --pattern '{variant}-{block}.json' --baseline vxlan measured/
  slipstream import --pattern '{variant}/{workload}-{pairs}-{run}.*' --baseline off measured/
  slipstream import --pattern '{variant}-{pairs}.txt' --baseline baseline --duration 30s published-rps-rfs/`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if c.Flags().Changed("duration") && o.Window <= 0 {
				return usage(fmt.Errorf("--duration %s: must be above 0s", o.Window))
			}
			return importResults(p, args, o, out)
		},
	}
	f := c.Flags()
	f.StringVar(&o.Pattern, "pattern", "", "pattern of the file names, such as '{variant}-{block}.json'")
	f.StringVar(&o.Baseline, "baseline", "", "variant that the others are compared with")
	f.StringVar(&o.Name, "name", "", "name of the result (default imported)")
	f.DurationVar(&o.Window, "duration", 0, "how long each run took, for files that do not say so")
	f.StringVar(&out, "out", resultsDir, "folder in which to create the results folder")
	return c
}

func importResults(p Process, paths []string, o importer.Options, out string) error {
	r, err := importer.Import(paths, o)
	if err != nil {
		return usage(err)
	}
	// Results that cannot be judged are not written.
	if _, err := stats.Analyze(r.Experiment, r.Trials); err != nil {
		return err
	}
	for _, skipped := range r.Skipped {
		fmt.Fprintln(p.Err, "skipped:", skipped)
	}
	for _, again := range r.Copies {
		fmt.Fprintln(p.Err, "copy:", again)
	}
	dir, err := writeImported(p, r, out)
	if err != nil {
		return err
	}
	defer dir.Close()
	fmt.Fprintf(p.Err, "imported %s from %s to %s\n", words.Count(len(r.Trials), "trial"), words.Count(len(r.Imported.Files), "file"), dir.Path)
	_, err = render(dir, p)
	return err
}

// writeImported makes the folder under a temporary name, so that an unfinished one is never
// taken for a result.
func writeImported(p Process, r *importer.Result, out string) (_ *record.Dir, err error) {
	experiment, err := spec.Marshal(r.Experiment)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return nil, fmt.Errorf("create results folder: %w", err)
	}
	half, err := os.MkdirTemp(out, ".import-*")
	if err != nil {
		return nil, fmt.Errorf("create results folder: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(half)) }()
	now := time.Now()
	dir, err := record.Create(half, r.Experiment.Metadata.Name, now, experiment, record.Environment{
		Version: p.Version, Started: r.Trials[0].Started, Command: shell.Join(p.Args), Placement: r.Note,
		Nodes: []record.Node{}, Imported: &r.Imported,
	})
	if err != nil {
		return nil, err
	}
	for _, t := range r.Trials {
		if err := dir.Append(t); err != nil {
			return nil, errors.Join(err, dir.Close())
		}
	}
	if err := dir.Close(); err != nil {
		return nil, err
	}
	// A loop over folders imports several in a second. Each but the first gets the next free second as its time, so that they
	// keep their order.
	for ; ; now = now.Add(time.Second) {
		whole := filepath.Join(out, record.FolderName(r.Experiment.Metadata.Name, now))
		err := os.Rename(dir.Path, whole)
		if err == nil {
			return record.Open(whole)
		}
		if !errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("create results folder: %w", err)
		}
	}
}
