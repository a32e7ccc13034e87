package journal

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/accel/kernel"
	"slipstream.dev/internal/netns"
)

// With calls fn with the journal, if there is one, and holds the machine-wide lock meanwhile.
func With(dir, proc string, fn func(*Journal) error) error {
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	j, err := Open(dir, proc)
	if err != nil {
		return err
	}
	unlock, err := j.Lock()
	if err != nil {
		return err
	}
	defer unlock()
	return fn(j)
}

// Each calls fn on every ledger of a journal, inside the ledger's network namespace, and on the machine's ledger last. It holds
// the machine-wide lock meanwhile. A namespace that cannot be found is gone, together with its settings. If fn fails on one
// ledger, Each continues with the others.
func Each(ctx context.Context, dir, proc string, fn func(*Book) error) error {
	ledgers := func() ([]string, error) { return filepath.Glob(filepath.Join(dir, "netns-*.json")) }
	f := &finder{proc: proc}
	some, err := ledgers()
	if err == nil && len(some) > 0 {
		// Before the lock is taken: an agent would wait for it meanwhile.
		f.files, err = netns.ListFiles(proc)
	}
	if err != nil {
		return fmt.Errorf("find network namespaces: %w", err)
	}
	return With(dir, proc, func(j *Journal) error {
		all, err := ledgers()
		if err != nil {
			return err
		}
		return j.each(ctx, all, f, fn)
	})
}

// finder finds network namespaces in a list of files.
type finder struct {
	proc  string
	files netns.Files
	// again means that the files have been listed a second time.
	again bool
}

func (f *finder) find(id netns.ID) (string, error) {
	file, err := f.files.Find(id)
	if file != "" || err != nil || f.again {
		return file, err
	}
	// The namespace, or the file by which it can be entered, may be newer than the list.
	if f.files, err = netns.ListFiles(f.proc); err != nil {
		return "", err
	}
	f.again = true
	return f.files.Find(id)
}

func (j *Journal) each(ctx context.Context, files []string, f *finder, fn func(*Book) error) error {
	slices.Sort(files)
	var errs []error
	for _, file := range files {
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		errs = append(errs, j.visit(filepath.Base(file), f, fn))
	}
	machine, err := j.Machine()
	if err == nil {
		err = fn(machine)
	}
	return errors.Join(append(errs, err)...)
}

// nowhere is the store of a namespace that is gone: none of its settings exist.
type nowhere struct{}

func (nowhere) Read(string) (string, error) { return "", fs.ErrNotExist }
func (nowhere) Write(string, string) error  { return fs.ErrNotExist }

func (j *Journal) visit(name string, f *finder, fn func(*Book) error) error {
	l, err := j.read(name)
	if err != nil {
		return err
	}
	file, err := f.find(l.ID)
	if err != nil {
		return fmt.Errorf("find the network namespace of %s: %w", l.Place, err)
	}
	if file == "" {
		return fn(j.open(l, nowhere{}))
	}
	return netns.DoAt(file, func() error { return j.withBook(l, fn) })
}

// withBook calls fn with the book of the calling thread's network namespace.
func (j *Journal) withBook(l ledger, fn func(*Book) error) error {
	sys, err := kernel.OpenSysfs("")
	if err != nil {
		return err
	}
	defer sys.Close()
	links, err := kernel.OpenLinks()
	if err != nil {
		return err
	}
	defer links.Close()
	b := j.open(l, sys)
	if err := b.rename(links); err != nil {
		return err
	}
	return fn(b)
}

// Namespaces returns the network namespaces that have a ledger.
func (j *Journal) Namespaces() ([]netns.Cookie, error) {
	entries, err := os.ReadDir(j.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list journal: %w", err)
	}
	var all []netns.Cookie
	for _, e := range entries {
		number, isLedger := strings.CutPrefix(strings.TrimSuffix(e.Name(), ".json"), "netns-")
		if cookie, err := strconv.ParseUint(number, 10, 64); isLedger && err == nil {
			all = append(all, netns.Cookie(cookie))
		}
	}
	return all, nil
}

// Held calls fn on all held settings: those of the machine, and those in all network namespaces.
func (j *Journal) Held(fn func(Entry)) error {
	ids, err := j.Namespaces()
	if err != nil {
		return err
	}
	for _, id := range append(ids, 0) { // the machine's
		l, err := j.read(ledgerFile(netns.ID{Cookie: id}))
		if err != nil {
			return err
		}
		if l.Boot != j.boot {
			continue
		}
		for _, e := range l.Entries {
			fn(e)
		}
	}
	return nil
}

// ReleaseIn releases a holder's settings in another network namespace. files maps inodes of namespaces to files. If one of them
// refers to this namespace, ReleaseIn restores the settings there; otherwise it changes only the ledger.
func (j *Journal) ReleaseIn(id netns.Cookie, h Holder, files map[uint64]string) (restored int, err error) {
	unlock, err := j.Lock()
	if err != nil {
		return 0, err
	}
	defer unlock()
	l, err := j.read(ledgerFile(netns.ID{Cookie: id}))
	if err != nil {
		return 0, err
	}
	if !slices.ContainsFunc(l.Entries, func(e Entry) bool { return slices.Contains(e.Holders, h) }) {
		return 0, nil
	}
	release := func(b *Book) error {
		settings, err := b.ReleaseHolder(h)
		restored = len(settings)
		return err
	}
	there := false
	if file := files[l.Inode]; file != "" {
		err = netns.DoAt(file, func() error {
			id, err := netns.CurrentID()
			if err != nil || id.Cookie != l.Cookie {
				return err
			}
			there = true
			return j.withBook(l, release)
		})
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EINVAL) {
			err = nil // the namespace has just ended
		}
	}
	if err != nil || there {
		return restored, err
	}
	return 0, release(j.open(l, nowhere{}))
}

// Living returns the living holders in a network namespace, with the number of settings that each holds there. The caller holds
// the lock.
func (j *Journal) Living(id netns.ID) (map[Holder]int, error) {
	l, err := j.read(ledgerFile(id))
	if err != nil || l.Boot != j.boot {
		return nil, err
	}
	settings := make(map[Holder]int)
	for _, e := range l.Entries {
		for _, h := range e.Holders {
			settings[h]++
		}
	}
	maps.DeleteFunc(settings, func(h Holder, _ int) bool {
		alive, err := h.alive(j.proc)
		return err != nil || !alive
	})
	return settings, nil
}
