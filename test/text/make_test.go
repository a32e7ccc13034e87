package text

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestMakeDemo checks that make demo runs the demo unchanged, and with RUNS it runs that many blocks. A Makefile
// variable with the name of one in the user's environment would change it.
func TestMakeDemo(t *testing.T) {
	for _, c := range []struct{ argument, want string }{
		{"--silent", "bin/slipstream run demo"},
		{"RUNS=1", "bin/slipstream run demo --runs 1"},
	} {
		cmd := exec.Command("make", "--no-print-directory", "--dry-run", "demo", c.argument)
		cmd.Dir, cmd.Env = "../..", append(os.Environ(), "MAKEFLAGS=")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		if got := strings.TrimSpace(lines[len(lines)-1]); got != c.want {
			t.Errorf("make demo %s runs %q, want %q", c.argument, got, c.want)
		}
	}
}
