package accel

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/record"
)

var (
	// ErrHeld is a setting that somebody else holds at another value.
	ErrHeld = errors.New("held at another value")
	// ErrChanged is a setting that holds neither the value found nor the one
	// set: somebody changed it meanwhile, and it was left as it is.
	ErrChanged = errors.New("changed by somebody else, left as it is")
)

// Holder is who wants a setting kept.
type Holder struct {
	Owner string `json:"owner"`
	// PID and Start (clock ticks after boot) name the process whose end
	// releases the setting. PID 0 holds it until it is reverted.
	PID   int    `json:"pid,omitempty"`
	Start uint64 `json:"start,omitempty"`
}

// String names the holder for a person.
func (h Holder) String() string {
	if h.PID == 0 {
		return h.Owner
	}
	return fmt.Sprintf("%s (process %d)", h.Owner, h.PID)
}

// alive tells whether h still holds what it did.
func (h Holder) alive(proc string) (bool, error) {
	if h.PID == 0 {
		return true, nil
	}
	s, err := readStat(proc, h.PID)
	return s.start == h.Start, err
}

// processStat is what matters here of proc_pid_stat(5); the zero value is that
// of a process that has ended.
type processStat struct {
	parent int
	start  uint64 // clock ticks after boot
}

func readStat(proc string, pid int) (processStat, error) {
	b, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "stat"))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return processStat{}, nil
	}
	if err != nil {
		return processStat{}, err
	}
	// The command's name, in parentheses, can hold anything; field 3 follows it.
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(f) < 20 {
		return processStat{}, fmt.Errorf("%s/%d/stat: %d fields after the name, want 20 or more", proc, pid, len(f))
	}
	if state := f[0][0]; state == 'Z' || state == 'X' {
		return processStat{}, nil
	}
	parent, err1 := strconv.Atoi(string(f[1]))
	start, err2 := strconv.ParseUint(string(f[19]), 10, 64)
	if err := errors.Join(err1, err2); err != nil {
		return processStat{}, fmt.Errorf("%s/%d/stat: %w", proc, pid, err)
	}
	return processStat{parent, start}, nil
}

// entry is one setting that is held.
type entry struct {
	Path string `json:"path"`
	// Link is the index of the device; a device can change its name.
	Link int    `json:"link,omitempty"`
	Was  string `json:"was"`
	Want string `json:"want"`
	// Got is what read back, where that is not Want.
	Got     string   `json:"got,omitempty"`
	Holders []Holder `json:"holders"`
}

// ledger is a journal file: the settings of one network namespace, or those of
// the machine, oldest first.
type ledger struct {
	Version int `json:"version"`
	// Boot id: a setting does not outlive the boot it was made in, but a file
	// may, where /run is on a disk.
	Boot string `json:"boot"`
	// Place is what the first holder called the namespace.
	Place string `json:"place"`
	netns.ID
	Entries []entry `json:"entries"`
}

const ledgerVersion = 1

// decodeLedger accepts only what could have been written here: from a file that
// is anything else, nothing must be restored.
func decodeLedger(b []byte) (ledger, error) {
	var l ledger
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&l); err != nil {
		return ledger{}, err
	}
	if _, err := d.Token(); err != io.EOF {
		return ledger{}, errors.New("something follows the journal")
	}
	if l.Version != ledgerVersion {
		return ledger{}, fmt.Errorf("version %d, want %d", l.Version, ledgerVersion)
	}
	if l.Boot == "" {
		return ledger{}, errors.New("boot is empty")
	}
	seen := make(map[string]bool)
	for _, e := range l.Entries {
		if err := e.check(l.Cookie == 0); err != nil {
			return ledger{}, fmt.Errorf("entry %q: %w", e.Path, err)
		}
		if seen[e.Path] {
			return ledger{}, fmt.Errorf("entry %q: twice", e.Path)
		}
		seen[e.Path] = true
	}
	return l, nil
}

func (e entry) check(machine bool) error {
	valid := func(value string) error {
		_, err := strconv.ParseUint(value, 10, 32)
		return err
	}
	if machine {
		if e.Path != flowTable || e.Link != 0 {
			return errors.New("not a setting of the machine")
		}
	} else {
		name, setting, ok := splitQueue(e.Path)
		if !ok || name == "" || name == "." || name == ".." || e.Link <= 0 {
			return errors.New("not a setting of a device's queue")
		}
		switch setting {
		case "rps_cpus":
			valid = func(value string) error {
				_, err := ParseMask(value)
				return err
			}
		case "rps_flow_cnt":
		default:
			return errors.New("not a setting that is known")
		}
	}
	for _, value := range []string{e.Was, e.Want} {
		if err := valid(value); err != nil {
			return err
		}
	}
	if len(e.Holders) == 0 {
		return errors.New("no holders")
	}
	for _, h := range e.Holders {
		if h.Owner == "" || h.PID < 0 || (h.PID == 0) != (h.Start == 0) {
			return fmt.Errorf("holder %+v is nobody", h)
		}
	}
	return nil
}

// splitQueue takes class/net/NAME/queues/rx-N/SETTING apart.
func splitQueue(path string) (name, setting string, ok bool) {
	f := strings.Split(path, "/")
	if len(f) != 6 || f[0] != "class" || f[1] != "net" || f[3] != "queues" {
		return "", "", false
	}
	n, isRx := strings.CutPrefix(f[4], "rx-")
	if _, err := strconv.ParseUint(n, 10, 16); err != nil || !isRx {
		return "", "", false
	}
	return f[2], f[5], true
}

// renamed is path with another device's name.
func renamed(path, name string) string {
	f := strings.Split(path, "/")
	f[2] = name
	return strings.Join(f, "/")
}

// journal is the folder of ledgers.
type journal struct {
	dir, proc string
	boot      string
}

func openJournal(dir, proc string) (*journal, error) {
	boot, err := os.ReadFile(filepath.Join(proc, "sys/kernel/random/boot_id"))
	if err != nil {
		return nil, fmt.Errorf("read boot id: %w", err)
	}
	return &journal{dir: dir, proc: proc, boot: strings.TrimSpace(string(boot))}, nil
}

// lock excludes every other transaction of the machine, whatever its namespace,
// until unlock. Transactions take milliseconds; a killed process leaves no lock.
func (j *journal) lock() (unlock func(), err error) {
	if err := os.MkdirAll(j.dir, 0o700); err != nil {
		return nil, fmt.Errorf("make journal: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(j.dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open journal lock: %w", err)
	}
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
	}
	if err == nil {
		// Who was killed while it wrote leaves half a ledger.
		if err = os.Remove(filepath.Join(j.dir, unfinished)); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock journal %s: %w", j.dir, err)
	}
	return func() { _ = f.Close() }, nil
}

// unfinished is the ledger that is being written, by who holds the lock.
const unfinished = "unfinished.json"

// ledgerFile is the name of the ledger of a namespace, or of the machine.
func ledgerFile(id netns.ID) string {
	if id.Cookie == 0 {
		return "machine.json"
	}
	return fmt.Sprintf("netns-%d.json", id.Cookie)
}

// book is a ledger, its file, and the settings it is about.
type book struct {
	ledger
	file  string
	store store
	// names maps the indexes of entries' links to the names they have now; nil
	// where entries have none.
	names func(indexes []int) (map[int]string, error)
	proc  string
	// at finds entries by path; nil once they have moved.
	at map[string]int
	// dirty tells that the file has to be written.
	dirty bool
}

func (j *journal) machine() (*book, error) {
	return j.open(netns.ID{}, "machine", sysctls{j.proc})
}

func (j *journal) namespace(id netns.ID, place string, sys store, names nameSocket) (*book, error) {
	b, err := j.open(id, place, sys)
	if err != nil {
		return nil, err
	}
	b.names = names.names
	return b, b.rename()
}

// open reads a ledger, or begins one. Entries of another boot are void.
func (j *journal) open(id netns.ID, place string, s store) (*book, error) {
	l, err := j.read(ledgerFile(id))
	if err != nil {
		return nil, err
	}
	b := &book{ledger: l, file: filepath.Join(j.dir, ledgerFile(id)), store: s, proc: j.proc}
	if b.Boot != j.boot {
		b.dirty = len(b.Entries) > 0
		b.ledger = ledger{Version: ledgerVersion, Boot: j.boot, Place: place, ID: id}
	}
	return b, nil
}

// read returns the ledger of a file, the zero ledger if there is none.
func (j *journal) read(name string) (ledger, error) {
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
			"(set back by hand what it names, then remove it): %w", file, err)
	}
	return l, nil
}

// save replaces the file at once where something changed, or removes it if
// nothing is held. It is not synced: what has to outlive a killed process is in the page cache, and a
// machine that goes down takes its settings with it.
func (b *book) save() error {
	if !b.dirty {
		return nil
	}
	b.dirty = false
	if len(b.Entries) == 0 {
		if err := os.Remove(b.file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("clear journal: %w", err)
		}
		return nil
	}
	text, err := json.MarshalIndent(b.ledger, "", "  ")
	if err != nil {
		return fmt.Errorf("encode journal %s: %w", b.file, err)
	}
	temp := filepath.Join(filepath.Dir(b.file), unfinished)
	if err := os.WriteFile(temp, append(text, '\n'), 0o600); err != nil {
		return fmt.Errorf("write journal: %w", err)
	}
	if err := os.Rename(temp, b.file); err != nil {
		return fmt.Errorf("write journal: %w", err)
	}
	return nil
}

// rename brings the entries up to date with the names that devices have now,
// and drops those of devices that have gone.
func (b *book) rename() error {
	if len(b.Entries) == 0 {
		return nil
	}
	names, err := b.names(b.links())
	if err != nil {
		return err
	}
	b.at = nil
	before := slices.Clone(b.Entries)
	b.Entries = slices.DeleteFunc(b.Entries, func(e entry) bool { return names[e.Link] == "" })
	for i, e := range b.Entries {
		b.Entries[i].Path = renamed(e.Path, names[e.Link])
	}
	b.dirty = !slices.EqualFunc(before, b.Entries, func(a, b entry) bool { return a.Path == b.Path })
	return nil
}

// change is a setting, what it reads now, and what it is to be.
type change struct {
	path      string
	link      int
	was, want string
}

func (b *book) find(path string) *entry {
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

// links are the indexes of the entries' links.
func (b *book) links() []int {
	var indexes []int
	for _, e := range b.Entries {
		indexes = append(indexes, e.Link)
	}
	slices.Sort(indexes)
	return slices.Compact(indexes)
}

// hold enters h for every change, in memory only, and returns the paths that h
// did not hold before.
func (b *book) hold(h Holder, changes []change) (added map[string]bool, err error) {
	for _, c := range changes {
		if e := b.find(c.path); e != nil && e.Want != c.want {
			return nil, fmt.Errorf("set %s of %s to %s: %w: %s has it at %s; wait for that to end, or revert it",
				c.path, b.Place, c.want, ErrHeld, e.Holders[0], e.Want)
		}
	}
	added = make(map[string]bool)
	for _, c := range changes {
		e := b.find(c.path)
		if e == nil {
			b.Entries = append(b.Entries, entry{Path: c.path, Link: c.link, Was: c.was, Want: c.want})
			b.at[c.path] = len(b.Entries) - 1
			e = &b.Entries[len(b.Entries)-1]
		}
		if !slices.Contains(e.Holders, h) {
			e.Holders = append(e.Holders, h)
			added[c.path], b.dirty = true, true
		}
	}
	return added, nil
}

// put writes the changes and reads them back; hold and save come first. Those
// of devices that went away meanwhile are left out; their entries stay for the
// next transaction to judge, as they may have taken another name. A value that did not read
// back enters the ledger too, to be saved, as it is ours to undo all the same.
func (b *book) put(changes []change) ([]record.Setting, error) {
	var settings []record.Setting
	for _, c := range changes {
		got, err := c.was, error(nil)
		if got != c.want {
			err = b.store.write(c.path, c.want)
			if err == nil {
				got, err = b.store.read(c.path)
			}
		}
		switch {
		case c.link != 0 && gone(err):
			continue
		case err != nil:
			return nil, fmt.Errorf("set %s of %s to %s: %w", c.path, b.Place, c.want, err)
		case got != c.want:
			b.find(c.path).Got, b.dirty = got, true
		}
		settings = append(settings, record.Setting{Place: b.Place, Path: c.path, Want: c.want, Got: got, Was: c.was})
	}
	return settings, nil
}

// release takes the holders that match off the entries, the newest first,
// restores what nobody holds any more, and saves. It returns what it wrote back. An
// entry that cannot be restored stays with its holders, to be tried again.
func (b *book) release(match func(entry, Holder) bool) (restored []record.Setting, err error) {
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
	return restored, errors.Join(append(errs, b.save())...)
}

// restore writes back what e found, unless the device has gone. A value that is
// neither the one found nor the one set is somebody's intent, which is not ours
// to undo.
func (b *book) restore(e entry) (wrote bool, err error) {
	for {
		wrote, err = b.restoreAt(e)
		if err == nil {
			return wrote, nil
		}
		if e.Link == 0 || !gone(err) {
			return false, fmt.Errorf("restore %s of %s to %s: %w", e.Path, b.Place, e.Was, err)
		}
		if b.names == nil {
			return false, nil
		}
		names, err := b.names([]int{e.Link})
		if err != nil {
			return false, err
		}
		path := renamed(e.Path, names[e.Link])
		if names[e.Link] == "" || path == e.Path {
			return false, nil
		}
		e.Path = path // it took another name just now
	}
}

func (b *book) restoreAt(e entry) (wrote bool, err error) {
	now, err := b.store.read(e.Path)
	switch {
	case err != nil:
		return false, err
	case now == e.Was:
		return false, nil
	case now != e.Want && (e.Got == "" || now != e.Got):
		return false, fmt.Errorf("%w: it reads %s and was set to %s", ErrChanged, now, e.Want)
	}
	if err := b.store.write(e.Path, e.Was); err != nil {
		return false, err
	}
	now, err = b.store.read(e.Path)
	if err == nil && now != e.Was {
		err = fmt.Errorf("it reads back %s", now)
	}
	return err == nil, err
}

// releaseDead releases what dead processes held.
func (b *book) releaseDead() ([]record.Setting, error) {
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
	return b.release(func(_ entry, h Holder) bool { return !alive[h] })
}
