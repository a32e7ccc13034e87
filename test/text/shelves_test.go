package text

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestShelves fails for each document that is missing from the index of docs or of the
// site, because nobody would find it. Decisions have their own index.
func TestShelves(t *testing.T) {
	docs := filepath.Join("..", "..", "docs")
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(docs, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	index, site, decisions := read("README.md"), read("mkdocs.yml"), read("adr/README.md")
	pages, err := filepath.Glob(filepath.Join(docs, "*", "*.md"))
	if err != nil || len(pages) == 0 {
		t.Fatalf("no pages: %v", err)
	}
	for _, page := range pages {
		name, err := filepath.Rel(docs, page)
		if err != nil {
			t.Fatal(err)
		}
		if file, ok := strings.CutPrefix(name, "adr/"); ok && file != "README.md" {
			if !strings.Contains(decisions, "]("+file+")") {
				t.Errorf("docs/adr/README.md does not have %s", file)
			}
			continue
		}
		if !strings.Contains(index, "]("+name+")") {
			t.Errorf("docs/README.md does not have %s", name)
		}
		if !strings.Contains(site, "docs/"+name) {
			t.Errorf("docs/mkdocs.yml does not have docs/%s", name)
		}
	}
}
