package journal

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"slipstream.dev/internal/accel/kernel"
	"slipstream.dev/internal/record"
)

// Book is a ledger, with its file and access to its settings.
type Book struct {
	ledger
	file  string
	Store kernel.Store
	// names maps the indexes of links to their current names. It is nil if the entries have no links.
	names func(indexes []int) (map[int]string, error)
	proc  string
	// at maps paths to the indexes of entries. It is nil when it has to be built again.
	at map[string]int
	// dirty means that the ledger differs from its file.
	dirty bool
}

// Save replaces the file atomically if something has changed, or removes it if nothing is held. It does not sync the file: the
// page cache survives a killed process, and a crash of the machine resets the settings anyway.
func (b *Book) Save() error {
	if !b.dirty {
		return nil
	}
	if len(b.Entries) == 0 {
		if err := os.Remove(b.file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("clear journal: %w", err)
		}
		b.dirty = false
		return nil
	}
	text, err := json.MarshalIndent(b.ledger, "", "  ")
	if err != nil {
		return fmt.Errorf("encode journal %s: %w", b.file, err)
	}
	temp := filepath.Join(filepath.Dir(b.file), unfinished)
	err = os.WriteFile(temp, append(text, '\n'), 0o600)
	if err == nil {
		err = os.Rename(temp, b.file)
	}
	if err != nil {
		_ = os.Remove(temp) // on a full disk, it takes space that others need
		return fmt.Errorf("write journal %s: %w", b.file, err)
	}
	b.dirty = false
	return nil
}

// rename updates the paths of entries to the current names of their devices, and drops the entries of devices that are gone.
func (b *Book) rename(links kernel.Links) error {
	b.names = links.Names
	if len(b.Entries) == 0 {
		return nil
	}
	names, err := b.names(b.links())
	if err != nil {
		return err
	}
	b.at = nil
	before := slices.Clone(b.Entries)
	b.Entries = slices.DeleteFunc(b.Entries, func(e Entry) bool { return names[e.Link] == "" })
	for i, e := range b.Entries {
		b.Entries[i].Path = kernel.Renamed(e.Path, names[e.Link])
	}
	b.dirty = !slices.EqualFunc(before, b.Entries, func(a, b Entry) bool { return a.Path == b.Path })
	return nil
}

// Change is a setting with its current and its wanted value. Link is the index of the device; 0 is the machine.
type Change struct {
	Path      string
	Link      int
	Was, Want string
}

// Find returns the entry of a setting, or nil.
func (b *Book) Find(path string) *Entry {
	if b.at == nil {
		b.at = make(map[string]int, len(b.Entries))
		for i, e := range b.Entries {
			b.at[e.Path] = i
		}
	}
	if i, ok := b.at[path]; ok {
		return &b.Entries[i]
	}
	return nil
}

func (b *Book) links() []int {
	var indexes []int
	for _, e := range b.Entries {
		indexes = append(indexes, e.Link)
	}
	slices.Sort(indexes)
	return slices.Compact(indexes)
}

// AddHolder adds h to the holders of every change, in memory only, and returns the
// paths that h did not hold before.
func (b *Book) AddHolder(h Holder, changes []Change) (added map[string]bool, err error) {
	for _, c := range changes {
		if e := b.Find(c.Path); e != nil && e.Want != c.Want {
			return nil, fmt.Errorf("set %s of %s to %s: %w: %s holds it at %s; wait for that to end, or revert it",
				c.Path, b.Place, c.Want, ErrHeld, e.Holders[0], e.Want)
		}
	}
	added = make(map[string]bool)
	for _, c := range changes {
		e := b.Find(c.Path)
		if e == nil {
			b.Entries = append(b.Entries, Entry{Path: c.Path, Link: c.Link, Was: c.Was, Want: c.Want})
			b.at[c.Path] = len(b.Entries) - 1
			e = &b.Entries[len(b.Entries)-1]
		}
		if !slices.Contains(e.Holders, h) {
			e.Holders = append(e.Holders, h)
			added[c.Path], b.dirty = true, true
		}
	}
	return added, nil
}

// Put writes the changes and reads them back; call AddHolder and Save first. It skips the changes of devices that are gone.
// Their entries stay for the next transaction, because the devices may only have been renamed. If another value reads back, Put
// records it in the ledger for the next Save: Release then recognises it as ours.
func (b *Book) Put(changes []Change) ([]record.Setting, error) {
	var settings []record.Setting
	for _, c := range changes {
		got, err := c.Was, error(nil)
		if got != c.Want {
			err = b.Store.Write(c.Path, c.Want)
			if err == nil {
				got, err = b.Store.Read(c.Path)
			}
		}
		switch {
		case c.Link != 0 && kernel.Gone(err):
			continue
		case err != nil:
			return nil, fmt.Errorf("set %s of %s to %s: %w", c.Path, b.Place, c.Want, err)
		case got != c.Want:
			b.Find(c.Path).Got, b.dirty = got, true
		}
		settings = append(settings, record.Setting{Place: b.Place, Path: c.Path, Want: c.Want, Got: got, Was: c.Was})
	}
	return settings, nil
}

// Release removes matching holders from the entries, newest entry first, restores the settings without a holder, and saves. It
// returns the settings that it wrote. An entry that cannot be restored keeps its holders, so that the next Release tries again.
func (b *Book) Release(match func(Entry, Holder) bool) (restored []record.Setting, err error) {
	var errs []error
	for i := len(b.Entries) - 1; i >= 0; i-- {
		e := b.Entries[i]
		rest := slices.DeleteFunc(slices.Clone(e.Holders), func(h Holder) bool { return match(e, h) })
		if len(rest) == len(e.Holders) {
			continue
		}
		if len(rest) > 0 {
			b.Entries[i].Holders, b.dirty = rest, true
			continue
		}
		wrote, err := b.restore(e)
		if err != nil {
			errs = append(errs, err)
			if !errors.Is(err, ErrChanged) {
				continue
			}
		}
		if wrote {
			restored = append(restored, record.Setting{Place: b.Place, Path: e.Path, Want: e.Was, Got: e.Was, Was: e.Want})
		}
		b.Entries, b.dirty, b.at = slices.Delete(b.Entries, i, i+1), true, nil
	}
	return restored, errors.Join(append(errs, b.Save())...)
}

// restore writes the original value of e, unless the device is gone. If the setting has a third value, somebody else has chosen
// it, and it stays.
func (b *Book) restore(e Entry) (wrote bool, err error) {
	for {
		wrote, err = b.restoreAt(e)
		if err == nil {
			return wrote, nil
		}
		if e.Link == 0 || !kernel.Gone(err) {
			return false, fmt.Errorf("restore %s of %s to %s: %w", e.Path, b.Place, e.Was, err)
		}
		if b.names == nil {
			return false, nil
		}
		names, err := b.names([]int{e.Link})
		if err != nil {
			return false, err
		}
		path := kernel.Renamed(e.Path, names[e.Link])
		if names[e.Link] == "" || path == e.Path {
			return false, nil
		}
		e.Path = path // the device has just been renamed
	}
}

func (b *Book) restoreAt(e Entry) (wrote bool, err error) {
	now, err := b.Store.Read(e.Path)
	switch {
	case err != nil:
		return false, err
	case now == e.Was:
		return false, nil
	case now != e.Want && (e.Got == "" || now != e.Got):
		return false, fmt.Errorf("%w: it reads %s and was set to %s", ErrChanged, now, e.Want)
	}
	if err := b.Store.Write(e.Path, e.Was); err != nil {
		return false, err
	}
	now, err = b.Store.Read(e.Path)
	if err == nil && now != e.Was {
		err = fmt.Errorf("it reads back %s", now)
	}
	return err == nil, err
}

// ReleaseDead releases the settings that dead processes hold.
func (b *Book) ReleaseDead() ([]record.Setting, error) {
	alive := make(map[Holder]bool)
	for _, e := range b.Entries {
		for _, h := range e.Holders {
			if _, known := alive[h]; known {
				continue
			}
			var err error
			if alive[h], err = h.alive(b.proc); err != nil {
				return nil, fmt.Errorf("look for %s: %w", h, err)
			}
		}
	}
	return b.Release(func(_ Entry, h Holder) bool { return !alive[h] })
}

// ReleaseHolder releases the settings of a holder.
func (b *Book) ReleaseHolder(h Holder) ([]record.Setting, error) {
	return b.Release(func(_ Entry, other Holder) bool { return h == other })
}

// Changes are the changes of one book.
type Changes struct {
	*Book
	Changes []Change
}

// Set adds h as a holder of the changes, saves the books, and then writes the changes in the order of steps. If anything fails,
// it undoes what this call has done.
func Set(h Holder, steps ...Changes) (settings []record.Setting, err error) {
	added := make([]map[string]bool, len(steps))
	for i, s := range steps {
		if added[i], err = s.AddHolder(h, s.Changes); err != nil {
			return nil, err
		}
	}
	undo := func(err error) error {
		for i, s := range slices.Backward(steps) {
			_, undone := s.Release(func(e Entry, other Holder) bool { return h == other && added[i][e.Path] })
			err = errors.Join(err, undone)
		}
		return err
	}
	for _, s := range steps {
		if err := s.Save(); err != nil {
			return nil, undo(err)
		}
	}
	for _, s := range steps {
		done, err := s.Put(s.Changes)
		if err == nil {
			err = s.Save()
		}
		if err != nil {
			return nil, undo(err)
		}
		settings = append(settings, done...)
	}
	return settings, nil
}
