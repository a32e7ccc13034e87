package accel

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/record"
)

// Recover releases what dead processes hold, on the machine and in every network
// namespace that the journal names, and restores what nobody else holds. It
// returns what it wrote back. Settings that somebody changed meanwhile stay as
// they are, and make the error an ErrChanged; the rest is recovered all the same.
// Sockets of fast paths that nobody answers at any more go too.
// Of o it needs JournalDir and Proc.
func Recover(ctx context.Context, o Options) (restored []record.Setting, err error) {
	o = o.withDefaults()
	err = withJournal(o, func(j *journal) error {
		return errors.Join(j.eachBook(ctx, func(b *book) error {
			settings, err := b.releaseDead()
			restored = append(restored, settings...)
			return errors.Join(err, b.save())
		}), j.sweepFast())
	})
	if err != nil {
		return restored, fmt.Errorf("recover accelerators: %w", err)
	}
	return restored, nil
}

// Held is a setting of the journal.
type Held struct {
	// Setting reads now what Got says. Its Place is what the first holder called
	// the network namespace, or "machine".
	record.Setting
	Holders []Holder
}

// Status lists what is held on this machine. Of o it needs JournalDir and Proc.
func Status(ctx context.Context, o Options) (held []Held, err error) {
	o = o.withDefaults()
	err = withJournal(o, func(j *journal) error {
		return j.eachBook(ctx, func(b *book) error {
			for _, e := range b.Entries {
				got, err := b.store.read(e.Path)
				if e.Link != 0 && gone(err) {
					continue
				}
				if err != nil {
					return fmt.Errorf("read %s of %s: %w", e.Path, b.Place, err)
				}
				held = append(held, Held{
					Setting: record.Setting{Place: b.Place, Path: e.Path, Want: e.Want, Got: got, Was: e.Was},
					Holders: e.Holders,
				})
			}
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list accelerators: %w", err)
	}
	return held, nil
}

// InForce says what is accelerated in the calling thread's network namespace now, and by
// whom, a phrase for each holder: whatever is measured there is measured with it. Of o it
// needs JournalDir and Proc.
func InForce(o Options) (all []string, err error) {
	o = o.withDefaults()
	defer func() {
		if err != nil {
			err = fmt.Errorf("look for accelerations in force: %w", err)
		}
	}()
	if _, err := os.Stat(o.JournalDir); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	j, err := openJournal(o.JournalDir, o.Proc)
	if err != nil {
		return nil, err
	}
	id, err := netns.CurrentID()
	if err != nil {
		return nil, err
	}
	unlock, err := j.lock()
	if err != nil {
		return nil, err
	}
	l, err := j.read(ledgerFile(id))
	unlock()
	if err != nil {
		return nil, err
	}
	if l.Boot != j.boot {
		l.Entries = nil
	}
	settings := make(map[Holder]int)
	for _, e := range l.Entries {
		for _, h := range e.Holders {
			settings[h]++
		}
	}
	for h, n := range settings {
		if alive, err := h.alive(o.Proc); err != nil || !alive {
			continue // the next to apply restores what it left
		}
		all = append(all, fmt.Sprintf("%d settings by %s", n, h))
	}
	slices.Sort(all)
	fast, held, err := askFast(j.fastSocket(id))
	if held {
		all = append(all, fmt.Sprintf("the fast path by %s", fast.Holder))
	}
	return all, err
}

// withJournal calls fn alone on the machine, if there is a journal.
func withJournal(o Options, fn func(*journal) error) error {
	if _, err := os.Stat(o.JournalDir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	j, err := openJournal(o.JournalDir, o.Proc)
	if err != nil {
		return err
	}
	unlock, err := j.lock()
	if err != nil {
		return err
	}
	defer unlock()
	return fn(j)
}

// eachBook calls fn on every ledger, the machine's last, in the network
// namespace it is of; if that cannot be found it is gone, and its settings with
// it. One failure does not keep fn from the other ledgers.
func (j *journal) eachBook(ctx context.Context, fn func(*book) error) error {
	files, err := filepath.Glob(filepath.Join(j.dir, "netns-*.json"))
	if err != nil {
		return err
	}
	slices.Sort(files)
	var errs []error
	for _, file := range files {
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		errs = append(errs, j.visit(filepath.Base(file), fn))
	}
	machine, err := j.machine()
	if err == nil {
		err = fn(machine)
	}
	return errors.Join(append(errs, err)...)
}

// nowhere is where the settings of a namespace that is gone are.
type nowhere struct{}

func (nowhere) read(string) (string, error) { return "", fs.ErrNotExist }
func (nowhere) write(string, string) error  { return fs.ErrNotExist }

func (j *journal) visit(name string, fn func(*book) error) error {
	l, err := j.read(name)
	if err != nil {
		return err
	}
	file, err := netns.Find(j.proc, l.ID)
	if err != nil {
		return fmt.Errorf("find the network namespace of %s: %w", l.Place, err)
	}
	if file == "" {
		b, err := j.open(l.ID, l.Place, nowhere{})
		if err != nil {
			return err
		}
		return fn(b)
	}
	return netns.DoAt(file, func() error { return j.withBook(l, fn) })
}

// withBook calls fn with the ledger of the calling thread's network namespace.
func (j *journal) withBook(l ledger, fn func(*book) error) error {
	sys, err := netns.Sysfs()
	if err != nil {
		return err
	}
	defer sys.Close()
	names, err := openNames()
	if err != nil {
		return err
	}
	defer names.close()
	b, err := j.namespace(l.ID, l.Place, sysfs{sys}, names)
	if err != nil {
		return err
	}
	return fn(b)
}
