package accel

import (
	"context"
	"fmt"
	"path"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/netns"
)

// Keeping is applying for good. Where Apply is an experiment's, all or nothing
// and taken back at its end, Keep is an agent's: it is told again and again what
// is wanted and makes it so, whether what it finds is new, from a life before,
// from another policy, or changed by somebody. What it cannot set does not hinder
// the rest.

// SettingOf names the settings of one file of a device's queues. The machine's
// flow table is of link 0.
type SettingOf struct {
	Link int
	File string
}

// Count of settings that are held, and of those that read back as wanted.
type Count struct{ Held, Verified int }

// Refusal is something that could not be had: a setting that somebody else holds
// otherwise (ErrHeld) or that the kernel did not take; without a link, one that was not
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
	// Check tells whether accelerators can be had there, and beside each other:
	// two that want one setting at different values are an ErrConflict.
	Check   func([]v1alpha1.Accelerator) error
	resolve func(spec string) (Set, error)
}

// Look lists the devices and CPUs of this place, and touches nothing.
func (s *Session) Look() (View, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var v View
	var err error
	if v.Devices, err = listDevices(s.links, s.sys, s.pod()); err != nil {
		return v, err
	}
	if v.resolve, err = s.resolver(v.Devices); err != nil {
		return v, err
	}
	v.Check = func(accelerators []v1alpha1.Accelerator) error {
		_, err := makePlan(accelerators, v.resolve)
		return err
	}
	return v, nil
}

// Keep makes the devices of a view read what the accelerators want. Settings that
// this session's holder has here and that they do not want, or want otherwise,
// are restored first; those that drifted are set again. It follows nothing: look
// and keep again, or KeepDevices, when something may have changed. The fast path alone
// follows by itself, and what keeps it off is no error but FastpathState's. A session
// either keeps or applies.
func (s *Session) Keep(ctx context.Context, v View, accelerators []v1alpha1.Accelerator) (kept Kept, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.plan, err = makePlan(accelerators, v.resolve); err == nil {
		err = s.transactPlace(ctx, func(machine, place *book) error {
			kept, err = s.keep(machine, place, v.Devices, true)
			return err
		})
	}
	if err == nil {
		err = s.keepFastpath(ctx, &kept)
	}
	if err != nil {
		return kept, fmt.Errorf("keep accelerators of %s: %w", s.options.Place.Name, err)
	}
	return kept, nil
}

// KeepDevices does for some devices what the last Keep did for all: their class
// is the caller's to say, as a listing of every link, route and address would be
// the dearer part where one pod of a thousand has come. Devices that are gone
// are left out.
func (s *Session) KeepDevices(ctx context.Context, devices []Device) (kept Kept, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.plan == nil {
		return kept, fmt.Errorf("keep accelerators of %s: nothing is kept there yet", s.options.Place.Name)
	}
	there := devices[:0:0]
	for _, d := range devices {
		if d.RxQueues, err = rxQueues(s.sys, d.Name); err == nil {
			there = append(there, d)
		} else if !gone(err) {
			return kept, err
		}
	}
	err = s.transactPlace(ctx, func(machine, place *book) error {
		kept, err = s.keep(machine, place, there, false)
		return err
	})
	if err != nil {
		return kept, fmt.Errorf("keep accelerators of %s: %w", s.options.Place.Name, err)
	}
	return kept, nil
}

// transactPlace is transact without the machine's ledger in a pod: its table is
// the node's to keep, once and not by every pod.
func (s *Session) transactPlace(ctx context.Context, fn func(machine, place *book) error) error {
	if !s.pod() {
		return s.transact(ctx, fn)
	}
	unlock, err := s.journal.lock()
	if err != nil {
		return err
	}
	defer unlock()
	place, err := s.journal.namespace(s.id, s.options.Place.Name, s.sys, s.names)
	if err != nil {
		return err
	}
	if err := s.recoverDead(ctx, place); err != nil {
		return err
	}
	return fn(nil, place)
}

// keep holds and sets what the plan wants of devices. If they are all that there
// are, everything else that the holder has is restored.
func (s *Session) keep(machine, place *book, devices []Device, all bool) (Kept, error) {
	kept := Kept{Counts: make(map[SettingOf]Count)}
	here := make(map[int]bool, len(devices))
	for _, d := range devices {
		here[d.Index] = true
	}
	read := func() (table, queues []change, err error) {
		p := *s.plan
		if machine == nil || !all {
			p.entries = 0
			return p.changes(nil, place.store, devices)
		}
		return p.changes(machine.store, place.store, devices)
	}
	table, queues, err := read()
	if err != nil {
		return kept, err
	}

	// What is not wanted any more goes first, the queues before the table.
	drop := func(b *book, wanted []change) error {
		want := make(map[string]string, len(wanted))
		for _, c := range wanted {
			want[c.path] = c.want
		}
		restored, err := b.release(func(e entry, h Holder) bool {
			return h == s.holder && (all || here[e.Link]) && want[e.Path] != e.Want
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
		if err := s.keepChanges(machine, table, &kept); err != nil {
			return kept, err
		}
	}
	return kept, s.keepChanges(place, queues, &kept)
}

func settingOf(c change) SettingOf { return SettingOf{c.link, path.Base(c.path)} }

func (s *Session) keepChanges(b *book, changes []change, kept *Kept) error {
	var mine []change
	for _, c := range changes {
		e := b.find(c.path)
		added, err := b.hold(s.holder, []change{c})
		switch {
		case err != nil:
			kept.Refused = append(kept.Refused, Refusal{settingOf(c), err})
			continue
		case added[c.path]:
			kept.Set++
		case c.was != c.want && c.was != e.Got:
			kept.Repaired++
		}
		mine = append(mine, c)
	}
	if err := b.save(); err != nil {
		return err
	}
	for _, c := range mine {
		settings, err := b.put([]change{c})
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
	return b.save()
}

// IRQCPUs are the CPUs that the last Look found to take the NIC's interrupts, as a
// list; empty if there are none that can be told. A pod cannot find them out.
func (s *Session) IRQCPUs() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.irq.String()
}

// Cookie is that of the session's network namespace.
func (s *Session) Cookie() netns.Cookie { return s.id.Cookie }
