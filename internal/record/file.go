package record

import (
	"bufio"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
)

// A results folder may come from somebody else: from another machine, or from another user of this one. So its
// files are opened relative to the open folder, even if its path leads elsewhere by then. They must be regular
// files: a symbolic link may lead to another user's file, and reading a pipe may never end.

// openRoot opens a results folder, which must not be a symbolic link.
func openRoot(folder string) (*os.Root, error) {
	folder = filepath.Clean(folder) // with a slash at the end, Lstat would follow the link
	named, err := os.Lstat(folder)
	if err != nil {
		return nil, err
	}
	if err := checkType(folder, named, fs.ModeDir, "a folder"); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(folder)
	if err != nil {
		return nil, err
	}
	if opened, err := root.Stat("."); err != nil || !os.SameFile(named, opened) {
		root.Close()
		return nil, fmt.Errorf("%s was replaced while it was opened", folder)
	}
	return root, nil
}

// linkError returns an error that names a symbolic link, and says what to use in its place.
func linkError(link string) error {
	to, err := os.Readlink(link)
	if err != nil {
		return err
	}
	return fmt.Errorf("%s is a symbolic link to %s, and slipstream follows no link to or in a results folder: name the folder itself, or replace the link by the file", link, to)
}

// file returns the path of a file of the folder, for errors.
func (d *Dir) file(name string) string { return filepath.Join(d.Path, filepath.FromSlash(name)) }

// in replaces the relative name of a file in an error by its path.
func (d *Dir) in(err error) error {
	if about, ok := errors.AsType[*fs.PathError](err); ok {
		about.Path = d.file(about.Path)
	}
	return err
}

// check returns an error unless a name in the folder is a regular file, and its parent a folder.
func (d *Dir) check(name string) error {
	if dir := path.Dir(name); dir != "." {
		if err := d.checkEntry(dir, fs.ModeDir, "a folder"); err != nil {
			return err
		}
	}
	return d.checkEntry(name, 0, "a regular file")
}

// checkEntry is checkType for a name below the folder.
func (d *Dir) checkEntry(name string, want fs.FileMode, what string) error {
	info, err := d.root.Lstat(name)
	if err != nil {
		return d.in(err)
	}
	return checkType(d.file(name), info, want, what)
}

// checkType returns an error if a path is a symbolic link, or not of the wanted type. A regular file has type 0.
func checkType(path string, info fs.FileInfo, want fs.FileMode, what string) error {
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		return linkError(path)
	case info.Mode().Type() != want:
		return fmt.Errorf("%s is not %s", path, what)
	}
	return nil
}

// open opens a regular file of the folder. If a link replaces the file after the check, Root does not follow it
// out of the folder.
func (d *Dir) open(name string, flag int) (*os.File, error) {
	if err := d.check(name); err != nil {
		return nil, err
	}
	f, err := d.root.OpenFile(name, flag|nonblock, 0)
	if err != nil {
		return nil, d.in(err)
	}
	info, err := f.Stat()
	if err == nil {
		err = checkType(d.file(name), info, 0, "a regular file")
	}
	if err == nil && flag != os.O_RDONLY {
		err = oneName(info)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// read reads a whole file of the folder.
func (d *Dir) read(name string) ([]byte, error) {
	if name == trialsFile {
		return d.ReadFile(name, maxTrials)
	}
	return d.ReadFile(name, maxFile)
}

// Read reads a whole file of the folder ("figures/cpu.svg"). It returns an error if the file is too large.
func (d *Dir) Read(name string) ([]byte, error) {
	data, err := d.read(name)
	if err != nil {
		return nil, fmt.Errorf("read %w", err)
	}
	return data, nil
}

// ReadFile reads a whole file of the folder, such as "summary.json". It returns an error if the file has more than limit
// bytes.
func (d *Dir) ReadFile(name string, limit int64) ([]byte, error) {
	f, err := d.open(name, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := ReadAtMost(f, limit)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.file(name), err)
	}
	return data, nil
}

// WriteFile writes a file of the folder ("report.html", "figures/cpu.svg") atomically: readers see the old one
// until the new one is on disk.
func (d *Dir) WriteFile(name string, write func(io.Writer) error) (err error) {
	name = filepath.ToSlash(name)
	defer func() {
		if err != nil {
			err = fmt.Errorf("write %s: %w", d.file(name), err)
		}
	}()
	if err := d.check(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if dir := path.Dir(name); dir != "." {
		if err := d.root.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	temp := path.Join(path.Dir(name), "."+path.Base(name)+"."+rand.Text())
	f, err := d.root.OpenFile(temp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer func() { _ = d.root.Remove(temp) }() // renamed by then, unless something failed
	defer f.Close()
	w := bufio.NewWriter(f)
	if err := write(w); err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := d.root.Rename(temp, name); err != nil {
		return err
	}
	return syncDir(d.root, path.Dir(name))
}
