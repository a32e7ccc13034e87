package text

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// percent matches a share with its interval, "56 % (49–63)".
var percent = regexp.MustCompile(`(\d+) % \((\d+)–(\d+)\)`)

// TestReadmeFigures fails for each figure of README.md with an interval that no page of results and no tutorial has, in
// per cent or as a ratio, and for each line of the demo's output that is not in the tutorial.
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
	figures := percent.FindAllStringSubmatch(readme, -1)
	for _, f := range figures {
		if ratio := fmt.Sprintf("%s (%s–%s)", asRatio(f[1]), asRatio(f[2]), asRatio(f[3])); !strings.Contains(shown, f[0]) && !strings.Contains(shown, ratio) {
			t.Errorf("README.md has %s, and no result has it or %s", f[0], ratio)
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
	if len(figures) < 12 || len(lines) < 8 {
		t.Errorf("only %d figures and %d lines were found", len(figures), len(lines))
	}
}

// asRatio returns a percentage as results print a ratio: "0.56".
func asRatio(percent string) string {
	n, err := strconv.Atoi(percent)
	if err != nil {
		panic(err) // it matched digits
	}
	return fmt.Sprintf("%.2f", float64(n)/100)
}
