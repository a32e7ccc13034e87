package text

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// ratio matches a ratio with its interval: "1.58 (1.53–1.64)".
var ratio = regexp.MustCompile(`\d+\.\d\d \(\d+\.\d\d–\d+\.\d\d\)`)

// TestReadmeFigures fails for each ratio of README.md with an interval that no page of results and no tutorial has, and for each
// line of the demo's output that is not in the tutorial.
func TestReadmeFigures(t *testing.T) {
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join("..", "..", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	readme, tutorial := read("README.md"), read("docs/tutorial/demo.md")
	pages, err := filepath.Glob(filepath.Join("..", "..", "docs", "results", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	shown := tutorial
	for _, page := range pages {
		shown += read(filepath.Join("docs", "results", filepath.Base(page)))
	}
	figures := ratio.FindAllString(readme, -1)
	for _, f := range figures {
		if !strings.Contains(shown, f) {
			t.Errorf("README.md has %s, and no page of results has it", f)
		}
	}
	_, output, _ := strings.Cut(readme, "\n    $ sudo bin/slipstream run demo\n")
	output, _, _ = strings.Cut(output, "\n\n")
	lines := strings.Split(output, "\n")
	for _, line := range lines {
		if !strings.Contains(tutorial, line+"\n") {
			t.Errorf("the demo's output in README.md has %q, and docs/tutorial/demo.md does not", line)
		}
	}
	if len(figures) < 20 || len(lines) < 8 {
		t.Errorf("only %d figures and %d lines were found", len(figures), len(lines))
	}
}
