//go:build unix

package record

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"slipstream.dev/internal/testenv"
)

// torn makes a folder whose last trial is incomplete, and returns it with the text of its trials.
func torn(t *testing.T, parent string) (folder, text string) {
	t.Helper()
	d := create(t, parent)
	appendTrials(t, d, 1)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(d.Path, trialsFile)
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	text = string(whole) + `{"block":1,"order":2`
	testenv.WriteFile(t, file, text)
	return d.Path, text
}

func wantText(t *testing.T, file, want string) {
	t.Helper()
	if got, err := os.ReadFile(file); err != nil || string(got) != want {
		t.Errorf("%s has %q, %v; want %q", file, got, err, want)
	}
}

// TestReadersWriteNothing checks that a folder changes only when a trial is appended.
func TestReadersWriteNothing(t *testing.T) {
	folder, text := torn(t, t.TempDir())
	for name, open := range map[string]func(string) (*Dir, error){"Open": Open, "OpenLocked": OpenLocked, "Resume": Resume} {
		d, err := open(folder)
		if err != nil {
			t.Fatal(name, err)
		}
		wantTrials(t, d, 1)
		if name != "Open" {
			if _, err := OpenLocked(folder); !errors.Is(err, ErrLocked) {
				t.Errorf("OpenLocked beside %s: %v, want ErrLocked", name, err)
			}
		}
		if err := d.Close(); err != nil {
			t.Error(name, err)
		}
		wantText(t, filepath.Join(folder, trialsFile), text)
	}
}

// TestNoLinkIsFollowed checks that no name in a folder leads to another file, whatever its type.
func TestNoLinkIsFollowed(t *testing.T) {
	for _, name := range []string{environmentFile, trialsFile, experimentFile, switchedFile} {
		for _, kind := range []string{"link out", "link within", "pipe", "folder"} {
			t.Run(name+" is a "+kind, func(t *testing.T) {
				folder, _ := torn(t, t.TempDir())
				file, other := filepath.Join(folder, name), filepath.Join(t.TempDir(), "other")
				_ = os.Rename(file, filepath.Join(folder, "real")) // switched.json is not there
				testenv.WriteFile(t, other, "another's")
				want, err := file+" is not a regular file", error(nil)
				switch kind {
				case "link out":
					want, err = file+" is a symbolic link to "+other, os.Symlink(other, file)
				case "link within":
					want, err = file+" is a symbolic link to real", os.Symlink("real", file)
				case "pipe":
					err = syscall.Mkfifo(file, 0o644)
				case "folder":
					err = os.Mkdir(file, 0o755)
				}
				if err != nil {
					t.Fatal(err)
				}
				for verb, open := range map[string]func(string) (*Dir, error){"Open": Open, "OpenLocked": OpenLocked, "Resume": Resume} {
					d, err := open(folder)
					if err == nil {
						_, err = d.SwitchedVariant()
						d.Close()
					}
					if err == nil || !strings.Contains(err.Error(), want) {
						t.Errorf("%s: %v, want %s", verb, err, want)
					}
				}
				wantText(t, other, "another's")
			})
		}
	}
}

// TestNoLinkIsWritten checks that nothing is written outside the folder.
func TestNoLinkIsWritten(t *testing.T) {
	d, outside := create(t, t.TempDir()), t.TempDir()
	other := filepath.Join(outside, "cpu.svg")
	testenv.WriteFile(t, other, "another's")
	for name, to := range map[string]string{"figures": outside, "report.html": other} {
		if err := os.Symlink(to, filepath.Join(d.Path, name)); err != nil {
			t.Fatal(err)
		}
	}
	for name, link := range map[string]string{"figures/cpu.svg": "figures", "report.html": "report.html"} {
		err := d.WriteFile(name, func(w io.Writer) error { _, err := io.WriteString(w, "ours"); return err })
		if want := filepath.Join(d.Path, link) + " is a symbolic link"; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", name, err, want)
		}
	}
	wantText(t, other, "another's")
	if left, err := os.ReadDir(outside); err != nil || len(left) != 1 {
		t.Errorf("outside there is %v, %v", left, err)
	}
}

// TestLinkedFolder checks that a link to a folder is refused, and so is a hard link to a file that is to
// be written.
func TestLinkedFolder(t *testing.T) {
	parent := t.TempDir()
	folder, text := torn(t, parent)
	link := filepath.Join(parent, "latest")
	if err := os.Symlink(folder, link); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{link, link + "/"} {
		if _, err := Open(name); err == nil || !strings.Contains(err.Error(), link+" is a symbolic link to "+folder) {
			t.Errorf("Open %s: %v", name, err)
		}
	}
	if left, err := LeftSwitched(parent); err != nil || len(left) > 0 {
		t.Errorf("LeftSwitched with a link to a folder in which nothing is switched: %v, %v", left, err)
	}
	testenv.WriteFile(t, filepath.Join(folder, switchedFile), `{"variant":"a"}`)
	elsewhere := t.TempDir()
	if err := os.Symlink(folder, filepath.Join(elsewhere, "run")); err != nil {
		t.Fatal(err)
	}
	if left, err := LeftSwitched(elsewhere); err == nil || !strings.Contains(err.Error(), filepath.Join(elsewhere, "run")+" is a symbolic link to "+folder) {
		t.Errorf("LeftSwitched with a link to a folder in which something is switched: %v, %v", left, err)
	}

	if err := os.Link(filepath.Join(folder, trialsFile), filepath.Join(elsewhere, "another's")); err != nil {
		t.Fatal(err)
	}
	if _, err := Resume(folder); err == nil || !strings.Contains(err.Error(), "hard links") {
		t.Errorf("Resume of trials with a second name: %v", err)
	}
	wantText(t, filepath.Join(elsewhere, "another's"), text)
}

// TestFolderIsPinned checks that an open folder stays the same, even if another folder takes its path.
func TestFolderIsPinned(t *testing.T) {
	folder, _ := torn(t, t.TempDir())
	d, err := Resume(folder)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	moved := folder + "-moved"
	if err := os.Rename(folder, moved); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	testenv.WriteFile(t, filepath.Join(folder, experimentFile), "kind: Evil\n")
	if text, err := d.Experiment(); err != nil || string(text) != "kind: Experiment\n" {
		t.Errorf("the experiment is %q, %v", text, err)
	}
	if err := d.Switched("rps+"); err != nil {
		t.Error(err)
	}
	wantText(t, filepath.Join(moved, switchedFile), "{\"variant\":\"rps+\"}\n")
}

// TestForeign checks who may own the folder and the files in it that decide what a program runs.
func TestForeign(t *testing.T) {
	testenv.NeedRoot(t)
	const stranger = 54321
	chown := func(path string) func() error { return func() error { return os.Chown(path, stranger, 0) } }
	chmod := func(path string, mode os.FileMode) func() error {
		return func() error { return os.Chmod(path, mode) }
	}
	for name, c := range map[string]struct {
		change func(above, folder string) func() error
		sudo   string
		want   string // text of the error, with PATH for the folder
	}{
		"mine":                  {func(_, _ string) func() error { return func() error { return nil } }, "", ""},
		"a stranger's folder":   {func(_, f string) func() error { return chown(f) }, "", "PATH belongs to user 54321, not to root"},
		"the caller's of sudo":  {func(_, f string) func() error { return chown(f) }, "54321", ""},
		"another caller's":      {func(_, f string) func() error { return chown(f) }, "54322", "PATH belongs to user 54321"},
		"a stranger's commands": {func(_, f string) func() error { return chown(filepath.Join(f, experimentFile)) }, "", "PATH/experiment.yaml belongs to"},
		"a stranger's switch":   {func(_, f string) func() error { return chown(filepath.Join(f, switchedFile)) }, "", "PATH/switched.json belongs to"},
		"a stranger's trials":   {func(_, f string) func() error { return chown(filepath.Join(f, trialsFile)) }, "", "PATH/trials.jsonl belongs to"},
		"commands of a group":   {func(_, f string) func() error { return chmod(filepath.Join(f, experimentFile), 0o664) }, "", "others than root can write to PATH/experiment.yaml"},
		"a folder of all":       {func(_, f string) func() error { return chmod(f, 0o777) }, "", "others than root can write to PATH"},
		"a stranger's above":    {func(a, _ string) func() error { return chown(a) }, "", "ABOVE belongs to user 54321"},
		"a group's above":       {func(a, _ string) func() error { return chmod(a, 0o775) }, "", "others than root can write to ABOVE"},
		"a sticky folder above": {func(a, _ string) func() error { return chmod(a, 0o777|os.ModeSticky) }, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("SUDO_UID", c.sudo)
			above := filepath.Join(t.TempDir(), "above")
			folder, _ := torn(t, above)
			testenv.WriteFile(t, filepath.Join(folder, switchedFile), `{"variant":"a"}`)
			if err := c.change(above, folder)(); err != nil {
				t.Fatal(err)
			}
			d, err := Open(folder)
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			err = d.Foreign()
			want := strings.NewReplacer("PATH", folder, "ABOVE", above).Replace(c.want)
			if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("got %v, want %q", err, want)
			}
		})
	}
}
