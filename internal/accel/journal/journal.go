// Package journal changes settings of the kernel so that they can be restored, however the process ends. Before it changes a
// setting, it writes the old value, the new value and the holder to a file. Several holders may want a setting at the same
// value; it is restored when the last of them has released it or ended. A setting that somebody else has changed stays as it
// is.
//
// There is one journal for a machine: a folder with a file for each network namespace, and one for
// the machine-wide settings. internal/accel knows the purpose of the settings.
package journal

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"slipstream.dev/internal/accel/kernel"
	"slipstream.dev/internal/flock"
	"slipstream.dev/internal/netns"
)

var (
	// ErrHeld means that somebody else holds a setting at another value.
	ErrHeld = errors.New("held at another value")
	// ErrChanged means that a setting had neither its original value nor the one that was set: somebody else has changed it, so
	// it was not restored.
	ErrChanged = errors.New("changed by somebody else, left as it is")
)

// OnlyChanged reports whether an error consists of ErrChanged errors only.
func OnlyChanged(err error) bool {
	switch e := err.(type) {
	case interface{ Unwrap() []error }:
		return !slices.ContainsFunc(e.Unwrap(), func(err error) bool { return !OnlyChanged(err) })
	case interface{ Unwrap() error }:
		return OnlyChanged(e.Unwrap())
	}
	return err == ErrChanged
}

// Journal is a folder of ledgers.
type Journal struct {
	dir, proc string
	boot      string
}

// Open opens a journal, which need not exist. proc is the root of a procfs.
func Open(dir, proc string) (*Journal, error) {
	boot, err := Boot(proc)
	if err != nil {
		return nil, err
	}
	return &Journal{dir: dir, proc: proc, boot: boot}, nil
}

// Boot returns the ID of the machine's boot. proc is the root of a procfs.
func Boot(proc string) (string, error) {
	id, err := os.ReadFile(filepath.Join(proc, "sys/kernel/random/boot_id"))
	if err != nil {
		return "", fmt.Errorf("read boot id: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}

// Lock excludes all other transactions on the machine, in any namespace, until unlock. Transactions take milliseconds, and the
// lock ends with its process.
func (j *Journal) Lock() (unlock func(), err error) {
	if err := os.MkdirAll(j.dir, 0o700); err != nil {
		return nil, fmt.Errorf("make journal: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(j.dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open journal lock: %w", err)
	}
	if err = flock.Lock(f); err == nil {
		// A process that was killed while writing has left half a ledger.
		if err = os.Remove(filepath.Join(j.dir, unfinished)); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	if err != nil {
		_ = flock.Release(f)
		return nil, fmt.Errorf("lock journal %s: %w", j.dir, err)
	}
	return func() { _ = flock.Release(f) }, nil
}

// unfinished is the file to which the holder of the lock writes a ledger.
const unfinished = "unfinished.json"

// ledgerFile returns the name of the ledger of a namespace, or of the machine.
func ledgerFile(id netns.ID) string {
	if id.Cookie == 0 {
		return "machine.json"
	}
	return fmt.Sprintf("netns-%d.json", id.Cookie)
}

// Machine opens the book of the machine's settings.
func (j *Journal) Machine() (*Book, error) {
	return j.Book(netns.ID{}, "machine", kernel.Sysctls{Proc: j.proc})
}

// Namespace opens the book of a network namespace, and updates it to the current names of devices. s and links must belong to
// that namespace. place is its name if it has no ledger yet.
func (j *Journal) Namespace(id netns.ID, place string, s kernel.Store, links kernel.Links) (*Book, error) {
	b, err := j.Book(id, place, s)
	if err != nil {
		return nil, err
	}
	return b, b.rename(links)
}

// Book opens the book of a network namespace, or begins one. s reads and writes its settings.
func (j *Journal) Book(id netns.ID, place string, s kernel.Store) (*Book, error) {
	l, err := j.read(ledgerFile(id))
	if err != nil {
		return nil, err
	}
	if l.Boot != j.boot {
		l.Place, l.ID = place, id
	}
	return j.open(l, s), nil
}

// open opens the book of a ledger. It drops the entries of an earlier boot.
func (j *Journal) open(l ledger, s kernel.Store) *Book {
	b := &Book{ledger: l, file: filepath.Join(j.dir, ledgerFile(l.ID)), Store: s, proc: j.proc}
	if l.Boot != j.boot {
		b.dirty = len(l.Entries) > 0
		b.ledger = ledger{Version: ledgerVersion, Boot: j.boot, Place: l.Place, ID: l.ID}
	}
	return b
}

// read returns the ledger in a file, or the zero ledger if there is none.
func (j *Journal) read(name string) (ledger, error) {
	file := filepath.Join(j.dir, name)
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return ledger{}, nil
	}
	if err != nil {
		return ledger{}, fmt.Errorf("read journal: %w", err)
	}
	l, err := decodeLedger(b)
	if err == nil && ledgerFile(l.ID) != name {
		err = fmt.Errorf("it belongs in %s", ledgerFile(l.ID))
	}
	if err != nil {
		return ledger{}, fmt.Errorf("journal %s is damaged, nothing was restored from it "+
			"(restore by hand the settings that it names, then remove it): %w", file, err)
	}
	return l, nil
}
