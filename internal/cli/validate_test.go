package cli

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/testenv/golden"
)

// TestValidate checks a file with problems, one without, one that does not exist and one
// that is not YAML. The output has the position of each problem, and names the good file
// too.
func TestValidate(t *testing.T) {
	t.Chdir("testdata/validate")
	code, stdout, stderr := slipstream(t, "validate", "broken.yaml", "good.yaml", "nowhere.yaml", "torn.yaml", "policy.yaml")
	if code != exitFailed {
		t.Errorf("exit %d", code)
	}
	if stdout != "good.yaml: valid\n" {
		t.Errorf("standard output %q", stdout)
	}
	golden.Compare(t, "problems.txt", stderr)
}

// TestValidateChecksWhatRunDoes: validate reports the problems for which run refuses a
// file.
func TestValidateChecksWhatRunDoes(t *testing.T) {
	t.Chdir("testdata/validate")
	_, _, validated := slipstream(t, "validate", "broken.yaml")
	code, _, ran := slipstream(t, "run", "./broken.yaml", "--dry-run")
	if code != exitUsage {
		t.Errorf("run: exit %d", code)
	}
	if diff := cmp.Diff(strings.ReplaceAll(ran, "./", ""), validated); diff != "" {
		t.Errorf("run and validate differ (-run +validate):\n%s", diff)
	}
}

func TestValidatePresets(t *testing.T) {
	files, err := filepath.Glob("../../examples/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no examples: %v", err)
	}
	code, stdout, stderr := slipstream(t, append([]string{"validate"}, files...)...)
	if code != exitGood || stderr != "" || strings.Count(stdout, ": valid\n") != len(files) {
		t.Errorf("exit %d\n%s%s", code, stdout, stderr)
	}
}
