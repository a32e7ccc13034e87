package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report"
)

// cleanupSwitched undoes the switches of killed runs in results folders.
func cleanupSwitched(ctx context.Context, p Process, dirs []string, dryRun, yes bool) error {
	var errs []error
	for _, path := range dirs {
		if err := cleanupDir(ctx, p, path, dryRun, yes); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

func cleanupDir(ctx context.Context, p Process, path string, dryRun, yes bool) error {
	dir, err := record.Hold(path) // no run is in progress then
	if err != nil {
		return err
	}
	defer dir.Close()
	foreign := dir.Foreign() // before anything of it is read
	exp, err := experimentOf(dir)
	if err != nil {
		return err
	}
	variant, err := dir.SwitchedFor()
	if err != nil {
		return err
	}
	if variant == "" {
		fmt.Fprintf(p.Out, "%s: nothing is switched\n", path)
		return nil
	}
	v, err := exp.VariantOf(variant)
	if err != nil || v.Switch == nil {
		return fmt.Errorf("undo the switch of %s: the experiment has no such variant with a switch", variant)
	}
	fmt.Fprintf(p.Out, "%s: the commands that undo the switch of %s:\n", path, variant)
	for _, c := range undoing(v.Switch) {
		fmt.Fprintf(p.Out, "  %s\n", report.PlainLine(c))
	}
	switch {
	case foreign != nil && !yes:
		return notRun(foreign)
	case dryRun:
		fmt.Fprintf(p.Out, "would undo: %s: the switch of %s\n", path, variant)
		return nil
	}
	if err := putBack(ctx, dir, exp, newProgress(p).note); err != nil {
		return err
	}
	fmt.Fprintf(p.Out, "undone: %s: the switch of %s\n", path, variant)
	return nil
}

// undoing are the commands that undo a switch.
func undoing(s *v1alpha1.Switch) []string {
	all := []string{"back: " + v1alpha1.CommandText(s.Back)}
	if s.Verify != nil {
		all = append(all, "verify: "+v1alpha1.CommandText(s.Verify))
	}
	return all
}

// executed are the programs of its own that an experiment runs: the commands of switches, and an image.
func executed(exp *v1alpha1.Experiment) (all []string) {
	for _, v := range exp.Spec.Variants {
		if v.Switch == nil {
			continue
		}
		for _, c := range append([]string{"to: " + v1alpha1.CommandText(v.Switch.To)}, undoing(v.Switch)...) {
			all = append(all, fmt.Sprintf("switch %s, %s", v.Name, c))
		}
	}
	if k := exp.Spec.Target.Kubernetes; k != nil && k.Image != "" {
		all = append(all, "pods of the image "+k.Image)
	}
	return all
}

// mayExecute is an error that lists what an experiment of a folder runs, if the folder may be somebody else's.
func mayExecute(exp *v1alpha1.Experiment, foreign error) error {
	programs := executed(exp)
	if len(programs) == 0 || foreign == nil {
		return nil
	}
	for i, c := range programs {
		programs[i] = report.PlainLine(c)
	}
	return fmt.Errorf("the run would execute\n  %s\n%w", strings.Join(programs, "\n  "), notRun(foreign))
}

// notRun says what to do about commands of a folder that may be somebody else's.
func notRun(foreign error) error {
	return fmt.Errorf("nothing was run, because the folder may be somebody else's: %w. If you want to run these commands, add --yes", foreign)
}
