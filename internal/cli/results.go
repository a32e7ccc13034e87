package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"slipstream.dev/internal/record"
)

// resultsDir is the folder in which run creates results folders, unless --out names another.
const resultsDir = "results"

// latest is the name that people give the newest result: "latest" in results, "DIR/latest" in DIR.
const latest = "latest"

// resultFiles are the files of a results folder that people open, and then name in place of the folder.
var resultFiles = []string{"report.html", "summary.json", "summary.csv", "trials.jsonl", "environment.json", "experiment.yaml"}

// openResult opens the results folder that a user named, for reading.
func openResult(path string) (*record.Dir, error) {
	path, err := findResult(path)
	if err != nil {
		return nil, usage(err)
	}
	dir, err := record.Open(path)
	return dir, usage(err)
}

// findResult returns the path of the results folder that a user means: the folder itself, one of its files, such as its
// report.html, a folder of results by its name, or the newest. The path need not be a results folder.
func findResult(path string) (string, error) {
	switch info, err := os.Stat(path); {
	case err == nil && !info.IsDir() && slices.Contains(resultFiles, filepath.Base(path)):
		return filepath.Dir(path), nil
	case !errors.Is(err, fs.ErrNotExist):
		return path, nil // the folder is there, or opening it says what is wrong
	}
	parent, name := filepath.Split(filepath.Clean(path))
	if parent == "" {
		parent = resultsDir
	}
	all := resultNames(parent)
	switch {
	case name == latest && len(all) > 0:
		return filepath.Join(parent, all[len(all)-1]), nil
	case name == latest:
		return "", fmt.Errorf("%s: there is no result in %s yet", path, filepath.Clean(parent))
	case slices.Contains(all, name):
		return filepath.Join(parent, name), nil
	}
	return "", fmt.Errorf("there is no results folder %s%s", path, didYouMean(name, all))
}

// resultName matches the name of a results folder, and in it the time at which its run began.
var resultName = regexp.MustCompile(`-(\d{8}T\d{6}Z)$`)

// resultNames returns the names of the results folders in a folder, oldest first.
func resultNames(parent string) []string {
	entries, _ := os.ReadDir(parent) // a folder that cannot be read has no results for the user
	var all []string
	for _, e := range entries {
		if e.IsDir() && resultName.MatchString(e.Name()) {
			all = append(all, e.Name())
		}
	}
	slices.SortStableFunc(all, func(a, b string) int {
		return strings.Compare(resultName.FindString(a), resultName.FindString(b))
	})
	return all
}
