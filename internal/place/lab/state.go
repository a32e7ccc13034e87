//go:build linux

package lab

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"slipstream.dev/internal/flock"
)

// state is the state of a lab on disk. It is written before anything is created, and suffices to remove the lab.
type state struct {
	Config Config `json:"config"`
	// PID is the process that created the lab. It holds the lock until the lab is removed or, with Keep,
	// until it is up.
	PID     int        `json:"pid"`
	Keep    bool       `json:"keep"`
	Up      bool       `json:"up"`
	Created time.Time  `json:"created"`
	CPUs    []nodeCPUs `json:"cpus"`
}

func statePath(dir, name string) string { return filepath.Join(dir, name+".json") }

func readState(dir, name string) (*state, error) {
	path := statePath(dir, name)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("lab %s: %w", name, ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("read state of lab: %w", err)
	}
	var s state
	err = json.Unmarshal(data, &s)
	if err == nil {
		err = s.Config.Validate()
	}
	if err == nil && (s.Config.Name != name || len(s.CPUs) != s.Config.Nodes) {
		err = errors.New("it has the name of another lab")
	}
	if err != nil {
		return nil, fmt.Errorf("read state of lab %s: %w; nothing was removed: delete its network namespaces (ip netns del slip-%s-…), then %s", name, err, name, path)
	}
	return &s, nil
}

// write replaces the state on disk. The caller holds the lock.
func (s *state) write(dir string) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	path := statePath(dir, s.Config.Name)
	err = os.WriteFile(path+".new", append(data, '\n'), 0o644)
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		_ = os.Remove(path + ".new") // on a full disk, an incomplete file
		return fmt.Errorf("write state of lab: %w", err)
	}
	return nil
}

// lock is the exclusive right to create, use and remove a lab. The kernel releases it when the process ends, so a free lock
// proves that the owner is gone. A PID does not, because PIDs are reused.
type lock struct {
	dir, name string
	file      *os.File
}

func acquire(dir, name string) (*lock, error) {
	path := filepath.Join(dir, name+".lock")
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
		if err != nil {
			return nil, fmt.Errorf("lock lab %s: %w", name, err)
		}
		if err := flock.TryLock(f); err != nil {
			f.Close()
			if !errors.Is(err, flock.ErrLocked) {
				return nil, fmt.Errorf("lock lab %s: %w", name, err)
			}
			holder := ""
			if s, err := readState(dir, name); err == nil {
				holder = fmt.Sprintf(" by process %d", s.PID)
			}
			return nil, fmt.Errorf("lab %s: %w%s: wait until that ends, or choose another name", name, ErrInUse, holder)
		}
		// Another process may have removed the lab with this file since it was opened here.
		mine, err := f.Stat()
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("lock lab %s: %w", name, err)
		}
		if there, err := os.Stat(path); err == nil && os.SameFile(mine, there) {
			return &lock{dir: dir, name: name, file: f}, nil
		}
		f.Close()
	}
}

func (l *lock) release() { _ = flock.Release(l.file) }

// remove removes the files of a lab: the state before the lock, which guards it.
func (l *lock) remove() error {
	defer l.release()
	path := statePath(l.dir, l.name)
	for _, p := range []string{path + ".new", path, l.file.Name()} {
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove state of lab %s: %w", l.name, err)
		}
	}
	return nil
}
