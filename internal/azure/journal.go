package azure

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"slipstream.dev/internal/flock"
)

// journal is a file that records the original state and how far a change has come. It is written before each
// step, so that the same command can continue, whatever ended the process. It contains names and settings of
// machines, and no secrets.
type journal struct{ path string }

// JournalDir returns the default folder of the journals: the user's state directory, which survives a reboot.
func JournalDir() (string, error) {
	if dir := os.Getenv("XDG_STATE_HOME"); dir != "" {
		return filepath.Join(dir, "slipstream", "azure"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("%w: name a folder with --state", err)
	}
	return filepath.Join(home, ".local", "state", "slipstream", "azure"), nil
}

// journalOf returns the journal for one kind of change to a resource.
func journalOf(dir, what, id string) journal {
	sum := sha256.Sum256([]byte(strings.ToLower(id)))
	return journal{filepath.Join(dir, fmt.Sprintf("%s-%s-%x.json", what, last(id), sum[:4]))}
}

// read reads the journal into v, and reports whether it exists.
func (j journal) read(v any) (bool, error) {
	data, err := os.ReadFile(j.path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err == nil {
		err = json.Unmarshal(data, v)
	}
	if err != nil {
		return false, fmt.Errorf("read the journal %s: %w", j.path, err)
	}
	return true, nil
}

// lock locks the journal against other processes, until release is called or this process ends.
func (j journal) lock() (release func(), err error) {
	if err := os.MkdirAll(filepath.Dir(j.path), 0o700); err != nil {
		return nil, fmt.Errorf("lock the journal: %w", err)
	}
	f, err := os.OpenFile(strings.TrimSuffix(j.path, ".json")+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the journal: %w", err)
	}
	err = flock.TryLock(f)
	if err == nil {
		return func() { _ = flock.Release(f) }, nil
	}
	f.Close()
	if errors.Is(err, flock.ErrLocked) {
		return nil, fmt.Errorf("another process is at work on this (%s is locked): wait until it has ended", f.Name())
	}
	return nil, fmt.Errorf("lock the journal: %w", err)
}

// write replaces the journal atomically.
func (j journal) write(v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(j.path), 0o700); err != nil {
		return fmt.Errorf("write the journal: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(j.path), ".journal-") // mode 0600
	if err != nil {
		return fmt.Errorf("write the journal: %w", err)
	}
	defer os.Remove(f.Name())
	_, err = f.Write(append(data, '\n'))
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), j.path)
	}
	if err != nil {
		return fmt.Errorf("write the journal %s: %w", j.path, err)
	}
	return nil
}

func (j journal) remove() error {
	if err := os.Remove(j.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the journal: %w", err)
	}
	return nil
}
