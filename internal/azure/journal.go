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

// journal is a file that says what was found and how far a change came. It is written before each step, so that
// whatever ends the process, the same command goes on. It has names and settings of machines, and nothing secret.
type journal struct{ path string }

// JournalDir is where journals are unless a user says otherwise: a user's state, which outlives a reboot.
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

// journalOf is the journal of what is done to a resource.
func journalOf(dir, what, id string) journal {
	sum := sha256.Sum256([]byte(strings.ToLower(id)))
	return journal{filepath.Join(dir, fmt.Sprintf("%s-%s-%x.json", what, last(id), sum[:4]))}
}

// read reads the journal into v, and tells whether there is one.
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

// lock holds the journal against other processes, until release or the end of this one.
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

// write replaces the journal, whole or not at all.
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
