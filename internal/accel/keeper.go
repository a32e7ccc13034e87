package accel

import (
	"context"
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

// Keeper keeps accelerators on in one place. It is told again and again what is wanted, and makes
// it so, whether what it finds is new, from a life before, from another policy, or changed by
// somebody. What it cannot set does not hinder the rest.
type Keeper struct {
	*place

	mu sync.Mutex
	// wanted is what the last Keep was told, nil before it.
	wanted *Plan
	irq    cpuset.Set
}

// OpenKeeper prepares a keeper in the calling thread's network namespace and changes nothing.
// Close it after use.
func OpenKeeper(o Options) (*Keeper, error) {
	p, err := openPlace(o)
	if err != nil {
		return nil, err
	}
	return &Keeper{place: p}, nil
}

// Close stops what runs and lets go of what OpenKeeper opened. Settings stay.
func (k *Keeper) Close() error { return k.place.close() }

// SettingOf names the settings of one file of a device's queues. The machine's
// flow table is of link 0.
type SettingOf struct {
	Link int
	File string
}

// Count of settings that are held, and of those that read back as wanted.
type Count struct{ Held, Verified int }

// Refusal is something that could not be had: a setting that somebody else holds
// otherwise (ErrHeld), for which the memory does not suffice, or that the kernel did not take; without a link, one that was not
// restored, as somebody had changed it (ErrChanged).
type Refusal struct {
	SettingOf
	Err error
}

// Kept is what Keep found and made.
type Kept struct {
	// Counts of what is held of them.
	Counts map[SettingOf]Count
	// Set are settings that were not held before, Repaired those that were and
	// did not read as they should, Reverted those that were restored.
	Set, Repaired, Reverted int
	Refused                 []Refusal
}

// View is a place as Look found it.
type View struct {
	Devices []Device
	kinds   map[string]Kind
	resolve func(spec string) (cpuset.Set, error)
}

// Plan tells what accelerators come to there, or why they cannot be had, alone or beside
// each other: two that want one setting at different values are an ErrConflict.
func (v View) Plan(accelerators []v1alpha1.PolicyAccelerator) (*Plan, error) {
	return makePlan(v.kinds, accelerators, v.resolve)
}

// Look lists the devices and CPUs of this place, and touches nothing.
func (k *Keeper) Look() (View, error) {
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

// Keep makes the devices of a view read what the accelerators want. Settings that
// this keeper's holder has here and that they do not want, or want otherwise,
// are restored first; those that drifted are set again. It follows nothing: look
// and keep again, or KeepDevices, when something may have changed. What runs, such as the
// fast path, follows by itself, and what keeps it off is no error: States have it.
func (k *Keeper) Keep(ctx context.Context, v View, accelerators []v1alpha1.PolicyAccelerator) (kept Kept, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.wanted, err = v.Plan(accelerators); err == nil {
		err = k.transact(ctx, !k.pod(), func(machine, place *journal.Book) error {
			kept, err = k.keep(machine, place, v.Devices, true)
			return err
		})
	}
	for _, r := range k.runners {
		if err == nil {
			err = r.Keep(ctx, k.wanted.wantOf(r.kind), &kept)
		}
	}
	if err != nil {
		return kept, fmt.Errorf("keep accelerators of %s: %w", k.options.Place.Name, err)
	}
	return kept, nil
}

// KeepDevices does for some devices what the last Keep did for all: their class
// is the caller's to say, as a listing of every link, route and address would be
// the dearer part where one pod of a thousand has come. Devices that are gone
// are left out.
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

// keep holds and sets what the plan wants of devices. If they are all that there
// are, everything else that the holder has is restored.
func (k *Keeper) keep(machine, place *journal.Book, devices []Device, all bool) (Kept, error) {
	kept := Kept{Counts: make(map[SettingOf]Count)}
	here := make(map[int]bool, len(devices))
	for _, d := range devices {
		here[d.Index] = true
	}
	read := func() (table, queues []journal.Change, err error) {
		p := *k.wanted
		if machine == nil || !all {
			p.machine = nil
			return p.changes(nil, place.Store, devices)
		}
		return p.changes(machine.Store, place.Store, devices)
	}
	table, queues, err := read()
	if err != nil {
		return kept, err
	}

	// What is not wanted any more goes first, the queues before the table.
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
		if table, queues, err = read(); err != nil { // what stands there is not what stood there
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
		added, err := b.Hold(k.holder, []journal.Change{c})
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

// IRQCPUs are the CPUs that the last Look found to take the NIC's interrupts, as a
// list; empty if there are none that can be told. A pod cannot find them out.
func (k *Keeper) IRQCPUs() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.irq.String()
}

// Sysfs shows the devices of the keeper's network namespace, until Close.
func (k *Keeper) Sysfs() fs.FS { return k.sys.FS() }

// Cookie is that of the keeper's network namespace.
func (k *Keeper) Cookie() netns.Cookie { return k.id.Cookie }
