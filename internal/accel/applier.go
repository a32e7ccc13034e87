package accel

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/journal"
	"slipstream.dev/internal/accel/kernel"
	"slipstream.dev/internal/record"
)

// Applier applies accelerators in one place until they are reverted. Apply, Revert and Close are
// called in turn, the rest at any time.
type Applier struct {
	*place

	// mu guards what the follower shares.
	mu       sync.Mutex
	applied  *Plan
	settings []record.Setting
	// followed are the devices that the plan is applied to, by index.
	followed map[int]string
	follower *follower
}

// OpenApplier prepares an applier in the calling thread's network namespace and changes nothing.
// Close it after use.
func OpenApplier(o Options) (*Applier, error) {
	p, err := openPlace(o)
	if err != nil {
		return nil, err
	}
	return &Applier{place: p}, nil
}

// Close stops following devices and lets go of what OpenApplier opened. It reverts nothing:
// that is Revert's, or Recover's once the process has ended.
func (a *Applier) Close() error {
	a.stopFollowing()
	return a.place.close()
}

// Plan returns what Apply would set now, and touches nothing: Was and Got are
// both what stands there.
func (a *Applier) Plan(_ context.Context, accelerators []v1alpha1.Accelerator) ([]record.Setting, error) {
	devices, err := a.devices()
	if err != nil {
		return nil, err
	}
	p, err := a.plan(v1alpha1.ForPolicy(accelerators...), devices)
	if err != nil {
		return nil, err
	}
	machine, queues, err := p.changes(kernel.Sysctls{Proc: a.options.Proc}, a.sys, devices)
	if err != nil {
		return nil, err
	}
	if err := a.checkPlan(machine, queues); err != nil {
		return nil, err
	}
	var settings []record.Setting
	for _, c := range slices.Concat(machine, queues) {
		settings = append(settings, record.Setting{Place: a.options.Place.Name, Path: c.Path, Want: c.Want, Got: c.Was, Was: c.Was})
	}
	for _, r := range a.runners {
		if want := p.wantOf(r.kind); want != nil {
			planned, err := r.Plan(*want)
			if err != nil {
				return nil, err
			}
			settings = append(settings, planned...)
		}
	}
	return settings, nil
}

// checkPlan returns an error if the memory does not suffice for changes of the machine and of the place.
func (a *Applier) checkPlan(machine, queues []journal.Change) error {
	ofMachine, err := a.journal.Machine()
	if err != nil {
		return err
	}
	ofPlace, err := a.journal.Namespace(a.id, a.options.Place.Name, a.sys, a.links)
	if err != nil {
		return err
	}
	return a.checkMemory(journal.Changes{Book: ofMachine, Changes: machine}, journal.Changes{Book: ofPlace, Changes: queues})
}

// Apply sets the accelerators on every device of their classes, returns what
// read back, and keeps devices that appear later in step until Revert or Close.
// A setting whose Got is not its Want did not read back: the kernel took the
// write and made something else of it, which is not an error.
//
// Either all is applied or nothing is. A value that somebody else holds
// otherwise is ErrHeld. What dead processes left here is recovered first.
func (a *Applier) Apply(ctx context.Context, accelerators []v1alpha1.Accelerator) ([]record.Setting, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if a.applied != nil {
		return nil, fmt.Errorf("apply accelerators to %s: some are applied; revert them first", a.options.Place.Name)
	}
	var settings []record.Setting
	err := a.checkLifetime(accelerators)
	if err == nil {
		settings, err = a.apply(ctx, accelerators)
	}
	if err != nil {
		return nil, Forbidden(fmt.Errorf("apply accelerators to %s: %w", a.options.Place.Name, err))
	}
	return settings, nil
}

func (a *Applier) apply(ctx context.Context, accelerators []v1alpha1.Accelerator) ([]record.Setting, error) {
	// Subscribed before the devices are listed, so that none is missed between.
	updates, err := subscribe(a.ns)
	if err != nil {
		return nil, err
	}
	var p *Plan
	var devices []Device
	var settings []record.Setting
	err = a.transact(ctx, true, func(machine, place *journal.Book) error {
		// Within, as what dead processes had set is restored by now.
		if devices, err = a.devices(); err != nil {
			return err
		}
		if p, err = a.plan(v1alpha1.ForPolicy(accelerators...), devices); err != nil {
			return err
		}
		table, queues, err := p.changes(machine.Store, place.Store, devices)
		if err != nil {
			return err
		}
		settings, err = a.set(journal.Changes{Book: machine, Changes: table}, journal.Changes{Book: place, Changes: queues})
		return err
	})
	if err != nil {
		updates.close()
		return nil, err
	}
	if err := a.start(p); err != nil {
		updates.close()
		_, undone := a.release(context.WithoutCancel(ctx))
		return nil, errors.Join(err, undone)
	}
	a.applied, a.settings, a.followed = p, settings, p.names(devices)
	maps.DeleteFunc(a.followed, func(_ int, name string) bool { return !hasDevice(settings, name) })
	a.follower = a.follow(updates)
	return a.all(), nil
}

// start starts what the plan wants to run, all or nothing.
func (a *Applier) start(p *Plan) error {
	for _, r := range a.runners {
		if want := p.wantOf(r.kind); want != nil {
			if err := r.Start(*want); err != nil {
				return errors.Join(err, a.stopRunners())
			}
		}
	}
	return nil
}

// Settings returns what is applied now, on devices that came later too.
func (a *Applier) Settings() []record.Setting {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.all()
}

// all that is applied now.
func (a *Applier) all() []record.Setting {
	return append(slices.Clone(a.settings), a.attached()...)
}

// Revert lets go of everything that this session's holder has here, by this
// session or an earlier one, and restores, the newest first, what nobody else
// holds. It returns how many settings it wrote back. Those that somebody else
// changed meanwhile stay as they are and make the error an ErrChanged; what
// could not be restored stays in the journal.
//
// It runs to its end whether or not ctx is cancelled: a machine that is half
// reverted is nobody's wish.
func (a *Applier) Revert(ctx context.Context) (restored int, err error) {
	a.stopFollowing()
	a.mu.Lock()
	defer a.mu.Unlock()
	stopped := a.stopRunners()
	restored, err = a.release(ctx)
	a.applied, a.settings, a.followed = nil, nil, nil
	if err := errors.Join(stopped, err); err != nil {
		return restored, fmt.Errorf("revert accelerators of %s: %w", a.options.Place.Name, err)
	}
	return restored, nil
}

// release lets go of all that the holder has here.
func (a *Applier) release(ctx context.Context) (restored int, err error) {
	err = a.transact(ctx, true, func(machine, place *journal.Book) error {
		var errs []error
		for _, b := range []*journal.Book{place, machine} {
			settings, err := b.ReleaseHolder(a.holder)
			restored += len(settings)
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
	return restored, err
}

// set makes changes, the machine's before those of the queues that index its table.
func (a *Applier) set(steps ...journal.Changes) ([]record.Setting, error) {
	if err := a.checkMemory(steps...); err != nil {
		return nil, err
	}
	settings, err := journal.Set(a.holder, steps...)
	for i := range settings {
		settings[i].Place = a.options.Place.Name
	}
	return settings, err
}
