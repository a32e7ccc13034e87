package accel

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strconv"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/cpuset"
	"slipstream.dev/internal/accel/journal"
	"slipstream.dev/internal/accel/kernel"
)

// ErrConflict is two accelerators that want one setting at different values.
var ErrConflict = errors.New("one setting is wanted at two values")

// conflict says which.
type conflict string

func (c conflict) Error() string   { return string(c) }
func (c conflict) Is(e error) bool { return e == ErrConflict }

// plan is what accelerators come to in one place.
type plan struct {
	// entries of the machine's flow table; 0 leaves it alone.
	entries int
	// queues says what the queues of a class's devices get.
	queues map[string]queueSettings
	// fastpath is nil where it is not wanted beside them.
	fastpath *v1alpha1.Fastpath
}

type queueSettings struct {
	// cpus is the RPS mask; the empty set leaves it alone.
	cpus cpuset.Set
	// flows are the RFS entries that the queues of one device share; 0 leaves
	// them alone.
	flows int
}

// makePlan merges accelerators; two that want different values of one setting
// are an error.
func makePlan(accelerators []v1alpha1.Accelerator, resolve func(spec string) (cpuset.Set, error)) (*plan, error) {
	p := &plan{queues: make(map[string]queueSettings)}
	for i, a := range accelerators {
		var err error
		switch {
		case a.RPS != nil && a.RFS == nil:
			err = p.addRPS(a.RPS.Devices, a.RPS.CPUs, resolve)
		case a.RFS != nil && a.RPS == nil:
			err = p.addRFS(a.RFS)
			if err == nil && a.RFS.CPUs != "" {
				err = p.addRPS(a.RFS.Devices, a.RFS.CPUs, resolve)
			}
		case a.Fastpath != nil && a.RPS == nil && a.RFS == nil:
			err = p.addFastpath(a.Fastpath)
		default:
			err = errors.New("want exactly one of rps, rfs and fastpath")
		}
		if err != nil {
			return nil, fmt.Errorf("accelerator %d: %w", i+1, err)
		}
	}
	return p, nil
}

func (p *plan) addRPS(classes []string, spec string, resolve func(string) (cpuset.Set, error)) error {
	cpus, err := resolve(spec)
	if err != nil {
		return err
	}
	for _, class := range classes {
		q := p.queues[class]
		if !q.cpus.Empty() && !q.cpus.Equal(cpus) {
			return conflict(fmt.Sprintf("wants the RPS mask of class %s on CPUs %s, another accelerator on %s", class, cpus, q.cpus))
		}
		q.cpus = cpus
		p.queues[class] = q
	}
	return nil
}

func (p *plan) addRFS(rfs *v1alpha1.RFS) error {
	if rfs.Entries <= 0 || rfs.Entries&(rfs.Entries-1) != 0 {
		// The kernel would round up, and read back something else.
		return fmt.Errorf("rfs entries %d: want a power of two", rfs.Entries)
	}
	if p.entries != 0 && p.entries != rfs.Entries {
		return conflict(fmt.Sprintf("wants %d entries of the machine's flow table, another accelerator %d", rfs.Entries, p.entries))
	}
	p.entries = rfs.Entries
	for _, class := range rfs.Devices {
		q := p.queues[class]
		q.flows = rfs.Entries
		p.queues[class] = q
	}
	return nil
}

// addFastpath has the fast path be wanted. What may miss its packets is one policy's to say:
// together two would give up more than either asked for, or less.
func (p *plan) addFastpath(f *v1alpha1.Fastpath) error {
	unseenBy := slices.Sorted(slices.Values(f.UnseenBy))
	if p.fastpath != nil && !slices.Equal(p.fastpath.UnseenBy, unseenBy) {
		return conflict(fmt.Sprintf("wants the fast path unseenBy %q, another accelerator %q", unseenBy, p.fastpath.UnseenBy))
	}
	p.fastpath = &v1alpha1.Fastpath{UnseenBy: unseenBy}
	return nil
}

// matches tells whether p sets anything on d.
func (p *plan) matches(d Device) bool {
	_, ok := p.queues[d.Class]
	return ok
}

// changes reads what stands where p wants something: of the machine's table,
// and of the queues of devices. A device that goes away meanwhile is left out.
func (p *plan) changes(machine, place kernel.Store, devices []Device) (table, queues []journal.Change, err error) {
	if p.entries != 0 {
		was, err := machine.Read(kernel.FlowTable)
		if err != nil {
			return nil, nil, fmt.Errorf("read %s: %w", kernel.FlowTable, err)
		}
		table = append(table, journal.Change{Path: kernel.FlowTable, Was: was, Want: strconv.Itoa(p.entries)})
	}
	for _, d := range devices {
		if !p.matches(d) {
			continue
		}
		c, err := p.queues[d.Class].changes(place, d)
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

func (q queueSettings) changes(place kernel.Store, d Device) ([]journal.Change, error) {
	if q.flows != 0 && q.flows < d.RxQueues {
		return nil, fmt.Errorf("rfs entries %d are fewer than the %d receive queues of %s", q.flows, d.RxQueues, d.Name)
	}
	var changes []journal.Change
	for i := range d.RxQueues {
		if !q.cpus.Empty() {
			path := kernel.Queue(d.Name, i, "rps_cpus")
			was, err := place.Read(path)
			if err != nil {
				return nil, fmt.Errorf("read %s: %w", path, err)
			}
			changes = append(changes, journal.Change{Path: path, Link: d.Index, Was: was, Want: q.cpus.MaskLike(was)})
		}
		if q.flows != 0 {
			path := kernel.Queue(d.Name, i, "rps_flow_cnt")
			was, err := place.Read(path)
			if err != nil {
				return nil, fmt.Errorf("read %s: %w", path, err)
			}
			// A power of two, as the kernel rounds up to one
			// (store_rps_dev_flow_table_cnt in net/core/net-sysfs.c); rounded
			// down, so that the queues together stay within the table.
			share := 1 << (bits.Len(uint(q.flows/d.RxQueues)) - 1)
			changes = append(changes, journal.Change{Path: path, Link: d.Index, Was: was, Want: strconv.Itoa(share)})
		}
	}
	return changes, nil
}
