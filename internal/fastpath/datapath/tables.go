//go:build linux

package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// tables holds the tables of bpf/fastpath/index.h: outer headers and pods' links.
type tables struct {
	all []*table
	// grace is a map of maps, and inner the map in it: see wait.
	grace, inner *ebpf.Map
}

type table struct {
	states *ebpf.Memory
	// of returns the entries that a flow refers to; 0 is none.
	of func(*fastpathFlow) [2]uint32
	// retired holds the entries that programs no longer find.
	retired map[uint32]bool
}

func (t *tables) open(o *fastpathObjects) error {
	add := func(states *ebpf.Map, of func(*fastpathFlow) [2]uint32) error {
		memory, err := states.Memory()
		t.all = append(t.all, &table{memory, of, make(map[uint32]bool)})
		return err
	}
	err := errors.Join(
		add(o.EncapStates, func(f *fastpathFlow) [2]uint32 {
			if _, is := toPod(f.Out.Template); is {
				return [2]uint32{}
			}
			return [2]uint32{f.Out.Template}
		}),
		add(o.DecapStates, func(f *fastpathFlow) [2]uint32 { return [2]uint32{f.DecappedTemplate} }),
		add(o.PodLinkStates, func(f *fastpathFlow) [2]uint32 {
			if peer, is := toPod(f.Out.Template); is {
				return [2]uint32{f.In.Template, peer}
			}
			return [2]uint32{f.In.Template}
		}),
	)
	inner := &ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}
	if err == nil {
		t.inner, err = ebpf.NewMap(inner)
	}
	if err == nil {
		t.grace, err = ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 1, InnerMap: inner})
	}
	if err != nil {
		return fmt.Errorf("open the tables of the fast path: %w", err)
	}
	return nil
}

func (t *tables) close() error { return errors.Join(t.grace.Close(), t.inner.Close()) }

// wait waits until all running programs have ended. The kernel does that when a map of maps is updated (maybe_wait_bpf_programs
// in kernel/bpf/syscall.c).
func (t *tables) wait() error { return t.grace.Put(uint32(0), t.inner) }

// stateSize is the size of an entry's state. Only its first byte is used.
const stateSize = 8

// taken returns the entries that are not free.
func (t *table) taken() (map[uint32]bool, error) {
	states := make([]byte, t.states.Size())
	if _, err := t.states.ReadAt(states, 0); err != nil {
		return nil, fmt.Errorf("read which entries are in use: %w", err)
	}
	all := make(map[uint32]bool)
	for i := 0; i < len(states); i += stateSize {
		switch fastpathEntryState(states[i]) {
		case fastpathEntryStateENTRY_IN_USE, fastpathEntryStateENTRY_RETIRED:
			all[uint32(i/stateSize)] = true
		}
	}
	return all, nil
}

func (t *table) set(entry uint32, state fastpathEntryState) error {
	if _, err := t.states.WriteAt([]byte{byte(state)}, int64(entry)*stateSize); err != nil {
		return fmt.Errorf("set the state of entry %d: %w", entry, err)
	}
	return nil
}

// Recycle frees the outer headers and pods' links to which no flow refers. It first retires such an entry: programs no longer
// find it, but one that has already found it may still store it in a flow. The next call frees the entry, unless a flow refers
// to it by then. Recycle is not safe for concurrent use.
func (p *Programs) Recycle() error {
	if err := p.recycle(); err != nil {
		return fmt.Errorf("free unused entries of the fast path's tables: %w", err)
	}
	return nil
}

func (p *Programs) recycle() error {
	unused := make(map[*table]map[uint32]bool)
	for _, t := range p.tables.all {
		taken, err := t.taken()
		if err != nil {
			return err
		}
		if len(taken) > 0 {
			unused[t] = taken
		}
	}
	if len(unused) == 0 {
		return nil
	}
	if err := each(p.objects.Flows, func(_ fastpathKey, v fastpathFlow) error {
		for t, entries := range unused {
			for _, entry := range t.of(&v) {
				delete(entries, entry)
			}
		}
		return nil
	}); err != nil {
		return err
	}
	n := 0
	for t, entries := range unused {
		for entry := range entries {
			n++
			if err := t.set(entry, fastpathEntryStateENTRY_RETIRED); err != nil {
				return err
			}
		}
	}
	if n == 0 {
		return nil
	}
	if err := p.tables.wait(); err != nil {
		return err
	}
	for t, entries := range unused {
		for entry := range entries {
			if !t.retired[entry] {
				t.retired[entry] = true
				continue
			}
			delete(t.retired, entry)
			if err := t.set(entry, fastpathEntryStateENTRY_FREE); err != nil {
				return err
			}
		}
	}
	return nil
}
