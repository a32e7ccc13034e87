package text

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestPackages fails for each package that the table of docs/explanation/architecture.md does not name. A row about a package
// may name those below it by the end of their paths.
func TestPackages(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "explanation", "architecture.md"))
	if err != nil {
		t.Fatal(err)
	}
	rows := slices.DeleteFunc(strings.Split(string(text), "\n"), func(line string) bool { return !strings.HasPrefix(line, "| `") })
	root := os.DirFS(filepath.Join("..", ".."))
	for _, top := range []string{"internal", "pkg"} {
		err = fs.WalkDir(root, top, func(dir string, d fs.DirEntry, err error) error {
			if err != nil || !d.IsDir() {
				return err
			}
			if d.Name() == "testdata" {
				return fs.SkipDir
			}
			if files, _ := fs.Glob(root, path.Join(dir, "*.go")); len(files) > 0 && !slices.ContainsFunc(rows, func(row string) bool { return namesPackage(row, dir) }) {
				t.Errorf("the table of packages lacks %s", dir)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

func namesPackage(row, dir string) bool {
	within := path.Dir(dir)
	top := strings.Join(strings.Split(dir, "/")[:2], "/")
	for _, end := range []string{path.Base(within) + "/" + path.Base(dir), "/" + path.Base(dir)} {
		if strings.Contains(row, "`"+top) && strings.Contains(row, "`"+end+"`") {
			return true
		}
	}
	return strings.Contains(row, "`"+dir+"`")
}
