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

// Applier applies accelerators in one place until they are reverted. Apply, Revert and Close must not be called concurrently;
// the other methods may.
type Applier struct {
	*namespace

	// mu guards the fields that the follower shares.
	mu       sync.Mutex
	applied  *Plan
	settings []record.Setting
	// followed maps the indexes of the devices to which the plan is applied to their names.
	followed map[int]string
	follower *follower
}

// OpenApplier opens an applier for the calling thread's network namespace. It changes nothing. Close it after use.
func OpenApplier(o Options) (*Applier, error) {
	p, err := openNamespace(o)
	if err != nil {
		return nil, err
	}
	return &Applier{namespace: p}, nil
}

// Close stops following devices and releases the resources of OpenApplier. It does not revert: call Revert, or Recover once the
// process has ended.
func (a *Applier) Close() error {
	a.stopFollowing()
	return a.namespace.close()
}

// Plan returns the settings that Apply would set now, and changes nothing. Was and Got are both the current value.
func (a *Applier) Plan(_ context.Context, accelerators []v1alpha1.Accelerator) ([]record.Setting, error) {
	devices, err := a.devices()
	if err != nil {
		return nil, err
	}
	p, err := a.plan(v1alpha1.ForPolicy(accelerators...), devices)
	if err != nil {
		return nil, err
	}
	machine, queues, err := p.changes(kernel.Sysctls{Proc: a.options.Proc}, a.sys, devices, nil)
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

// checkPlan returns an error if the machine has too little memory for the tables that the changes need.
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

// Apply applies accelerators to all devices of their classes and returns the values that read back. Until Revert or Close, it
// also applies them to devices that appear later. If Got differs from Want, the kernel accepted the write but stored another
// value; that is not an error.
//
// Apply applies all accelerators or none. It returns ErrHeld if somebody else holds a setting at another value. It first
// restores the settings that dead processes left here.
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
	// Subscribe before listing the devices, so that no device is missed in between.
	updates, err := subscribe(a.ns)
	if err != nil {
		return nil, err
	}
	var p *Plan
	var devices []Device
	var settings []record.Setting
	err = a.transact(ctx, true, func(machine, place *journal.Book) error {
		// List inside the transaction, which has just restored the settings of dead processes.
		if devices, err = a.devices(); err != nil {
			return err
		}
		if p, err = a.plan(v1alpha1.ForPolicy(accelerators...), devices); err != nil {
			return err
		}
		table, queues, err := p.changes(machine.Store, place.Store, devices, nil)
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

// start starts all runners of the plan, or none.
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

// Settings returns the applied settings, including those of devices that appeared later.
func (a *Applier) Settings() []record.Setting {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.all()
}

// all returns the applied settings and the attachments of the runners.
func (a *Applier) all() []record.Setting {
	return append(slices.Clone(a.settings), a.attached()...)
}

// Revert releases every setting that the holder has here, from this session or an earlier one. It restores those that nobody
// else holds, newest first, and returns how many it wrote. If somebody else has changed a setting, it stays as it is, and the
// error is an ErrChanged. Settings that could not be restored stay in the journal.
//
// Revert ignores cancellation of ctx: a machine must not be left half reverted.
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

// release releases every setting that the holder has here.
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

// set writes the changes in the order of steps: the machine's flow table must come before the tables of the queues, which index
// it.
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
