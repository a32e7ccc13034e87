package cli

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/history"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

// Values of --gate.
const (
	gateSlower = "slower"
	gateStrict = "strict"
)

type compareOptions struct {
	gate, format string
	against      string
	only         []string
	margin       float64
}

func compareCommand(p Process) *cobra.Command {
	var o compareOptions
	c := &cobra.Command{
		Use:   "compare [BEFORE] AFTER",
		Short: "Compare two results",
		Long: `Show how the second result differs from the first, for each variant, workload
and number of pairs that both have. With --gate the exit code is 3 if the second
is slower in a primary metric (the throughput of a stream, the median latency of
everything else), and 4 if the results have nothing in common. With
--gate=strict it is also 4 if a comparison is inconclusive, or missing from one
of the results. --against chooses BEFORE by a label that run --label gave it.`,
		Example: `  slipstream compare results/demo-20260102T150405Z results/demo-20260109T150405Z
  slipstream compare BEFORE AFTER --gate --margin 0.05
  slipstream compare BEFORE AFTER --only variant=fastpath --only metric=throughput,latency_p99
  slipstream compare BEFORE AFTER --gate=strict --format junit > slipstream.xml
  slipstream compare latest --against main --gate`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 3 && (args[2] == gateStrict || args[2] == gateSlower) && c.Flags().Changed("gate") {
				return fmt.Errorf("write --gate=%s, with =", args[2])
			}
			if c.Flags().Changed("against") {
				return cobra.ExactArgs(1)(c, args)
			}
			if len(args) == 1 {
				return errors.New("name the result to compare with too, or the label of one with --against")
			}
			return cobra.ExactArgs(2)(c, args)
		},
		RunE: func(c *cobra.Command, args []string) (err error) {
			if len(args) == 1 {
				if args, err = withBefore(args[0], o.against); err != nil {
					return usage(err)
				}
			}
			return o.run(p, args, c.Flags().Changed("margin"))
		},
	}
	f := c.Flags()
	f.StringVar(&o.against, "against", "", "compare with the newest complete result of the same experiment, in the same folder, that has a label with this value: --against main")
	f.StringVar(&o.gate, "gate", "", "exit with 3 if the second is slower, with 4 if the results have nothing in common; =strict: with 4 also if a comparison is inconclusive or missing")
	f.Lookup("gate").NoOptDefVal = gateSlower
	f.StringVarP(&o.format, "format", "o", "text", choices(report.ChangesFormats()))
	f.StringArrayVar(&o.only, "only", nil, "compare only these: variant=NAME,…, workload=NAME,… or metric=NAME,…")
	f.Float64Var(&o.margin, "margin", 0, "equivalence margin: with 0.02, ratios from 1/1.02 to 1.02 are the same (default the second experiment's)")
	return c
}

// withBefore returns the paths of both results: of the one with the label, and of after.
func withBefore(after, label string) ([]string, error) {
	path, err := findResult(after)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err != nil {
		return nil, err
	}
	parent, name := filepath.Split(path)
	folder, err := history.Open(filepath.Clean(parent))
	if err != nil {
		return nil, err
	}
	before, err := folder.Labelled(history.Experiment(name), label, name)
	return []string{filepath.Join(parent, before), path}, err
}

func (o compareOptions) run(p Process, folders []string, margin bool) error {
	dirs, results, err := openBoth(folders)
	if err != nil {
		return err
	}
	defer closeBoth(dirs)
	only, err := o.filter(results)
	if err != nil {
		return usage(err)
	}
	format, err := findFormat(report.ChangesFormats(), o.format)
	switch {
	case err != nil:
		return err
	case o.gate != "" && o.gate != gateSlower && o.gate != gateStrict:
		return usage(fmt.Errorf("--gate=%s: there is no such gate; use --gate or --gate=strict", o.gate))
	case margin && !(o.margin > 0 && o.margin < 0.5):
		return usage(fmt.Errorf("--margin %g: must be above 0 and below 0.5", o.margin))
	case margin:
		results[1].Experiment.Spec.Margin = o.margin
	}
	comparison, err := stats.Compare(results[0], results[1], only)
	if err != nil {
		return err
	}
	if len(comparison.OtherTraffic) > 0 {
		return usage(fmt.Errorf("%s; name the workloads to compare by --only workload=…, or give them different names", strings.Join(comparison.OtherTraffic, "; ")))
	}
	var environments [2]record.Environment
	for i, dir := range dirs {
		if environments[i], err = dir.Environment(); err != nil {
			return err
		}
	}
	changes := report.NewChanges(comparison, results, environments)
	changes.Strict = o.gate == gateStrict
	if err := format.Write(p.Out, changes); err != nil || o.gate == "" {
		return err
	}
	switch {
	case comparison.Gate == stats.GateSlower:
		return exitError{code: exitSlower, err: errors.New("gate: the second result is slower")}
	case !changes.Compared():
		return exitError{code: exitInconclusive, err: errors.New("gate: the results have no variant, workload and number of pairs in common")}
	case comparison.Gate == stats.GateInconclusive && o.gate == gateStrict:
		return exitError{code: exitInconclusive, err: errors.New("gate: a comparison is inconclusive (too few blocks, or too much noise), or missing from one of the results")}
	}
	return nil
}

// openBoth reads the results of two runs. It names them by their folders, or by their paths if the folders have the
// same name. The caller closes both.
func openBoth(paths []string) (dirs [2]*record.Dir, results [2]stats.Result, err error) {
	defer func() {
		if err != nil {
			closeBoth(dirs)
		}
	}()
	for i, path := range paths {
		dir, err := openResult(path)
		if err != nil {
			return dirs, results, err
		}
		dirs[i] = dir
		if results[i], err = readResult(dir); err != nil {
			return dirs, results, err
		}
	}
	if results[0].Name == results[1].Name {
		results[0].Name, results[1].Name = paths[0], paths[1]
	}
	return dirs, results, nil
}

// readResult reads the parts of a result that a comparison needs.
func readResult(dir *record.Dir) (stats.Result, error) {
	exp, trials, err := readExperiment(dir)
	env, unreadable := dir.Environment()
	return stats.Result{Name: folderName(dir), Experiment: exp, Trials: trials, Imported: env.Imported}, errors.Join(err, unreadable)
}

func closeBoth(dirs [2]*record.Dir) {
	for _, dir := range dirs {
		if dir != nil {
			dir.Close()
		}
	}
}

// folderName returns the name of a results folder, whatever path led to it.
func folderName(dir *record.Dir) string {
	path, err := filepath.Abs(dir.Path)
	if err != nil {
		path = dir.Path
	}
	return filepath.Base(path)
}

// filter parses --only. Each name must occur in at least one of the results.
func (o compareOptions) filter(results [2]stats.Result) (only stats.Only, err error) {
	var variants, workloads []string
	for _, r := range results {
		for _, v := range r.Experiment.Spec.Variants {
			variants = append(variants, v.Name)
		}
		for _, w := range r.Experiment.Spec.Workloads {
			workloads = append(workloads, w.Name)
		}
	}
	fields := map[string]struct {
		to      *[]string
		allowed []string
	}{"variant": {&only.Variants, variants}, "workload": {&only.Workloads, workloads}, "metric": {&only.Metrics, metrics.Comparable()}}
	for _, text := range o.only {
		name, values, ok := strings.Cut(text, "=")
		field, known := fields[name]
		if !ok || !known {
			return only, fmt.Errorf("--only %s: must be variant=NAME, workload=NAME or metric=NAME", text)
		}
		slices.Sort(field.allowed)
		for _, value := range strings.Split(values, ",") {
			if why := metrics.Get(value).NotComparedBecause; name == "metric" && why != "" {
				return only, fmt.Errorf("--only %s: %s is compared with nothing: %s", text, value, why)
			}
			if !slices.Contains(field.allowed, value) {
				return only, fmt.Errorf("--only %s: there is no %s %q; %s", text, name, value, spec.Suggest(value, slices.Compact(field.allowed)))
			}
			*field.to = append(*field.to, value)
		}
	}
	return only, nil
}
