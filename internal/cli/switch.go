package cli

import (
	"context"
	"errors"
	"fmt"

	"slipstream.dev/internal/record"
)

// cleanupSwitched undoes the switches of killed runs in results folders.
func cleanupSwitched(ctx context.Context, p Process, dirs []string, dryRun bool) error {
	var errs []error
	for _, path := range dirs {
		if err := cleanupDir(ctx, p, path, dryRun); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

func cleanupDir(ctx context.Context, p Process, path string, dryRun bool) error {
	dir, err := record.Resume(path) // no run is in progress then
	if err != nil {
		return err
	}
	defer dir.Close()
	exp, _, err := readExperiment(dir)
	if err != nil {
		return err
	}
	variant, err := dir.SwitchedFor()
	switch {
	case err != nil:
		return err
	case variant == "":
		fmt.Fprintf(p.Out, "%s: nothing is switched\n", path)
		return nil
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
