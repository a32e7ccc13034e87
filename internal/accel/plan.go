package accel

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"slices"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/cpuset"
	"slipstream.dev/internal/accel/journal"
	"slipstream.dev/internal/accel/kernel"
)

// ErrConflict means that two accelerators want different values of one setting.
var ErrConflict = errors.New("two accelerators want different values of one setting")

// Conflict is an ErrConflict whose text names the setting and both values.
type Conflict string

func (c Conflict) Error() string { return string(c) }

// Is reports that every Conflict is an ErrConflict.
func (c Conflict) Is(e error) bool { return e == ErrConflict }

// Impossible says why a device cannot have a setting.
type Impossible string

func (i Impossible) Error() string { return string(i) }

// Plan holds the settings and runners that accelerators need in one place.
type Plan struct {
	resolve func(spec string) (cpuset.Set, error)
	// machine holds the machine-wide settings, sorted by path.
	machine []wanted
	// queues holds the settings of receive queues by device class, sorted by file.
	queues map[string][]wanted
	// run holds the accelerators to run, by kind.
	run map[string]v1alpha1.PolicyAccelerator
}

// wanted is a setting and its value.
type wanted struct {
	file, want string
	// value computes the value for a queue of a device from its current value. If it is nil, the value is want.
	value func(d Device, was string) (string, error)
}

// makePlan merges accelerators. If two want different values of one setting, the error is a Conflict.
func makePlan(kinds map[string]Kind, accelerators []v1alpha1.PolicyAccelerator, resolve func(spec string) (cpuset.Set, error)) (*Plan, error) {
	p := &Plan{resolve: resolve, queues: make(map[string][]wanted), run: make(map[string]v1alpha1.PolicyAccelerator)}
	for i, a := range accelerators {
		k, err := kindOf(kinds, a)
		if err == nil {
			err = k.Plan(p, a)
		}
		if err != nil {
			return nil, fmt.Errorf("accelerator %d: %w", i+1, err)
		}
	}
	return p, nil
}

// CPUs resolves the CPUs that an accelerator names.
func (p *Plan) CPUs(spec string) (cpuset.Set, error) { return p.resolve(spec) }

// Machine plans the value of a machine-wide setting. If another accelerator wants a different value, Machine returns that
// value.
func (p *Plan) Machine(path, want string) (other string) {
	return add(&p.machine, wanted{file: path, want: want})
}

// Queues plans a setting of every receive queue of the devices of a class. value computes the value to write from the current
// one, or returns why the device cannot have the setting, whatever the current value is. want identifies the value: if another
// accelerator wants a different one, Queues returns its want.
func (p *Plan) Queues(class, file, want string, value func(d Device, was string) (string, error)) (other string) {
	all := p.queues[class]
	other = add(&all, wanted{file, want, value})
	p.queues[class] = all
	return other
}

func add(all *[]wanted, w wanted) (other string) {
	i, found := slices.BinarySearchFunc(*all, w.file, func(a wanted, file string) int { return cmp.Compare(a.file, file) })
	switch {
	case !found:
		*all = slices.Insert(*all, i, w)
	case (*all)[i].want != w.want:
		return (*all)[i].want
	}
	return ""
}

// Run plans to run an accelerator. If another one of its kind is already planned, Run returns that one.
func (p *Plan) Run(a v1alpha1.PolicyAccelerator) (other *v1alpha1.PolicyAccelerator) {
	if had, ok := p.run[a.Kind()]; ok {
		return &had
	}
	p.run[a.Kind()] = a
	return nil
}

// wantOf returns the accelerator that the Runner of a kind has to run, or nil.
func (p *Plan) wantOf(kind string) *v1alpha1.PolicyAccelerator {
	if a, ok := p.run[kind]; ok {
		return &a
	}
	return nil
}

// Sets reports whether the plan sets a setting of the machine, or of a device of a class.
func (p *Plan) Sets(class string, s SettingOf) bool {
	if p == nil {
		return false
	}
	all := p.queues[class]
	if s.Link == 0 {
		all = p.machine
	}
	return slices.ContainsFunc(all, func(w wanted) bool { return path.Base(w.file) == s.File })
}

// matches reports whether p sets anything on d.
func (p *Plan) matches(d Device) bool {
	_, ok := p.queues[d.Class]
	return ok
}

// fits returns why one of the devices cannot have a setting that p wants on it, or nil.
func (p *Plan) fits(devices []Device) error {
	for _, d := range devices {
		for _, w := range p.queues[d.Class] {
			if d.RxQueues == 0 {
				continue
			}
			if _, err := w.value(d, ""); err != nil {
				return err
			}
		}
	}
	return nil
}

// changes reads the current values of the settings that p wants: those of the machine, and those of the devices' queues. It
// ignores devices that are gone. It leaves out a setting that a device cannot have and passes it to refuse; if refuse is nil,
// that is an error.
func (p *Plan) changes(machine, place kernel.Store, devices []Device, refuse func(Refusal)) (table, queues []journal.Change, err error) {
	for _, w := range p.machine {
		was, err := machine.Read(w.file)
		if err != nil {
			return nil, nil, fmt.Errorf("read %s: %w", w.file, err)
		}
		table = append(table, journal.Change{Path: w.file, Was: was, Want: w.want})
	}
	for _, d := range devices {
		if !p.matches(d) {
			continue
		}
		c, err := d.changes(place, p.queues[d.Class], refuse)
		if kernel.Gone(err) {
			if _, still := place.Read("class/net/" + d.Name + "/ifindex"); still == nil {
				return nil, nil, fmt.Errorf("%w: the kernel lacks CONFIG_RPS", err)
			}
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		queues = append(queues, c...)
	}
	return table, queues, nil
}

func (d Device) changes(place kernel.Store, all []wanted, refuse func(Refusal)) (changes []journal.Change, err error) {
	for i := range d.RxQueues {
		for _, w := range all {
			path := kernel.Queue(d.Name, i, w.file)
			was, err := place.Read(path)
			if err != nil {
				return nil, fmt.Errorf("read %s: %w", path, err)
			}
			want, err := w.value(d, was)
			switch {
			case err != nil && refuse == nil:
				return nil, err
			case err != nil && i == 0: // once for all queues
				refuse(Refusal{SettingOf{d.Index, w.file}, err})
			}
			if err != nil {
				continue
			}
			changes = append(changes, journal.Change{Path: path, Link: d.Index, Was: was, Want: want})
		}
	}
	return changes, nil
}
