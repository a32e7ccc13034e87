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

	"golang.org/x/sys/unix"
)

// state is what the disk has of a lab. It is written before the first thing is
// made, and says all that there is to remove.
type state struct {
	Config Config `json:"config"`
	// PID is the process that made the lab. It holds the lock until the lab is
	// down, or, with Keep, until it is up.
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
		err = s.Config.validate()
	}
	if err == nil && (s.Config.Name != name || len(s.CPUs) != s.Config.Nodes) {
		err = errors.New("it is not this lab's")
	}
	if err != nil {
		return nil, fmt.Errorf("read state of lab %s: %w; nothing was removed: end it by hand (ip netns del slip-%s-…), then delete %s", name, err, name, path)
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
	if err := os.WriteFile(path+".new", append(data, '\n'), 0o644); err != nil {
		return fmt.Errorf("write state of lab: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("write state of lab: %w", err)
	}
	return nil
}

// lock is the right to make, use and remove a lab. The kernel takes it back
// when the process ends, however it ends; so a lock that is free says that the
// owner is gone, which a process id, used again, could not.
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
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			f.Close()
			if !errors.Is(err, unix.EWOULDBLOCK) {
				return nil, fmt.Errorf("lock lab %s: %w", name, err)
			}
			holder := ""
			if s, err := readState(dir, name); err == nil {
				holder = fmt.Sprintf(" by process %d", s.PID)
			}
			return nil, fmt.Errorf("lab %s: %w%s: let that end first, or take another name", name, ErrInUse, holder)
		}
		// Whoever removed the lab removed this file with it, perhaps after it
		// was opened here.
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

func (l *lock) release() { l.file.Close() }

// remove takes a lab's files away, the state before the lock that guards it.
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
