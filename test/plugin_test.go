package test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestPlugin runs the program under the name by which kubectl finds plugins.
func TestPlugin(t *testing.T) {
	plugin := filepath.Join(t.TempDir(), "kubectl-slipstream")
	if err := os.Symlink(program, plugin); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{plugin: "  kubectl slipstream [", program: "  slipstream ["} {
		out, err := exec.Command(name, "--help").CombinedOutput()
		if err != nil || !strings.Contains(string(out), want) {
			t.Errorf("%s --help: %v, no %q in:\n%s", name, err, want, out)
		}
	}
}
