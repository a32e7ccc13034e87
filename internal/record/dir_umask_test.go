//go:build unix

package record

import (
	"io"
	"io/fs"
	"path/filepath"
	"syscall"
	"testing"
)

// TestUmask: files of a result are as private as the user's umask makes them.
func TestUmask(t *testing.T) {
	for mask, want := range map[int]fs.FileMode{0o077: 0o600, 0o022: 0o644} {
		was := syscall.Umask(mask)
		d := create(t, t.TempDir())
		err := d.WriteFile("figures/cpu.svg", func(w io.Writer) error { _, err := io.WriteString(w, "<svg/>"); return err })
		syscall.Umask(was)
		if err != nil {
			t.Fatal(err)
		}
		err = filepath.WalkDir(d.Path, func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := e.Info()
			wanted := want
			if e.IsDir() {
				wanted |= want >> 2 & 0o111 // who may read a folder may enter it
			}
			if err == nil && info.Mode().Perm() != wanted {
				t.Errorf("under umask %03o %s has mode %03o, want %03o", mask, path, info.Mode().Perm(), wanted)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}
