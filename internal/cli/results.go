package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"slipstream.dev/internal/history"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/words"
)

// resultsDir is the default folder for results folders.
const resultsDir = "results"

// latest is the name that people give the newest result: "latest" in results, "DIR/latest" in DIR.
const latest = "latest"

// resultFiles are files of a results folder that users open, and may then name in place of the folder.
var resultFiles = []string{"report.html", "summary.json", "summary.csv", "trials.jsonl", "environment.json", "experiment.yaml"}

// openResult opens the results folder that a user named, for reading.
func openResult(path string) (*record.Dir, error) {
	path, err := findResult(path)
	if err != nil {
		return nil, usage(err)
	}
	if all, _ := history.Names(path); len(all) > 0 { // a folder that cannot be read has no results for the user
		return nil, usage(fmt.Errorf("%s has %s: name one of them, such as %s", path, words.Count(len(all), "result"), filepath.Join(path, latest)))
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
	all, _ := history.Names(parent) // a folder that cannot be read has no results for the user
	switch {
	case name == latest && len(all) > 0:
		return filepath.Join(parent, all[0]), nil
	case slices.Contains(all, name):
		return filepath.Join(parent, name), nil
	case len(all) > 0:
		return "", fmt.Errorf("there is no results folder %s%s", path, didYouMean(name, append(all, latest)))
	}
	parent = filepath.Clean(parent)
	near := didYouMean(filepath.Base(parent), namesBeside(parent))
	if name == latest {
		return "", fmt.Errorf("%s: there is no result in %s yet%s", path, parent, near)
	}
	return "", fmt.Errorf("there is no results folder %s%s", path, near)
}
