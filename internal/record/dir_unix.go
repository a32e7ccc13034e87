//go:build unix

package record

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"

	"slipstream.dev/internal/flock"
)

// nonblock makes the open of a pipe return without waiting for its other end.
const nonblock = syscall.O_NONBLOCK

// lock holds the folder until release, or until the process ends in any way. It writes nothing.
func lock(dir *os.Root) (release func() error, err error) {
	f, err := dir.Open(".")
	if err != nil {
		return nil, err
	}
	if err := flock.TryLock(f); err != nil {
		f.Close()
		if err == flock.ErrLocked {
			return nil, ErrLocked
		}
		return nil, fmt.Errorf("lock %s: %w", dir.Name(), err)
	}
	return func() error { return flock.Release(f) }, nil
}

// locked reports whether another process holds the folder. A run takes the lock before its folder is complete, so
// asking does not get in its way.
func locked(dir *os.Root) bool {
	f, err := dir.Open(".")
	if err != nil {
		return false
	}
	defer f.Close()
	return flock.Locked(f)
}

// syncDir makes a new name in a folder below dir durable.
func syncDir(dir *os.Root, name string) error {
	f, err := dir.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// oneName returns an error if a file that is to be written has another hard link, which may be in somebody else's
// folder.
func oneName(info fs.FileInfo) error {
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Nlink > 1 {
		return fmt.Errorf("%s has %d names (hard links), and writing would change them all: replace it by a copy", info.Name(), st.Nlink)
	}
	return nil
}

// deciding lists the folder itself and the files in it that decide what a program runs for it.
var deciding = []string{".", environmentFile, experimentFile, trialsFile, switchedFile}

// Foreign returns an error if somebody other than this user and root may have decided what a program runs for the
// folder. It returns nil only if the folder, its deciding files, and the folders above belong to this user or root,
// and nobody else can write to them. sshd decides the same way about authorized_keys (StrictModes; safe_path in
// OpenSSH's misc.c). Under sudo, the user who called it is trusted too. In a sticky folder such as /tmp, others
// cannot replace the files of this user.
func (d *Dir) Foreign() error {
	for _, name := range deciding {
		info, err := d.root.Lstat(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = checkOwner(d.file(name), info)
		}
		if err != nil {
			return err
		}
	}
	folder, err := filepath.Abs(d.Path)
	if err == nil {
		folder, err = filepath.EvalSymlinks(folder)
	}
	for err == nil && folder != filepath.Dir(folder) {
		folder = filepath.Dir(folder)
		var info fs.FileInfo
		if info, err = os.Lstat(folder); err == nil {
			err = checkOwner(folder, info)
		}
	}
	return err
}

// checkOwner returns an error if somebody other than this user and root can change a file or folder.
func checkOwner(path string, info fs.FileInfo) error {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("slipstream cannot tell who owns %s", path)
	}
	sticky := info.IsDir() && info.Mode()&fs.ModeSticky != 0
	switch {
	case !slices.Contains(trusted(), st.Uid):
		return fmt.Errorf("%s belongs to %s, not to %s", path, userName(st.Uid), userName(uint32(os.Geteuid())))
	case info.Mode()&0o022 != 0 && !sticky:
		return fmt.Errorf("others than %s can write to %s (chmod go-w %s)", userName(st.Uid), path, path)
	}
	return nil
}

// trusted returns root, this user, and, under sudo, the user who called it.
func trusted() []uint32 {
	all := []uint32{0, uint32(os.Geteuid())}
	if caller, err := strconv.ParseUint(os.Getenv("SUDO_UID"), 10, 32); err == nil && os.Geteuid() == 0 {
		all = append(all, uint32(caller))
	}
	return all
}

// userName returns a user's name, or the number if it has none.
func userName(uid uint32) string {
	id := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(id); err == nil {
		return u.Username
	}
	return "user " + id
}
