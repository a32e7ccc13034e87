//go:build linux

package hosts

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// TestLaunch: a file that is not the program that was sent is neither run nor left
// behind.
func TestLaunch(t *testing.T) {
	const text = "#!/bin/sh\necho ran \"$@\"\n"
	const sum = "5a1b8a0e8c3ff3f0"
	whole := binary{size: int64(len(text)), sum: sha(text)}
	for _, c := range []struct {
		name, sent string
		binary
		want string
	}{
		{"whole", text, whole, "M send\nM program PID FILE\nran worker --remote\n"},
		{"cut", text[:20], whole, "M send\nM broken\n"},
		{"other bytes", strings.ToUpper(text), whole, "M send\nM broken\n"},
		{"another sum", text, binary{size: whole.size, sum: sum}, "M send\nM broken\n"},
	} {
		dir := t.TempDir()
		cmd := exec.Command("sh", "-c", command(launch("M", dir, c.binary, "--remote")))
		cmd.Stdin = strings.NewReader(c.sent)
		out, _ := cmd.Output()
		got := string(out)
		if i := strings.Index(got, "M program "); i >= 0 {
			line, rest, _ := strings.Cut(got[i:], "\n")
			if want := fmt.Sprintf("M program %d %s/slipstream.", cmd.Process.Pid, dir); !strings.HasPrefix(line, want) {
				t.Errorf("%s: %q, want %q", c.name, line, want)
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

var special = regexp.MustCompile(`['\n]|![^ =]|\\\\`)

// TestLoginShells: a script contains nothing that a login shell interprets, and
// every shell that is installed here runs it.
func TestLoginShells(t *testing.T) {
	p := program{"1", "/tmp/slipstream.x"}
	for name, script := range map[string]string{
		"look":   look("M", true),
		"launch": launch("M", "/tmp", binary{sum: sha("")}, "--remote"),
		"again":  again("M", p, true, true, "--remote"),
		"revert": revert("M", p, true, true),
	} {
		quoted, ok := strings.CutPrefix(command(script), "exec sh -c '")
		quoted, closed := strings.CutSuffix(quoted, "'")
		// ' ends the quotes, ! repeats a command in csh except before a space and =, and \\ is \ in fish.
		if !ok || !closed || special.MatchString(quoted) {
			t.Errorf("%s is %s", name, command(script))
		}
	}
	for _, shell := range []string{"sh", "bash", "csh", "fish", "ksh", "tcsh", "zsh"} {
		if _, err := exec.LookPath(shell); err != nil {
			continue
		}
		out, err := exec.Command(shell, "-c", command(look("M", false))).CombinedOutput()
		if err != nil || !strings.Contains(string(out), "M folder ") || !strings.HasSuffix(string(out), "M end\n") {
			t.Errorf("%s: %v\n%s", shell, err, out)
		}
	}
}

// TestGone: nothing is run if another process has taken the PID.
func TestGone(t *testing.T) {
	other := exec.Command("sleep", "60")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = other.Process.Kill()
		_ = other.Wait()
	}()
	p := program{fmt.Sprint(other.Process.Pid), "/tmp/slipstream.x"}
	for name, script := range map[string]string{"again": again("M", p, false, false, "--remote"), "revert": revert("M", p, false, true)} {
		out, err := exec.Command("sh", "-c", command(script)).CombinedOutput()
		if string(out) != "M gone\n" || err == nil {
			t.Errorf("%s: %v, %s", name, err, out)
		}
	}
}
