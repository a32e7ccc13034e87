package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"
)

// TestNothingPrintedIsControl: file names, which somebody else may have chosen, cannot control the terminal.
func TestNothingPrintedIsControl(t *testing.T) {
	const evil = "x\x1b]0;title\x07\x1b[2J\u202ey\u2066\u009b\r"
	dir := t.TempDir()
	file := filepath.Join(dir, evil+".yaml")
	if err := os.WriteFile(file, []byte("kind: "+"\"\\e[2J\""), 0o644); err != nil {
		t.Fatal(err)
	}
	valid := filepath.Join(dir, "valid"+evil)
	if err := os.WriteFile(valid, []byte(resultYAML), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"validate", file, valid}, {"run", file}, {"run", valid, "--dry-run"}, {"report", file}, {"cleanup", "--dry-run", file}, {"run", "--resume", file},
		{"import", "--pattern", "{variant}-{block}.json", dir}, {"import", "--pattern", evil, dir}, {"run", "demo", "--on", evil}, {evil}, {"run", "--" + evil},
	} {
		_, out, errs := slipstream(t, args...)
		if out+errs == "" {
			t.Errorf("%q: nothing was printed", args)
		}
		for _, r := range out + errs {
			if r != '\n' && r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r)) {
				t.Errorf("%q printed %q:\n%q", args, r, out+errs)
				break
			}
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if code, out, errs := slipstream(t, "completion", shell); code != exitGood || strings.Contains(out, `\u00`) {
			t.Errorf("completion %s is changed: exit code %d, %s", shell, code, errs)
		}
	}
}
