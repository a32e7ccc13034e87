package text

import (
	"os/exec"
	"path"
	"path/filepath"
	"testing"

	"slipstream.dev/internal/testenv/golden"
)

// TestLibrary fails for each change of what other programs import: docs/reference/library.md says which changes may be made.
func TestLibrary(t *testing.T) {
	for _, pkg := range []string{"pkg/stats", "pkg/result"} {
		out, err := exec.Command("go", "doc", "-C", "../..", "-all", "./"+pkg).CombinedOutput()
		if err != nil {
			t.Fatalf("go doc %s: %v\n%s", pkg, err, out)
		}
		golden.Compare(t, filepath.Join("testdata", path.Base(pkg)+".txt"), string(out))
	}
}
