package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"slipstream.dev/examples"
	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/shell"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/words"
)

// readSource returns the text of an experiment: that of a preset, of a file, or with "-" of standard input.
func readSource(name string, stdin io.Reader) ([]byte, error) {
	if name == "-" {
		return spec.Read(sourceName(name), stdin)
	}
	if data, ok := examples.Preset(name); ok {
		return data, nil
	}
	data, err := spec.ReadFile(name)
	switch {
	case errors.Is(err, syscall.EISDIR):
		return nil, isFolder(name)
	case !errors.Is(err, fs.ErrNotExist):
		return data, err
	case name == latest:
		path, err := findResult(name)
		if err != nil {
			return nil, err
		}
		return nil, isFolder(path)
	case !strings.ContainsAny(name, "/."):
		return nil, fmt.Errorf("%s is neither a file nor a preset%s (see slipstream run --list)", name, didYouMean(name, examples.Names()))
	}
	base := filepath.Base(name)
	near := spec.Near(base, namesBeside(name))
	for i := range near {
		near[i] = filepath.Join(filepath.Dir(name), near[i])
	}
	if len(near) == 0 {
		near = spec.Near(strings.TrimSuffix(base, ".yaml"), examples.Names())
	}
	return nil, fmt.Errorf("%w%s", err, orOneOf(near))
}

// isFolder says what to do with a folder that was named in place of an experiment.
func isFolder(name string) error {
	file := filepath.Join(name, "experiment.yaml")
	if _, err := os.Stat(file); err != nil {
		return fmt.Errorf("%s is a folder: name a file in it", name)
	}
	return fmt.Errorf("%s is the folder of a result: slipstream run --resume %s continues that run, and slipstream run %s repeats it", name, shell.Quote(name), shell.Quote(file))
}

// namesBeside returns the names of the files and folders that are where something was not found.
func namesBeside(path string) (names []string) {
	all, _ := os.ReadDir(filepath.Dir(path)) // a folder that cannot be read has none for the user
	for _, e := range all {
		names = append(names, e.Name())
	}
	if slices.Contains(names, filepath.Base(path)) {
		return nil
	}
	return names
}

// sourceName is the name of an experiment's text in messages.
func sourceName(name string) string {
	if name == "-" {
		return "standard input"
	}
	return name
}

// didYouMean returns the end of a sentence that suggests similar names, or "" if there are none.
func didYouMean(name string, allowed []string) string {
	return orOneOf(spec.Near(name, allowed))
}

func orOneOf(near []string) string {
	if len(near) == 0 {
		return ""
	}
	return "; did you mean " + words.Or(near) + "?"
}

func presetCommand(p Process) *cobra.Command {
	return &cobra.Command{
		Use: "preset NAME", Args: cobra.ExactArgs(1),
		Short: "Print the experiment file of a preset, to change and run",
		Example: `  slipstream run --list                    the presets
  slipstream preset demo > my.yaml
  slipstream run my.yaml`,
		RunE: func(_ *cobra.Command, args []string) error {
			data, ok := examples.Preset(args[0])
			if !ok {
				return usage(fmt.Errorf("there is no preset %q%s (see slipstream run --list)", args[0], didYouMean(args[0], examples.Names())))
			}
			// Editors find the schema that this line names in a clone of the repository only.
			if line, rest, _ := bytes.Cut(data, []byte("\n")); bytes.HasPrefix(line, []byte("# yaml-language-server: ")) {
				data = rest
			}
			_, err := p.Out.Write(data)
			return err
		},
		ValidArgsFunction: func(c *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
			names, _ := completePresets(c, args, typed)
			return names, cobra.ShellCompDirectiveNoFileComp
		},
	}
}

// listedPreset is a row of run --list.
type listedPreset struct {
	Name        string `json:"name"`
	Description string `json:"description"`
	Time        string `json:"time"`
	// Seconds is about how long a run takes, or how long at most.
	Seconds float64 `json:"seconds"`
}

// listWidth is the maximum width of the list of presets in columns.
const listWidth = 100

func listPresets(w io.Writer, format outputFormat) error {
	var all []listedPreset
	for _, name := range examples.Names() {
		exp, err := runOptions{}.load([]string{name})
		if err != nil {
			return err
		}
		plan := experiment.New(exp)
		all = append(all, listedPreset{name, examples.Description(name), plan.TimeText(), plan.Time().Seconds()})
	}
	if format == asJSON {
		return writeJSON(w, all)
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "PRESET\tTIME\tWHAT IT SHOWS")
	widest := 0
	for _, preset := range all {
		widest = max(widest, len(preset.Name))
	}
	for _, preset := range all {
		duration, _, _ := strings.Cut(preset.Time, ", ")
		lines := plain.Wrap(preset.Description, listWidth-widest-len("at most 1 h 42 min")-4, 0)
		fmt.Fprintf(tw, "%s\t%s\t%s\n", preset.Name, duration, lines[0])
		for _, line := range lines[1:] {
			fmt.Fprintf(tw, "\t\t%s\n", line)
		}
	}
	return tw.Flush()
}
