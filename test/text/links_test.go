package text

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	link     = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading  = regexp.MustCompile(`(?m)^#+ +(.*)$`)
	anchorID = regexp.MustCompile(`<a id="([^"]+)">`)
	notSlug  = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// anchors returns the anchors that GitHub generates for a document's headings, and those in the document itself.
func anchors(text string) map[string]bool {
	all := make(map[string]bool)
	for _, m := range heading.FindAllStringSubmatch(text, -1) {
		all[strings.ReplaceAll(notSlug.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-")] = true
	}
	for _, m := range anchorID.FindAllStringSubmatch(text, -1) {
		all[m[1]] = true
	}
	return all
}

// eachDocument calls f with every Markdown file.
func eachDocument(t *testing.T, f func(path, text string)) {
	t.Helper()
	root := filepath.Join("..", "..")
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == ".git" || d.Name() == "bin" || d.Name() == "results" && filepath.Dir(path) == root) {
			return filepath.SkipDir
		}
		if d.IsDir() || filepath.Ext(path) != ".md" {
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		f(path, string(b))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestLinks fails for each link in a document to a file or a heading that does not exist.
func TestLinks(t *testing.T) {
	eachDocument(t, func(path, text string) {
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			file, anchor, _ := strings.Cut(m[1], "#")
			to := path
			if file != "" {
				to = filepath.Join(filepath.Dir(path), file)
			}
			if _, err := os.Stat(to); err != nil {
				t.Errorf("%s: %s: no such file", path, m[1])
				continue
			}
			if anchor == "" || filepath.Ext(to) != ".md" {
				continue
			}
			linked, err := os.ReadFile(to)
			if err != nil {
				t.Fatal(err)
			}
			if !anchors(string(linked))[anchor] {
				t.Errorf("%s: %s: no such heading", path, m[1])
			}
		}
	})
}
