package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/accel/journal"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
)

// accelOwner is the owner of settings that a user applied, in the journal. They outlive the process.
const accelOwner = "slipstream accel"

func accelCommand(p Process) *cobra.Command {
	c := &cobra.Command{
		Use:   "accel",
		Short: "Plan, apply, show and revert accelerators on this machine",
		Long: `Plan, apply, show and revert accelerators in this network namespace: those of a
variant of an experiment, so that you apply exactly what you measured. apply
records each setting in a journal before it writes it, and reads it back; revert
restores it. The fast path ends with the process that runs it, so apply rejects
it: use slipstream agent. status shows settings and fast paths.`,
		Example: `  slipstream accel plan demo rps                              what the preset's variant would set here
  slipstream accel apply results/demo-20260102T150405Z/experiment.yaml rfs
  slipstream accel status
  slipstream accel revert`,
	}
	var pod bool
	c.PersistentFlags().BoolVar(&pod, "pod", false, "this network namespace is a pod's, not a node's")
	options := func() accel.Options {
		o := accel.Options{Place: place.Place{Name: "here", Kind: place.Node}, JournalDir: journalDir, Owner: accelOwner, Persistent: true, Log: newLog(p)}
		if pod {
			o.Place.Kind = place.Pod
		}
		return o
	}
	set := func(do func(*accel.Applier, context.Context, []v1alpha1.Accelerator) ([]record.Setting, error)) func(*cobra.Command, []string) error {
		return func(c *cobra.Command, args []string) error {
			accelerators, err := variantAccelerators(args[0], args[1], pod)
			if err != nil {
				return usage(err)
			}
			if err := asRoot("accel reads and changes settings of the kernel"); err != nil {
				return err
			}
			s, err := accel.OpenApplier(options())
			if err != nil {
				return err
			}
			settings, err := do(s, c.Context(), accelerators)
			if err := errors.Join(err, s.Close()); err != nil {
				return err
			}
			return printSettings(p.Out, settings)
		}
	}
	var format outputFormat
	status := &cobra.Command{
		Use: "status", SuggestFor: []string{"list", "ls", "show"}, Args: cobra.NoArgs,
		Short: "Show what slipstream has applied on this machine, and who did",
		RunE:  func(c *cobra.Command, _ []string) error { return accelStatus(c.Context(), p.Out, options(), format) },
	}
	format.addFlag(status.Flags())
	var killed bool
	revert := &cobra.Command{
		Use: "revert", SuggestFor: []string{"undo", "off", "disable"}, Args: cobra.NoArgs,
		Short: "Restore what apply and killed processes changed on this machine",
		RunE:  func(c *cobra.Command, _ []string) error { return accelRevert(c.Context(), p, options(), killed) },
	}
	revert.Flags().BoolVar(&killed, "killed", false, "only what killed processes changed: what apply changed stays")
	c.AddCommand(
		&cobra.Command{
			Use: "plan PRESET|FILE VARIANT", Args: cobra.ExactArgs(2),
			Short: "Show what a variant's accelerators would set here; changes nothing",
			RunE:  set((*accel.Applier).Plan), ValidArgsFunction: completeAccelerators,
		},
		&cobra.Command{
			Use: "apply PRESET|FILE VARIANT", Args: cobra.ExactArgs(2),
			Short: "Apply a variant's accelerators here, until revert or a reboot",
			RunE:  set((*accel.Applier).Apply), ValidArgsFunction: completeAccelerators,
		},
		status,
		revert,
	)
	return c
}

func accelStatus(ctx context.Context, w io.Writer, o accel.Options, format outputFormat) error {
	if err := asRoot("accel status reads the settings of every network namespace"); err != nil {
		return err
	}
	held, err := accel.Status(ctx, o)
	if err != nil {
		return err
	}
	fast, err := accel.Fastpaths(o)
	if err != nil {
		return err
	}
	if format == asJSON {
		return writeJSON(w, map[string]any{"settings": append([]accel.Held{}, held...), "fastpaths": append([]accel.Fastpath{}, fast...)})
	}
	if len(held) > 0 || len(fast) == 0 {
		err = printHeld(w, held)
	}
	for i, f := range fast {
		if i > 0 || len(held) > 0 {
			fmt.Fprintln(w)
		}
		err = errors.Join(err, printFastpath(w, f))
	}
	return err
}

func accelRevert(ctx context.Context, p Process, o accel.Options, killed bool) error {
	if err := asRoot("accel revert changes settings of the kernel"); err != nil {
		return err
	}
	recovered, err := accel.Recover(ctx, o)
	if killed && journal.OnlyChanged(err) {
		fmt.Fprintln(p.Err, err) // slipstream no longer owns these settings
		err = nil
	}
	if err != nil {
		return err
	}
	n := 0
	if !killed {
		s, err := accel.OpenApplier(o)
		if err != nil {
			return err
		}
		n, err = s.Revert(ctx)
		if err := errors.Join(err, s.Close()); err != nil {
			return err
		}
	}
	fmt.Fprintf(p.Out, "%d settings restored\n", n+len(recovered))
	return nil
}

// variantAccelerators returns the accelerators of a variant that act in this kind of place.
func variantAccelerators(file, variant string, pod bool) ([]v1alpha1.Accelerator, error) {
	exp, err := runOptions{}.load([]string{file})
	if err != nil {
		return nil, err
	}
	v, err := exp.VariantOf(variant)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	accelerators := v1alpha1.AcceleratorsFor(v.Accelerate, pod)
	if len(accelerators) == 0 {
		return nil, fmt.Errorf("variant %s of %s has no accelerators for a %s", variant, file, map[bool]string{false: "node", true: "pod"}[pod])
	}
	return accelerators, nil
}

// completeAccelerators completes a preset and then its variants that have accelerators.
func completeAccelerators(c *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
	if len(args) != 1 {
		return completePresets(c, args, typed)
	}
	var names []string
	if exp, err := (runOptions{}).load(args); err == nil {
		for _, v := range exp.Spec.Variants {
			if len(v.Accelerate) > 0 {
				names = append(names, v.Name)
			}
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

func printSettings(w io.Writer, settings []record.Setting) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "SETTING\tBEFORE\tNOW\tWANTED")
	for _, s := range settings {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\n", s.Path, s.Was, s.Got, s.Want)
	}
	return tw.Flush()
}

func printHeld(w io.Writer, held []accel.Held) error {
	if len(held) == 0 {
		_, err := fmt.Fprintln(w, "slipstream has changed no settings on this machine")
		return err
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "PLACE\tSETTING\tBEFORE\tNOW\tWANTED\tHELD BY")
	for _, h := range held {
		var holders []string
		for _, holder := range h.Holders {
			holders = append(holders, holder.String())
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\n", h.Place, h.Path, h.Was, h.Got, h.Want, strings.Join(holders, ", "))
	}
	return tw.Flush()
}

// perKind lists the numbers of the kinds that are not 0.
func perKind(numbers map[string]int) string {
	var all []string
	for _, kind := range slices.Sorted(maps.Keys(numbers)) {
		if n := numbers[kind]; n > 0 {
			all = append(all, fmt.Sprintf("%d %s", n, kind))
		}
	}
	return strings.Join(all, ", ")
}

// printFastpath shows what takes the fast path and why the rest does not, the most frequent reasons
// first.
func printFastpath(w io.Writer, f accel.Fastpath) error {
	fmt.Fprintf(w, "fast path of %s, run by %s\n", f.Place, f.Holder)
	if f.Problem != "" {
		fmt.Fprintf(w, "  all packets take the slow path: %s\n", f.Problem)
	}
	accelerated := fmt.Sprintf("%d accelerated", f.Fast)
	if kinds := perKind(f.Kinds); kinds != "" {
		accelerated += " (" + kinds + ")"
	}
	fmt.Fprintf(w, "  connections: %d known, %s\n", f.Connections, accelerated)
	programs := "none attached (idle: no connection is eligible)"
	if len(f.Hooks) > 0 {
		programs = strings.Join(f.Hooks, " ")
	}
	fmt.Fprintf(w, "  programs: %s\n", programs)
	for _, why := range f.Skipped {
		fmt.Fprintf(w, "  skipped: %s\n", why)
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "  PACKETS\tREASON")
	for _, why := range slices.SortedFunc(maps.Keys(f.Packets), func(a, b string) int {
		return cmp.Or(cmp.Compare(f.Packets[b], f.Packets[a]), cmp.Compare(a, b))
	}) {
		if n := f.Packets[why]; n > 0 {
			fmt.Fprintf(tw, "  %d\t%s\n", n, why)
		}
	}
	return tw.Flush()
}
