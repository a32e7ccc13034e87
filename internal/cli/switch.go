package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

// cleanupSwitched undoes the switches of killed runs in results folders.
func cleanupSwitched(ctx context.Context, p Process, dirs []string, dryRun, yes bool) error {
	var errs []error
	for _, path := range dirs {
		err := cleanupDir(ctx, p, path, dryRun, yes)
		if err != nil && !strings.Contains(err.Error(), path) { // many name it already
			err = fmt.Errorf("%s: %w", path, err)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func cleanupDir(ctx context.Context, p Process, path string, dryRun, yes bool) error {
	path, err := findResult(path)
	if err != nil {
		return usage(err)
	}
	dir, err := record.OpenLocked(path) // fails while a run is in progress
	if err != nil {
		return err
	}
	defer dir.Close()
	foreign := dir.Foreign() // first: if it is nil, nobody else can change what is read below
	exp, err := experimentOf(dir)
	if err != nil {
		return err
	}
	variant, err := dir.SwitchedVariant()
	if err != nil {
		return err
	}
	if variant == "" {
		fmt.Fprintf(p.Out, "%s: nothing is switched\n", path)
		return nil
	}
	v, err := experiment.SwitchedVariant(exp, variant)
	if err != nil {
		return err
	}
	fmt.Fprintf(p.Out, "%s: the commands that undo the switch of %s:\n", path, variant)
	for _, c := range experiment.CommandLines(v.Switch)[1:] {
		fmt.Fprintf(p.Out, "  %s\n", plain.Line(c))
	}
	switch {
	case foreign != nil && !yes:
		return notRunError(foreign)
	case dryRun:
		fmt.Fprintf(p.Out, "would undo: %s: the switch of %s\n", path, variant)
		return nil
	}
	if err := undoSwitch(ctx, dir, exp, newTextProgress(p).note); err != nil {
		return err
	}
	fmt.Fprintf(p.Out, "undone: %s: the switch of %s\n", path, variant)
	return nil
}

// programsRun returns the programs that an experiment makes slipstream run: the commands of switches, an image, and
// what a kubeconfig has for credentials.
func programsRun(exp *spec.Experiment) (all []string) {
	for _, v := range exp.Spec.Variants {
		if v.Switch == nil {
			continue
		}
		for _, c := range experiment.CommandLines(v.Switch) {
			all = append(all, plain.Line(fmt.Sprintf("switch %s, %s", v.Name, c)))
		}
	}
	k := exp.Spec.Target.Kubernetes
	if k == nil {
		return all
	}
	if image := cmp.Or(k.Image, k.BaseImage); image != "" {
		all = append(all, plain.Line("image "+image+", in pods"))
	}
	for _, c := range k.Clusters {
		text := "pods in the cluster of context " + c.Context
		if c.BaseImage != "" {
			text += ", from the image " + c.BaseImage
		}
		if c.Kubeconfig != "" {
			text += ", with the credentials or their plug-in of " + c.Kubeconfig
		}
		all = append(all, plain.Line(text))
	}
	return all
}

// checkPrograms returns an error if an experiment runs programs of its own and its folder may be somebody else's. The
// error lists the programs.
func checkPrograms(exp *spec.Experiment, foreign error) error {
	programs := programsRun(exp)
	if len(programs) == 0 || foreign == nil {
		return nil
	}
	return fmt.Errorf("the run would execute\n  %s\n%w", strings.Join(programs, "\n  "), notRunError(foreign))
}

// notRunError explains why the commands of a folder were not run, and what to do.
func notRunError(foreign error) error {
	return fmt.Errorf("nothing was run, because the folder may be somebody else's: %w. If you trust all that is listed, add --yes", foreign)
}
