package build

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestFind: a file that is another Go program, and one that is no program, are refused by their names.
func TestFind(t *testing.T) {
	for _, file := range []string{os.Args[0], "build_test.go", "nonesuch"} {
		if all, err := Find([]string{file}); err == nil || !strings.HasPrefix(err.Error(), "--host-binary "+file+": ") {
			t.Errorf("%s: %v, %v", file, all, err)
		}
	}
}

// TestSumCommand checks that each of the programs for SHA-256 works.
func TestSumCommand(t *testing.T) {
	shell, err := exec.LookPath("sh")
	if err != nil {
		t.Skip("there is no sh")
	}
	for _, sum := range append(sums, "none") {
		dir := t.TempDir()
		name, _, _ := strings.Cut(sum, " ")
		program, err := exec.LookPath(name)
		if err != nil && sum != "none" {
			t.Logf("%s is not installed", name)
			continue
		}
		if sum != "none" {
			if err := os.Symlink(program, filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.Command(shell, "-c", SumCommand)
		cmd.Env, cmd.Stdin = []string{"PATH=" + dir}, strings.NewReader("x")
		out, err := cmd.CombinedOutput()
		want := fmt.Sprintf("%x", sha256.Sum256([]byte("x")))
		if got, _, _ := strings.Cut(strings.TrimSpace(string(out)), " "); err != nil || got != want && (sum != "none" || got != "none") {
			t.Errorf("%s: %v, %s", sum, err, out)
		}
	}
}
