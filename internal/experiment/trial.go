package experiment

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
)

// slack bounds how much longer than its traffic a trial may take.
const slack = 30 * time.Second

// trial applies a variant, measures a cell, and puts everything back.
func (n *network) trial(ctx context.Context, owner string, c Cell, out *record.Trial, moved func(bytes, messages uint64)) (err error) {
	run, most := ctx, c.time()+c.preparation()+slack
	ctx, cancel := context.WithTimeoutCause(ctx, most, fmt.Errorf("the trial has not ended %s after its traffic", slack))
	defer cancel()
	defer func() {
		if err != nil && ctx.Err() != nil {
			err = n.slow(run, err)
		}
	}()
	pairs, err := n.pairs(out.Block, c)
	if err != nil {
		return err
	}
	settings, failed, err := n.apply(ctx, owner, c, pairs)
	if err == nil {
		err = n.withChanges(ctx, c, out, func() error { return n.measure(ctx, c, pairs, failed, out, moved) })
	}
	// Revert what was applied, however the trial ended.
	back, stop := context.WithTimeout(context.WithoutCancel(ctx), restoreTime)
	defer stop()
	held, revertErr := n.revert(back, c, pairs)
	out.Settings = inForce(settings, held)
	if err := errors.Join(err, revertErr); err != nil {
		return err
	}
	out.Warnings = append(out.Warnings, warnings(c, out)...)
	out.Warnings = append(out.Warnings, congestionWarnings(n.setup.CongestionControl, out.PerPair)...)
	out.Warnings = append(out.Warnings, n.heldWarnings()...)
	if len(out.Settings) > 0 && slices.ContainsFunc(c.Variant.Accelerate, v1alpha1.Accelerator.Steers) {
		out.Warnings = append(out.Warnings, n.interruptWarnings()...)
	}
	return nil
}

// slow extends the error of a trial that took too long: it says so if the network's server is slow.
func (n *network) slow(ctx context.Context, err error) error {
	if target, ok := n.Network.(Slow); ok && ctx.Err() == nil {
		if why := target.Slow(ctx); why != nil {
			return fmt.Errorf("%w: %w", why, err)
		}
	}
	return err
}

// withChanges measures while the network makes the changes of a variant, and records how many it made per second.
func (n *network) withChanges(ctx context.Context, c Cell, out *record.Trial, measure func() error) error {
	changes, ok := n.Network.(EndpointChanger)
	if !ok {
		return measure()
	}
	begin := time.Now()
	perSecond, stop, err := changes.Change(ctx, c.Variant)
	if err != nil {
		return err
	}
	err = measure()
	made, changeErr := stop()
	seconds := time.Since(begin).Seconds()
	out.EndpointChanges = float64(made) / seconds
	out.Warnings = append(out.Warnings, changeWarnings(perSecond, made, seconds)...)
	return errors.Join(err, changeErr)
}

// apply applies a cell's accelerators in all places concurrently. In a mesh it returns the nodes where that failed: only
// their pairs fail.
func (n *network) apply(ctx context.Context, owner string, c Cell, pairs []pairEnds) (all []record.Setting, failed map[string]error, err error) {
	var mu sync.Mutex
	failed = make(map[string]error)
	var tasks []func() error
	for _, s := range n.steered(c, pairs) {
		mine := v1alpha1.AcceleratorsFor(c.Variant.Accelerate, s.place.Kind == place.Pod)
		tasks = append(tasks, func() error {
			settings, err := n.applyTo(ctx, s, place.Steering{Place: s.place, Accelerators: mine, Owner: owner})
			mu.Lock()
			defer mu.Unlock()
			all = append(all, settings...)
			if err != nil && c.Round > 0 && ctx.Err() == nil {
				failed[s.place.Node], err = err, nil
			}
			return err
		})
	}
	err = inParallel(tasks)
	return all, failed, err
}

// applyTo sets accelerators in one place.
func (n *network) applyTo(ctx context.Context, s end, what place.Steering) ([]record.Setting, error) {
	w, err := n.openWorker(ctx, s.key, s.place)
	if err != nil {
		return nil, err
	}
	settings, err := w.Apply(ctx, what)
	if err != nil {
		n.drop(s.key)
		return nil, fmt.Errorf("apply to %s: %w", s.place.Name, err)
	}
	return settings, nil
}

// revert reverts a cell's accelerators, and returns the settings that were in force until then. The error contains a
// place.ChangedError if somebody else has changed some: which value they had in a part of the window is unknown.
func (n *network) revert(ctx context.Context, c Cell, pairs []pairEnds) ([]record.Setting, error) {
	var mu sync.Mutex
	var all []record.Setting
	var tasks []func() error
	for _, s := range n.steered(c, pairs) {
		tasks = append(tasks, func() error {
			settings, err := n.revertIn(ctx, c, s)
			mu.Lock()
			defer mu.Unlock()
			all = append(all, settings...)
			return err
		})
	}
	return all, inParallel(tasks)
}

// revertIn reverts the accelerators in one place.
func (n *network) revertIn(ctx context.Context, c Cell, s end) ([]record.Setting, error) {
	w, err := n.openWorker(ctx, s.key, s.place)
	if c.Round > 0 && errors.Is(err, place.ErrLost) {
		return nil, nil // the others continue
	}
	if err != nil {
		return nil, err
	}
	settings, err := w.Revert(ctx)
	if _, changed := errors.AsType[place.ChangedError](err); err == nil || changed {
		return settings, err
	}
	n.drop(s.key)
	// The next worker restores what the journal says of a dead one.
	w, again := n.openWorker(ctx, s.key, s.place)
	if again == nil {
		_, again = w.Revert(ctx)
	}
	if again == nil || c.Round > 0 && errors.Is(again, place.ErrLost) {
		return nil, nil
	}
	return nil, fmt.Errorf("revert %s: %w", s.place.Name, errors.Join(err, again))
}

// inForce returns the settings of a trial: those that were reverted, and those that were applied in a place whose worker has not
// told what it reverted.
func inForce(applied, reverted []record.Setting) []record.Setting {
	all := slices.Clone(reverted)
	for _, s := range applied {
		if !slices.ContainsFunc(reverted, func(r record.Setting) bool { return r.Place == s.Place }) {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b record.Setting) int {
		return cmp.Or(cmp.Compare(a.Place, b.Place), cmp.Compare(a.Path, b.Path))
	})
	return all
}
