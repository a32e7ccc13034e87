package accel

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"sync"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/cpuset"
	"slipstream.dev/internal/accel/journal"
	"slipstream.dev/internal/accel/kernel"
	"slipstream.dev/internal/netns"
)

// Keeper keeps accelerators applied in one place. Its user calls Keep again and again with the wanted state. Keep establishes
// it, whatever it finds: original settings, or settings of an earlier process, of another policy, or of somebody else. If it
// cannot set one, it still sets the others.
type Keeper struct {
	*namespace

	mu sync.Mutex
	// wanted is the plan of the last Keep, nil before the first.
	wanted *Plan
	irq    cpuset.Set
}

// OpenKeeper opens a keeper for the calling thread's network namespace. It changes nothing. Close it after use.
func OpenKeeper(o Options) (*Keeper, error) {
	p, err := openNamespace(o)
	if err != nil {
		return nil, err
	}
	return &Keeper{namespace: p}, nil
}

// Close stops the runners and releases the resources of OpenKeeper. Settings stay.
func (k *Keeper) Close() error { return k.namespace.close() }

// SettingOf identifies a setting, such as rps_cpus, on all queues of a device. Link 0 is the machine.
type SettingOf struct {
	Link int
	File string
}

// Count counts the held settings, and those that read back as wanted.
type Count struct{ Held, Verified int }

// Refusal is a setting that Keep could not set: somebody else holds it at another value (ErrHeld), the device cannot have it
// (Impossible), the machine has too little memory for it, or the kernel did not accept it. If SettingOf is empty, Keep could not
// restore a setting, for example because somebody had changed it (ErrChanged).
type Refusal struct {
	SettingOf
	Err error
}

// Kept reports what Keep found and changed.
type Kept struct {
	// Counts counts the held settings.
	Counts map[SettingOf]Count
	// Set counts settings that were not held before, Repaired those that were
	// held but had another value, and Reverted those that were restored.
	Set, Repaired, Reverted int
	Refused                 []Refusal
}

// View is a snapshot of the devices and CPUs of a place.
type View struct {
	Devices []Device
	kinds   map[string]Kind
	resolve func(spec string) (cpuset.Set, error)
}

// Plan returns the plan for accelerators in that place, or why they cannot be applied. If two want different values of one
// setting, the error is an ErrConflict.
func (v View) Plan(accelerators []v1alpha1.PolicyAccelerator) (*Plan, error) {
	return makePlan(v.kinds, accelerators, v.resolve)
}

// Fits returns why one of the devices cannot have a setting that a plan wants on it, or nil.
func (v View) Fits(p *Plan) error { return p.fits(v.Devices) }

// View lists the devices and CPUs of this place. It changes nothing.
func (k *Keeper) View() (View, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	v := View{kinds: k.options.Kinds}
	var err error
	if v.Devices, err = k.devices(); err != nil {
		return v, err
	}
	if v.resolve, k.irq, err = k.resolver(v.Devices); err != nil {
		return v, err
	}
	return v, nil
}

// Keep sets what the accelerators want on the devices of a view. It first restores the holder's settings that are no longer
// wanted, or wanted at another value; then it repairs those that have drifted. It does not follow later changes: when something
// may have changed, call View and Keep again, or KeepDevices. Runners such as the fast path follow changes by themselves. A
// runner that cannot run is not an error: States reports it.
func (k *Keeper) Keep(ctx context.Context, v View, accelerators []v1alpha1.PolicyAccelerator) (kept Kept, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.wanted, err = v.Plan(accelerators); err == nil {
		err = k.transact(ctx, !k.pod(), func(machine, place *journal.Book) error {
			kept, err = k.keep(machine, place, v.Devices, true)
			return err
		})
		// Runners need no journal: one that is no longer wanted must end even if settings cannot be kept.
		for _, r := range k.runners {
			err = errors.Join(err, r.Keep(ctx, k.wanted.wantOf(r.kind), &kept))
		}
	}
	if err != nil {
		return kept, fmt.Errorf("keep accelerators of %s: %w", k.options.Place.Name, err)
	}
	return kept, nil
}

// StopExcept stops the runners of the kinds that are not wanted. Keep does so too, but needs a view, which may fail.
func (k *Keeper) StopExcept(wanted func(kind string) bool) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	var errs []error
	for _, r := range k.runners {
		if !wanted(r.kind) {
			errs = append(errs, r.Stop())
		}
	}
	return errors.Join(errs...)
}

// KeepDevices does for some devices what the last Keep did for all. The caller gives their classes: to list all links, routes
// and addresses would be most of the cost of one new pod among a thousand. It ignores devices that are gone.
func (k *Keeper) KeepDevices(ctx context.Context, devices []Device) (kept Kept, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.wanted == nil {
		return kept, fmt.Errorf("keep accelerators of %s: nothing is kept there yet", k.options.Place.Name)
	}
	there := devices[:0:0]
	for _, d := range devices {
		if d.RxQueues, err = rxQueues(k.sys, d.Name); err == nil {
			there = append(there, d)
		} else if !kernel.Gone(err) {
			return kept, err
		}
	}
	err = k.transact(ctx, !k.pod(), func(machine, place *journal.Book) error {
		kept, err = k.keep(machine, place, there, false)
		return err
	})
	if err != nil {
		return kept, fmt.Errorf("keep accelerators of %s: %w", k.options.Place.Name, err)
	}
	return kept, nil
}

// keep establishes the plan on devices. If all is set, these are all devices, and keep restores every other setting of the
// holder.
func (k *Keeper) keep(machine, place *journal.Book, devices []Device, all bool) (Kept, error) {
	kept := Kept{Counts: make(map[SettingOf]Count)}
	here := make(map[int]bool, len(devices))
	for _, d := range devices {
		here[d.Index] = true
	}
	read := func(refuse func(Refusal)) (table, queues []journal.Change, err error) {
		p := *k.wanted
		if machine == nil || !all {
			p.machine = nil
			return p.changes(nil, place.Store, devices, refuse)
		}
		return p.changes(machine.Store, place.Store, devices, refuse)
	}
	table, queues, err := read(func(r Refusal) { kept.Refused = append(kept.Refused, r) })
	if err != nil {
		return kept, err
	}

	// Restore unwanted settings first: those of the queues before the machine's table, which they index.
	drop := func(b *journal.Book, wanted []journal.Change) error {
		want := make(map[string]string, len(wanted))
		for _, c := range wanted {
			want[c.Path] = c.Want
		}
		restored, err := b.Release(func(e journal.Entry, h journal.Holder) bool {
			return h == k.holder && (all || here[e.Link]) && want[e.Path] != e.Want
		})
		kept.Reverted += len(restored)
		return err
	}
	var dropped []error
	dropped = append(dropped, drop(place, queues))
	if machine != nil && all {
		dropped = append(dropped, drop(machine, table))
	}
	for _, err := range dropped {
		if err != nil {
			kept.Refused = append(kept.Refused, Refusal{Err: Forbidden(err)})
		}
	}
	if kept.Reverted > 0 {
		if table, queues, err = read(func(Refusal) {}); err != nil { // the values have changed
			return kept, err
		}
	}

	if machine != nil && all {
		if err := k.keepChanges(machine, table, &kept); err != nil {
			return kept, err
		}
	}
	return kept, k.keepChanges(place, queues, &kept)
}

func settingOf(c journal.Change) SettingOf { return SettingOf{c.Link, path.Base(c.Path)} }

func (k *Keeper) keepChanges(b *journal.Book, changes []journal.Change, kept *Kept) error {
	tooLarge, err := k.tooLarge(b, changes)
	if err != nil {
		return err
	}
	var mine []journal.Change
	for _, c := range changes {
		if err := tooLarge[c.Path]; err != nil {
			kept.Refused = append(kept.Refused, Refusal{settingOf(c), err})
			continue
		}
		e := b.Find(c.Path)
		added, err := b.AddHolder(k.holder, []journal.Change{c})
		switch {
		case err != nil:
			kept.Refused = append(kept.Refused, Refusal{settingOf(c), err})
			continue
		case added[c.Path]:
			kept.Set++
		case c.Was != c.Want && c.Was != e.Got:
			kept.Repaired++
		}
		mine = append(mine, c)
	}
	if err := b.Save(); err != nil {
		return err
	}
	for _, c := range mine {
		settings, err := b.Put([]journal.Change{c})
		if err != nil {
			kept.Refused = append(kept.Refused, Refusal{settingOf(c), Forbidden(err)})
		}
		for _, set := range settings {
			n := kept.Counts[settingOf(c)]
			n.Held++
			if set.Got == set.Want {
				n.Verified++
			}
			kept.Counts[settingOf(c)] = n
		}
	}
	return b.Save()
}

// IRQCPUs returns the list of the CPUs that took the NIC's interrupts when View last ran, or "" if they are unknown. A pod
// cannot see them.
func (k *Keeper) IRQCPUs() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.irq.String()
}

// Sysfs returns the sysfs of the keeper's network namespace. It is valid until Close.
func (k *Keeper) Sysfs() fs.FS { return k.sys.FS() }

// Cookie returns the cookie of the keeper's network namespace.
func (k *Keeper) Cookie() netns.Cookie { return k.id.Cookie }
