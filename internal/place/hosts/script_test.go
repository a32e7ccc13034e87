//go:build linux

package hosts

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"slipstream.dev/internal/place/build"
)

// TestLaunch checks that a copy that differs from the program is neither run nor left behind.
func TestLaunch(t *testing.T) {
	const text = "#!/bin/sh\necho ran \"$@\"\n"
	const sum = "5a1b8a0e8c3ff3f0"
	whole := build.Build{Size: int64(len(text)), Sum: sha(text)}
	for _, c := range []struct {
		name, sent string
		build.Build
		want string
	}{
		{"whole", text, whole, "M begin\nM send\nM program PID FILE\nran worker --remote\n"},
		{"cut", text[:20], whole, "M begin\nM send\nM broken\n"},
		{"other bytes", strings.ToUpper(text), whole, "M begin\nM send\nM broken\n"},
		{"another sum", text, build.Build{Size: whole.Size, Sum: sum}, "M begin\nM send\nM broken\n"},
	} {
		dir, err := filepath.EvalSymlinks(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		link := filepath.Join(t.TempDir(), "link")
		if err := os.Symlink(dir, link); err != nil {
			t.Fatal(err)
		}
		r := script("M", launch("M", link, c.Build, "--remote"))
		cmd := exec.Command("sh", "-c", r.command)
		cmd.Stdin = strings.NewReader(r.input + c.sent)
		out, _ := cmd.Output()
		got := string(out)
		if i := strings.Index(got, "M program "); i >= 0 {
			line, rest, _ := strings.Cut(got[i:], "\n")
			// The name is that of /proc/PID/exe, which has no link in it.
			if want := fmt.Sprintf("M program %d %s/slipstream.", cmd.Process.Pid, dir); !strings.HasPrefix(line, want) || !strings.HasSuffix(line, " (deleted)") {
				t.Errorf("%s: %q, want %q…", c.name, line, want)
			}
			got = got[:i] + "M program PID FILE\n" + rest
		}
		if got != c.want {
			t.Errorf("%s: printed %q, want %q", c.name, got, c.want)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("%s: left %v, %v", c.name, left, err)
		}
	}
}

func sha(text string) string {
	return fmt.Sprintf("%x", sha256.Sum256([]byte(text)))
}

// TestLoginShells checks that every shell that is installed here runs a script.
func TestLoginShells(t *testing.T) {
	for _, shell := range []string{"sh", "bash", "bsd-csh", "elvish", "fish", "ksh93", "mksh", "rc", "tcsh", "xonsh", "yash", "zsh"} {
		if _, err := exec.LookPath(shell); err != nil {
			continue
		}
		r := script("M", factsScript("M", false))
		cmd := exec.Command(shell, "-c", r.command)
		cmd.Stdin = strings.NewReader(r.input)
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.HasPrefix(string(out), "M begin\n") || !strings.Contains(string(out), "M folder ") || !strings.HasSuffix(string(out), "M end\n") {
			t.Errorf("%s: %v\n%s", shell, err, out)
		}
	}
}

// TestGone checks that nothing is run if another process has reused the PID.
func TestGone(t *testing.T) {
	other := exec.Command("sleep", "60")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = other.Process.Kill()
		_ = other.Wait()
	}()
	p := program{fmt.Sprint(other.Process.Pid), "/tmp/slipstream.x (deleted)"}
	for name, text := range map[string]string{"again": again("M", p, false, false, "--remote"), "revert": revert("M", p, false, true)} {
		r := script("M", text)
		cmd := exec.Command("sh", "-c", r.command)
		cmd.Stdin = strings.NewReader(r.input)
		out, err := cmd.CombinedOutput()
		if string(out) != "M begin\nM gone\n" || err == nil {
			t.Errorf("%s: %v, %s", name, err, out)
		}
	}
}

// TestArguments checks that a worker gets its arguments as they are, whatever the user and the machine of a run are called.
func TestArguments(t *testing.T) {
	const arguments = "--remote --claim x/me@MARKUS-FILESERVER-PROCESS-JOURNAL-TIDY-ARGUMENTS-process-1"
	p := program{"1", "/tmp/slipstream.x (deleted)"}
	for name, text := range map[string]string{
		"launch": launch("M", "/tmp", build.Build{}, arguments),
		"again":  again("M", p, true, false, arguments),
		"own":    again("M", p, true, true, arguments),
	} {
		if !strings.Contains(text, " worker "+arguments) {
			t.Errorf("%s: %s\nlacks %s", name, text, arguments)
		}
	}
}
