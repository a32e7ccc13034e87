package spec

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestDeepNesting: the deepest nesting that the size limit allows is an error, and takes memory in proportion to
// the size.
func TestDeepNesting(t *testing.T) {
	steps := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "%*sa:\n", i, "")
		}
		return b.String()
	}
	for name, text := range map[string]string{
		"lists":      strings.Repeat("[", maxFile),
		"mappings":   strings.Repeat("{a: ", maxFile/4),
		"blocks":     strings.Repeat("- ", maxFile/2),
		"indented":   steps(350),
		"closed":     strings.Repeat("[", maxFile/2) + strings.Repeat("]", maxFile/2),
		"in a value": "spec: " + strings.Repeat("[", maxFile-10),
		"keys":       strings.Repeat("? ", maxFile/2),
		"aliases":    "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
	} {
		want := "nested too deeply"
		switch name {
		case "aliases":
			want = "anchors, aliases and tags are not read"
		case "indented": // the size limit of a file bounds it
			want = "unknown field"
		}
		if _, err := Parse(name, []byte(text), nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %.200v, want %s", name, err, want)
		}
	}
}

// TestReadFile: ReadFile reads no more of a file than Parse accepts, and its error names the file.
func TestReadFile(t *testing.T) {
	name := filepath.Join(t.TempDir(), "huge.yaml")
	if err := os.WriteFile(name, []byte("a: b"), 0o644); err != nil {
		t.Fatal(err)
	}
	if data, err := ReadFile(name); err != nil || string(data) != "a: b" {
		t.Errorf("read %q, %v", data, err)
	}
	if err := os.Truncate(name, 1<<40); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadFile(name); err == nil || err.Error() != name+": must be at most 64 KiB" {
		t.Errorf("1 TiB: %v", err)
	}
}
