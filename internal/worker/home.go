//go:build linux

package worker

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/flock"
)

// nobody is the unprivileged user and group that an application's server and client run as.
const nobody = 65534

const (
	homePrefix = "slipstream-server-"
	// homeYoung is the age below which a folder is not swept, because its owner may not have locked it yet.
	homeYoung = time.Minute
)

// home is the temporary folder of an application's server or client. Its owner holds a lock. A free lock means that the owner
// was killed; newHome sweeps such folders.
type home struct {
	root string
	lock *os.File
}

// newHome makes a folder below dir, and these files in its working directory, which belongs to the user nobody if this
// process may change its owner.
func newHome(dir string, files map[string][]byte) (_ *home, err error) {
	sweepHomes(dir)
	root, err := os.MkdirTemp(dir, homePrefix)
	if err != nil {
		return nil, fmt.Errorf("make a server's folder: %w", err)
	}
	h := &home{root: root}
	defer func() {
		if err != nil {
			h.remove()
		}
	}()
	if h.lock, err = lockHome(root); err != nil {
		return nil, err
	}
	if err := errors.Join(os.Chmod(root, 0o711), os.Mkdir(h.path(), 0o700)); err != nil {
		return nil, fmt.Errorf("make a server's folder: %w", err)
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(h.path(), name), content, 0o644); err != nil {
			return nil, fmt.Errorf("make a server's folder: %w", err)
		}
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(h.path(), nobody, nobody); err != nil && !errors.Is(err, os.ErrPermission) {
			return nil, fmt.Errorf("make a server's folder: %w", err)
		}
	}
	return h, nil
}

// path returns the working directory of the server or client.
func (h *home) path() string { return filepath.Join(h.root, "home") }

func (h *home) remove() {
	_ = os.RemoveAll(h.root)
	if h.lock != nil {
		_ = flock.Release(h.lock)
	}
}

// lockHome takes the lock of a folder. It fails while the owner of the folder runs.
func lockHome(root string) (*os.File, error) {
	lock, err := os.OpenFile(filepath.Join(root, "lock"), os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock a server's folder: %w", err)
	}
	if err := flock.TryLock(lock); err != nil {
		lock.Close()
		return nil, fmt.Errorf("lock %s: %w", root, err)
	}
	return lock, nil
}

// sweepHomes removes the folders of this user's killed processes. If it fails, the next process tries again.
func sweepHomes(dir string) {
	roots, _ := filepath.Glob(filepath.Join(dir, homePrefix+"*"))
	for _, root := range roots {
		var stat unix.Stat_t
		if err := unix.Lstat(root, &stat); err != nil || stat.Mode&unix.S_IFMT != unix.S_IFDIR || stat.Uid != uint32(os.Geteuid()) {
			continue
		}
		if time.Since(time.Unix(stat.Mtim.Unix())) < homeYoung {
			continue
		}
		if lock, err := lockHome(root); err == nil {
			(&home{root: root, lock: lock}).remove()
		}
	}
}
