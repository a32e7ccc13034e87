package cli

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report"
	"slipstream.dev/internal/report/draw"
	"slipstream.dev/internal/shell"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/words"
)

func reportCommand(p Process) *cobra.Command {
	var format, figures, sealed, index string
	c := &cobra.Command{
		Use:   "report RESULT [SECOND]",
		Short: "Render the report of a results folder, or of two side by side",
		Long: `Render the report of a results folder again. With two folders, write one page
with both results side by side and what changed between them, into the second
folder. With --index, write a list of all results in a folder and their trends
into that folder, to be read as files: from a disk, a bucket, or a site. It
links the report.html of each.

RESULT is the folder, one of its files, or its name. "latest" is the newest
folder in results, "DIR/latest" that in DIR. All commands that read a result
take these.`,
		Example: `  slipstream report results/demo-20260102T150405Z                 rewrites report.html, summary.*, figures/
  slipstream report results/demo-20260102T150405Z --format md      to standard output
  slipstream report results/demo-20260102T150405Z --figures pdf    figures/*.pdf too
  slipstream report results/demo-20260102T150405Z --bundle demo.zip    one file, which slipstream verify verifies
  slipstream report BEFORE AFTER                                   AFTER/beside-BEFORE.html
  slipstream report --index results                                results/index.html, results/trend-*.html`,
		Args: func(c *cobra.Command, args []string) error {
			if c.Flags().Changed("index") {
				return cobra.NoArgs(c, args)
			}
			return cobra.RangeArgs(1, 2)(c, args)
		},
		RunE: func(_ *cobra.Command, args []string) (err error) {
			if index != "" {
				return writeIndex(p, index)
			}
			if len(args) == 2 && sealed != "" {
				return usage(errors.New("--bundle is for one result: leave it out, or name one folder"))
			}
			if len(args) == 2 {
				return reportBeside(p, args, format, figures)
			}
			dir, err := openResult(args[0])
			if err != nil {
				return err
			}
			defer dir.Close()
			if sealed != "" {
				if err := seal(dir, sealed, p); err != nil {
					return err
				}
				if format == "" && figures == "" {
					return nil
				}
			}
			if format == "" && figures == "" {
				m, err := render(dir, p)
				if err != nil {
					return err
				}
				printNext(dir, m, p)
				return nil
			}
			m, err := loadReport(dir)
			if err != nil {
				return err
			}
			if figures != "" {
				if err := writeFigures(dir, m, figures); err != nil {
					return err
				}
				fmt.Fprintln(p.Err, "figures are in", filepath.Join(dir.Path, "figures"))
			}
			if format == "" {
				return nil
			}
			f, err := findFormat(report.Formats(), format)
			if err != nil {
				return err
			}
			return f.Write(p.Out, m)
		},
	}
	c.Flags().StringVarP(&format, "format", "o", "", "write "+choices(report.Formats())+" to standard output")
	c.Flags().StringVar(&sealed, "bundle", "", "seal the result in this file, a ZIP archive: what was measured, the report, and a manifest of hashes")
	c.Flags().StringVar(&index, "index", "", "write index.html and trends into this folder of results")
	c.Flags().StringVar(&figures, "figures", "", "write the figures as "+choices(draw.Formats()))
	return c
}

// findFormat returns the format that --format names.
func findFormat[T any](formats []report.Format[T], name string) (report.Format[T], error) {
	i := slices.IndexFunc(formats, func(f report.Format[T]) bool { return f.Name == name })
	if i >= 0 {
		return formats[i], nil
	}
	var names []string
	for _, f := range formats {
		names = append(names, f.Name)
	}
	return report.Format[T]{}, usage(fmt.Errorf("--format %s: there is no such format; choose %s", name, words.Or(names)))
}

// choices lists what a flag may be: "svg, png or pdf".
func choices[T any](all []T) string {
	var names []string
	for _, one := range all {
		names = append(names, fmt.Sprint(one))
	}
	return words.Or(names)
}

// reportBeside writes the page that compares two results.
func reportBeside(p Process, folders []string, format, figures string) error {
	switch {
	case figures != "":
		return usage(errors.New("--figures is for one result: leave it out, or name one folder"))
	case format != "" && format != "html":
		return usage(fmt.Errorf("--format %s: two results side by side are always html; slipstream compare writes text, md, json and junit", format))
	}
	dirs, results, err := openBoth(folders)
	if err != nil {
		return err
	}
	defer closeBoth(dirs)
	beside, err := besideOf(dirs, results)
	if err != nil {
		return err
	}
	if format != "" {
		return beside.HTML(p.Out)
	}
	name := "beside-" + folderName(dirs[0]) + ".html"
	if err := dirs[1].WriteFile(name, beside.HTML); err != nil {
		return err
	}
	fmt.Fprintln(p.Out, "Report:", filepath.Join(dirs[1].Path, name))
	return nil
}

// besideOf computes the page that compares two results, which readResult has read.
func besideOf(dirs [2]*record.Dir, results [2]stats.Result) (report.Beside, error) {
	var models [2]*report.Model
	for i, dir := range dirs {
		var err error
		if models[i], err = buildReport(dir, results[i].Experiment, results[i].Trials); err != nil {
			return report.Beside{}, err
		}
	}
	comparison, err := stats.Compare(results[0], results[1], stats.Only{})
	if err != nil {
		return report.Beside{}, err
	}
	return report.NewBeside(models[0], models[1], comparison), nil
}

// experimentOf reads the experiment of a results folder.
func experimentOf(dir *record.Dir) (*spec.Experiment, error) {
	data, err := dir.Experiment()
	if err != nil {
		return nil, err
	}
	return spec.Parse(filepath.Join(dir.Path, "experiment.yaml"), data, nil)
}

// readExperiment reads the experiment of a results folder, and its trials.
func readExperiment(dir *record.Dir) (*spec.Experiment, []record.Trial, error) {
	exp, err := experimentOf(dir)
	if err != nil {
		return nil, nil, err
	}
	trials, err := dir.Trials()
	return exp, trials, err
}

// loadReport computes the report of a folder.
func loadReport(dir *record.Dir) (*report.Model, error) {
	exp, trials, err := readExperiment(dir)
	if err != nil {
		return nil, err
	}
	return buildReport(dir, exp, trials)
}

// buildReport computes the report of a folder that readExperiment has read.
func buildReport(dir *record.Dir, exp *spec.Experiment, trials []record.Trial) (*report.Model, error) {
	summary, err := analyze(dir, exp, trials)
	if err != nil {
		return nil, err
	}
	env, err := dir.Environment()
	if err != nil {
		return nil, err
	}
	return report.New(exp, summary, trials, env), nil
}

// analyze judges the trials of a folder that readExperiment has read.
func analyze(dir *record.Dir, exp *spec.Experiment, trials []record.Trial) (*stats.Summary, error) {
	if len(trials) == 0 {
		return nil, fmt.Errorf("%s has no results yet: no trial has ended", dir.Path)
	}
	return stats.Analyze(exp, trials)
}

// render computes the report and other files of a results folder from its trials, and prints the verdicts.
func render(dir *record.Dir, p Process) (*report.Model, error) {
	m, err := loadReport(dir)
	if err != nil {
		return nil, err
	}
	for _, f := range m.Files() {
		if err := dir.WriteFile(f.Name, f.Write); err != nil {
			return nil, err
		}
	}
	if err := report.TerminalText(p.Out, m, columnsOf(p.Stdout)); err != nil {
		return nil, err
	}
	fmt.Fprintf(p.Out, "\nReport: %s\n", filepath.Join(dir.Path, "report.html"))
	return m, nil
}

// checkExpectations returns an error if an expectation of the experiment failed or is inconclusive. The report has the
// comparisons.
func checkExpectations(m *report.Model) error {
	count := map[stats.Outcome]int{}
	for _, e := range m.Expected {
		count[e.Outcome]++
	}
	all := len(m.Expected)
	switch {
	case count[stats.OutcomeFailed] > 0:
		return exitError{code: exitSlower, err: fmt.Errorf("%d of %d expectations failed", count[stats.OutcomeFailed], all)}
	case count[stats.OutcomeInconclusive] > 0:
		return exitError{code: exitInconclusive, err: fmt.Errorf("%d of %d expectations are inconclusive: run more blocks (--runs)", count[stats.OutcomeInconclusive], all)}
	}
	return nil
}

// printNext prints the next commands after a result.
func printNext(dir *record.Dir, m *report.Model, p Process) {
	title := "Next:"
	for _, command := range nextCommands(dir, m, p.Args[0]) {
		fmt.Fprintf(p.Out, "%-7s %s\n", title, plain.Line(command))
		title = ""
	}
}

// nextCommands returns what a user wants after a result: to keep what is proven, to measure more, or after a lab to
// look at the machines that matter.
func nextCommands(dir *record.Dir, m *report.Model, program string) []string {
	program = cmp.Or(plugin(program), program)
	keep := m.Recommended()
	switch {
	case m.Imported():
		return nil
	case m.Unfinished != "":
		return []string{program + " run --resume " + shell.Quote(dir.Path)}
	case keep != "" && m.InLab():
		return []string{
			program + " doctor                        on the machines that you use: it changes nothing",
			program + " run kubernetes --dry-run      what it takes to measure in your cluster",
		}
	case keep != "" && m.InCluster():
		return []string{fmt.Sprintf("%s policy %s %s --node-selector KEY=VALUE | kubectl apply -f -", program, shell.Quote(dir.Path), shell.Quote(keep))}
	case keep != "":
		return []string{fmt.Sprintf("%s policy %s %s --host -o policy.yaml", program, shell.Quote(dir.Path), shell.Quote(keep))}
	case m.Inconclusive():
		if again := rerunCommand(program, m.Environment.Command, max(20, 2*m.Blocks)); again != "" {
			return []string{again}
		}
	}
	return nil
}

// rerunCommand returns the command that runs the experiment with more blocks, or "" if the command was not a run. A
// folder from somebody else may hold any text, and people paste suggested commands, so the result is always a
// command of this program with quoted words.
func rerunCommand(program, command string, blocks int) string {
	words, err := shell.Split(command)
	if err != nil || len(words) < 2 || words[1] != "run" {
		return ""
	}
	again := []string{"run"}
	for i := 2; i < len(words); i++ {
		switch word := words[i]; {
		case word == "--runs":
			i++ // its value
		case word == "-": // the experiment came from a standard input that has ended
			return ""
		case !strings.HasPrefix(word, "--runs="):
			again = append(again, word)
		}
	}
	return fmt.Sprintf("%s %s --runs %d", program, shell.Join(again), blocks)
}

func writeFigures(dir *record.Dir, m *report.Model, format string) error {
	if !slices.Contains(draw.Formats(), format) {
		return usage(fmt.Errorf("--figures %s: there is no such format; choose %s", format, choices(draw.Formats())))
	}
	var errs []error
	for _, f := range m.Figures {
		errs = append(errs, dir.WriteFile(filepath.Join("figures", f.Name+"."+format), func(w io.Writer) error {
			return f.Write(w, format)
		}))
	}
	return errors.Join(errs...)
}
