// Package cli is the command line, one file per command. It connects targets, workers, accelerators,
// statistics and reports, which do not know each other. Decisions belong in those packages.
package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"slipstream.dev/examples"
	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/spec"
)

// Exit codes.
const (
	exitGood   = 0
	exitFailed = 1
	exitUsage  = 2
	// A gate exits with exitSlower or exitInconclusive. doctor too exits with exitSlower, if it has
	// found something serious.
	exitSlower       = 3
	exitInconclusive = 4
	// A shell reports this exit code of a program that SIGPIPE has ended.
	exitClosedOutput = 128 + 13
)

// Process is the part of the operating system's process that the command line uses.
type Process struct {
	Args    []string
	Version string
	// Image is the repository in which a release has published the image of agents and workers, or "".
	Image string
	// Hurry is closed when the user asks a second time to stop.
	Hurry <-chan struct{}
	// Stdin, Stdout and Stderr are the standard files of the process. A worker's stream, started
	// programs and the control of a terminal use them.
	Stdin, Stdout, Stderr *os.File
	// Out and Err take text. Main sets them.
	Out, Err io.Writer
}

// plain makes Out and Err write to Stdout and Stderr as plain text.
func (p Process) plain() Process {
	p.Out, p.Err = plain.Writer(p.Stdout), plain.Writer(p.Stderr)
	return p
}

// Main runs the command line and returns the exit code.
func Main(ctx context.Context, p Process) int {
	if err := begin(); err != nil {
		return printError(p.plain(), err)
	}
	return execute(ctx, p)
}

func execute(ctx context.Context, p Process) int {
	p = p.plain()
	if err := checkTyped(p.Args[1:]); err != nil {
		return printError(p, usage(err))
	}
	root := rootCommand(p)
	root.SetArgs(p.Args[1:])
	return printError(p, root.ExecuteContext(ctx))
}

// checkTyped finds arguments that were copied from a web page or a document, which had quotes and dashes of typography in them.
func checkTyped(args []string) error {
	for _, arg := range args {
		first, size := utf8.DecodeRuneInString(arg)
		switch {
		case arg == "--":
			return nil
		case strings.ContainsRune("“”„‘’", first):
			return fmt.Errorf("%s begins with a typographic quote, which a shell does not know: type ' or \" instead", arg)
		case strings.ContainsRune("–—", first):
			return fmt.Errorf("%s begins with a typographic dash: type --%s", arg, arg[size:])
		}
	}
	return nil
}

// checkValues finds options without the value that they need: an empty shell variable, or the next option in its place.
func checkValues(c *cobra.Command) (err error) {
	c.Flags().Visit(func(f *pflag.Flag) {
		values := []string{f.Value.String()}
		switch v, isList := f.Value.(pflag.SliceValue); {
		case isList:
			values = v.GetSlice()
		case f.Value.Type() != "string":
			return
		}
		for _, value := range values {
			name, isOption := strings.CutPrefix(value, "--")
			name, _, _ = strings.Cut(name, "=")
			switch {
			case value == "":
				err = cmp.Or(err, fmt.Errorf("--%s is empty: give it a value, or leave it out", f.Name))
			case isOption && c.Flags().Lookup(name) != nil:
				err = cmp.Or(err, fmt.Errorf("--%s has the value %s, which is an option: give --%[1]s a value, or leave it out", f.Name, value))
			}
		}
	})
	return err
}

// printError prints an error and returns the exit code.
func printError(p Process, err error) int {
	switch {
	case err == nil:
		return exitGood
	case errors.Is(err, syscall.EPIPE): // whoever read the output has seen enough
		return exitClosedOutput
	}
	var exit exitError
	if !errors.As(err, &exit) {
		exit = exitError{code: exitFailed, err: err}
	}
	if exit.err != nil {
		for _, line := range errorLines(exit.err) {
			fmt.Fprintln(p.Err, "slipstream:", line)
		}
	}
	return exit.code
}

// errorLines returns the distinct lines of an error: several places often fail with the same text. For an error of the
// operating system, the last line says what to do.
func errorLines(err error) (lines []string) {
	for line := range strings.SplitSeq(err.Error(), "\n") {
		if !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	if do := remedy(err); do != "" {
		lines = append(lines, do)
	}
	return lines
}

// remedy says what to do about an error of the operating system. It compares texts too, because the errors of workers
// are text.
func remedy(err error) string {
	has := func(cause syscall.Errno) bool {
		return errors.Is(err, cause) || strings.Contains(err.Error(), cause.Error())
	}
	_, gone := os.Getwd()
	switch {
	case has(syscall.ENFILE): // whose text begins as that of EMFILE
		return "raise the machine's limit on open files (sysctl fs.file-max)"
	case has(syscall.EMFILE):
		return "raise the limit on open files (ulimit -n 65536, or LimitNOFILE= of a service)"
	case has(syscall.EFBIG):
		return "raise the limit on the size of files (ulimit -f unlimited, or LimitFSIZE= of a service)"
	case errors.Is(err, fs.ErrNotExist) && gone != nil:
		return "the folder in which slipstream was started has been removed: change to another one"
	}
	return ""
}

// exitError is an error with an exit code of its own.
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

func (e exitError) Unwrap() error { return e.err }

// usage marks an error as a mistake in usage, found before anything was changed.
func usage(err error) error {
	if err == nil {
		return nil
	}
	return exitError{code: exitUsage, err: err}
}

// groups are the sections of the help, in order.
var groups = []*cobra.Group{
	{ID: "measure", Title: "Measure:"}, {ID: "keep", Title: "Keep what is proven:"}, {ID: "play", Title: "Try things out:"}, {ID: "other", Title: "Other:"},
}

// groupOf maps every command that is not hidden to its group.
var groupOf = map[string]string{
	"run": "measure", "report": "measure", "compare": "measure", "history": "measure", "trend": "measure", "serve": "measure", "verify": "measure", "import": "measure", "validate": "measure", "preset": "measure", "cleanup": "measure",
	"policy": "keep", "agent": "keep",
	"lab": "play", "accel": "play",
	"doctor": "other", "capture": "other", "image": "other", "azure": "other", "version": "other", "completion": "other", "help": "other",
}

// plugin returns how users type the program if kubectl runs it as a plugin, else "".
func plugin(program string) string {
	if strings.HasPrefix(filepath.Base(program), "kubectl-") {
		return "kubectl slipstream"
	}
	return ""
}

// Command returns the tree of all commands, for the reference.
func Command() *cobra.Command {
	return rootCommand(Process{Args: []string{"slipstream"}})
}

// helpWidth is the width of help texts in columns, however wide the terminal is.
const helpWidth = 80

func rootCommand(p Process) *cobra.Command {
	root := &cobra.Command{
		Use:   "slipstream",
		Short: "Measure what a container network costs, and prove what makes it faster",
		Long: `slipstream measures what a container network costs against the raw network
under it, applies accelerators, and proves with interleaved runs and
confidence intervals which of them help.

Start with: slipstream run demo   (as root; it makes its own lab and removes it)`,
		Version:       p.Version,
		SilenceErrors: true,
		SilenceUsage:  true,
		PersistentPreRunE: func(c *cobra.Command, _ []string) error {
			if c.Hidden || c.Name() == "agent" { // their options are written by programs
				return nil
			}
			return usage(checkValues(c))
		},
	}
	if name := plugin(p.Args[0]); name != "" {
		root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: name}
	}
	root.SetIn(p.Stdin)
	root.SetOut(p.Out)
	root.SetErr(p.Err)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		if missing := new(pflag.NotExistError); errors.As(err, &missing) {
			var names []string
			name := "--" + missing.GetSpecifiedName()
			c.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, "--"+f.Name) })
			if near := spec.Near(name, names); len(near) > 0 && len(near) < 4 {
				err = fmt.Errorf("%w, %s", err, spec.Suggest(name, names))
			}
		}
		return usage(fmt.Errorf("%s (see %s --help)", conversionText.ReplaceAllString(err.Error(), ": not a number"), c.CommandPath()))
	})
	root.AddCommand(runCommand(p), presetCommand(p), reportCommand(p), compareCommand(p), historyCommand(p), trendCommand(p), serveCommand(p), verifyCommand(p), validateCommand(p), importCommand(p), cleanupCommand(p), policyCommand(p))
	root.AddCommand(linuxCommands(p)...)
	root.AddCommand(doctorCommand(p), imageCommand(p), azureCommand(), versionCommand(p))
	cobra.EnableCommandSorting = false // groups are listed in the order of use
	root.AddGroup(groups...)
	root.SetCompletionCommandGroupID("other")
	for _, c := range root.Commands() {
		c.GroupID = groupOf[c.Name()]
	}
	root.InitDefaultCompletionCmd()
	requireSubcommand(root)
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), ".FlagUsages ", fmt.Sprintf(".FlagUsagesWrapped %d ", helpWidth)))
	root.SetHelpCommand(helpCommand(root))
	root.InitDefaultHelpCmd()
	usageOfArgs(root)
	return root
}

// helpCommand fails if the command does not exist. cobra's own shows the help of the whole program then, and succeeds.
func helpCommand(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use: "help [COMMAND...]", GroupID: "other",
		Short: "Show the help of a command",
		RunE: func(_ *cobra.Command, args []string) error {
			c, rest, err := root.Find(args)
			if err == nil && len(rest) > 0 {
				err = c.Args(c, rest)
			}
			if err != nil {
				return usage(err)
			}
			c.InitDefaultHelpFlag() // which the help lists
			return c.Help()
		},
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			c, _, err := root.Find(args)
			if err != nil {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			var names []string
			for _, sub := range c.Commands() {
				if sub.IsAvailableCommand() {
					names = append(names, sub.Name()+"\t"+sub.Short)
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
	}
}

// requireSubcommand makes a command that only has subcommands fail for any other name. cobra would print help and
// succeed.
func requireSubcommand(c *cobra.Command) {
	for _, sub := range c.Commands() {
		requireSubcommand(sub)
	}
	if c.RunE != nil || c.Run != nil {
		return
	}
	c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
	c.Args = func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		var names []string
		for _, sub := range c.Commands() {
			if !sub.Hidden {
				names = append(names, sub.Name())
			}
		}
		near := spec.Near(args[0], names)
		for _, sub := range c.Commands() {
			if slices.Contains(sub.SuggestFor, args[0]) {
				near = append(near, sub.Name())
			}
		}
		if len(near) == 0 && !c.HasParent() {
			for _, preset := range spec.Near(args[0], examples.Names()) {
				near = append(near, "run "+preset)
			}
			if info, err := os.Stat(args[0]); err == nil && info.Mode().IsRegular() {
				near = append(near, "run "+args[0])
			}
		}
		if len(near) == 0 {
			return fmt.Errorf("there is no command %q", args[0])
		}
		return fmt.Errorf("there is no command %q: did you mean %s %s?", args[0], c.CommandPath(), strings.Join(near, ", or "+c.CommandPath()+" "))
	}
}

func versionCommand(p Process) *cobra.Command {
	var format outputFormat
	c := &cobra.Command{
		Use: "version", Args: cobra.NoArgs,
		Short: "Print the version",
		RunE: func(*cobra.Command, []string) error {
			if format == asJSON {
				return writeJSON(p.Out, map[string]string{"version": p.Version, "os": runtime.GOOS, "arch": runtime.GOARCH, "go": runtime.Version()})
			}
			_, err := fmt.Fprintf(p.Out, "slipstream version %s (%s/%s, %s)\n", p.Version, runtime.GOOS, runtime.GOARCH, runtime.Version())
			return err
		},
	}
	format.addFlag(c.Flags())
	return c
}

// usageOfArgs marks a wrong number of arguments as an error of usage.
func usageOfArgs(c *cobra.Command) {
	if check := c.Args; check != nil {
		c.Args = func(c *cobra.Command, args []string) error {
			if err := inWords(check(c, args)); err != nil {
				if !c.HasSubCommands() {
					err = fmt.Errorf("%w: %s%s", err, c.CommandPath(), strings.TrimPrefix(c.Use, c.Name()))
				}
				return usage(fmt.Errorf("%w (see %s --help)", err, c.CommandPath()))
			}
			return nil
		}
	}
	for _, sub := range c.Commands() {
		usageOfArgs(sub)
	}
}

// conversionText matches Go's errors about numbers.
var conversionText = regexp.MustCompile(`: strconv\.\w+: parsing "[^"]*": invalid syntax$`)

// argsText matches cobra's errors about the number of arguments.
var argsText = regexp.MustCompile(`^(?:accepts|requires) (at least |at most |between )?(\d+)(?: and (\d+))? arg\(s\), (?:only )?received (\d+)$`)

// inWords rewords cobra's errors about the number of arguments.
func inWords(err error) error {
	if err == nil {
		return nil
	}
	m := argsText.FindStringSubmatch(err.Error())
	if m == nil {
		return err
	}
	bound, number := strings.TrimPrefix(m[1], "between "), m[2]
	if m[3] != "" {
		number += " to " + m[3]
	}
	noun := "arguments"
	if number == "1" {
		noun = "argument"
	}
	return fmt.Errorf("it takes %s%s %s, not %s", bound, number, noun, m[4])
}

// newLog returns a logger that writes warnings and errors to standard error.
func newLog(p Process) *slog.Logger {
	return slog.New(slog.NewTextHandler(p.Err, &slog.HandlerOptions{Level: slog.LevelWarn}))
}
