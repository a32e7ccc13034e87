package test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestAzureIsAnotherProgram checks that slipstream azure runs slipstream-azure with all the following arguments, and
// exits with its code. It prefers the program in its own folder to one in PATH, and names what is missing if there
// is none.
func TestAzureIsAnotherProgram(t *testing.T) {
	beside, path := t.TempDir(), t.TempDir()
	self := filepath.Join(beside, "slipstream")
	data, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(self, data, 0o755); err != nil {
		t.Fatal(err)
	}
	run := func() (string, int) {
		cmd := exec.Command(self, "azure", "audit", "--gate", "a b")
		cmd.Env = append(os.Environ(), "PATH="+path+":/usr/bin:/bin")
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState == nil {
			t.Fatal(err)
		}
		return string(out), cmd.ProcessState.ExitCode()
	}
	if out, code := run(); code != 2 || !strings.Contains(out, "there is no program slipstream-azure") {
		t.Errorf("without the program: exit code %d, %s", code, out)
	}
	for _, dir := range []string{path, beside} {
		script := "#!/bin/sh\necho " + dir + " \"$#:$3\"\nexit 4\n"
		if err := os.WriteFile(filepath.Join(dir, "slipstream-azure"), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		if out, code := run(); code != 4 || strings.TrimSpace(out) != dir+" 3:a b" {
			t.Errorf("in %s: exit code %d, %s", dir, code, out)
		}
	}
}
