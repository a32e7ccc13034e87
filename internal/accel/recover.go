package accel

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"slipstream.dev/internal/accel/journal"
	"slipstream.dev/internal/accel/kernel"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/record"
)

// Recover releases the settings that dead processes hold, on the machine and in every network namespace of the journal. It
// restores those that nobody else holds, and returns the settings that it wrote. If somebody has changed a setting, it stays as
// it is, and the error is an ErrChanged; the others are restored all the same. Recover also removes the sockets of dead fast
// paths. It uses only JournalDir and Proc of o.
func Recover(ctx context.Context, o Options) (restored []record.Setting, err error) {
	o = o.withDefaults()
	err = journal.Each(ctx, o.JournalDir, o.Proc, func(b *journal.Book) error {
		settings, err := b.ReleaseDead()
		restored = append(restored, settings...)
		return errors.Join(err, b.Save())
	})
	swept := journal.With(o.JournalDir, o.Proc, func(*journal.Journal) error { return sweepFast(o.JournalDir) })
	if err = errors.Join(err, swept); err != nil {
		return restored, fmt.Errorf("recover accelerators: %w", err)
	}
	return restored, nil
}

// Held is a setting of the journal.
type Held struct {
	// Got of a Setting is its current value. Place is the name that the first holder gave the network namespace, or "machine".
	record.Setting
	Holders []journal.Holder `json:"holders"`
}

// Status lists the settings that are held on this machine. It uses only JournalDir and Proc of o.
func Status(ctx context.Context, o Options) (held []Held, err error) {
	o = o.withDefaults()
	err = journal.Each(ctx, o.JournalDir, o.Proc, func(b *journal.Book) error {
		for _, e := range b.Entries {
			got, err := b.Store.Read(e.Path)
			if e.Link != 0 && kernel.Gone(err) {
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
	if err != nil {
		return nil, fmt.Errorf("list accelerators: %w", err)
	}
	return held, nil
}

// InForce lists what is accelerated in the calling thread's network namespace, because it affects everything that is measured
// there. There is one phrase per holder. busy maps the kinds that nobody else can use at the same time to their phrases.
// InForce uses only JournalDir and Proc of o.
func InForce(o Options) (all []string, busy map[string]string, err error) {
	o = o.withDefaults()
	defer func() {
		if err != nil {
			err = fmt.Errorf("look for accelerations in force: %w", err)
		}
	}()
	var id netns.ID
	var living map[journal.Holder]int // not dead holders: the next Apply restores their settings
	if err := journal.With(o.JournalDir, o.Proc, func(j *journal.Journal) (err error) {
		if id, err = netns.CurrentID(); err == nil {
			living, err = j.Living(id)
		}
		return err
	}); err != nil || id == (netns.ID{}) { // without a journal, nothing has been accelerated
		return nil, nil, err
	}
	for h, n := range living {
		all = append(all, fmt.Sprintf("%d settings by %s", n, h))
	}
	slices.Sort(all)
	fast, held, err := askFast(fastSocketFile(o.JournalDir, id))
	if held {
		phrase := "the fast path by " + fast.Holder.String()
		all, busy = append(all, phrase), map[string]string{"fastpath": phrase}
	}
	return all, busy, err
}
