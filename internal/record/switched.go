package record

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// switchedFile is there while something is switched, and names the variant.
const switchedFile = "switched.json"

type switched struct {
	Variant string `json:"variant"`
}

// Switched keeps the name of the variant whose switch is made, and with "" that what was
// found is back. It is on disk when it returns.
func (d *Dir) Switched(variant string) error {
	if variant == "" {
		err := d.root.Remove(switchedFile)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("record that nothing is switched: %w", err)
		}
		return syncDir(d.root, ".")
	}
	return d.WriteFile(switchedFile, func(w io.Writer) error {
		return json.NewEncoder(w).Encode(switched{variant})
	})
}

// SwitchedFor is the name of the variant whose switch is made, "" if none is.
func (d *Dir) SwitchedFor() (string, error) {
	data, err := d.read(switchedFile)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	var s switched
	if err == nil {
		err = json.Unmarshal(data, &s)
	}
	if err == nil && s.Variant == "" {
		err = errors.New("it names no variant")
	}
	if err != nil {
		return "", fmt.Errorf("read %s: %w", d.file(switchedFile), err)
	}
	return s.Variant, nil
}

// LeftSwitched are the results folders below parent in which something is still switched. Below
// a symbolic link there may be the folder of somebody else, so one that leads to such a folder is an error.
func LeftSwitched(parent string) (left []string, err error) {
	folders, _ := os.ReadDir(parent) // without a parent there are none
	for _, f := range folders {
		path := filepath.Join(parent, f.Name())
		if _, err := os.Lstat(filepath.Join(path, switchedFile)); err != nil {
			continue
		}
		if f.Type()&fs.ModeSymlink != 0 {
			return nil, fmt.Errorf("a run has not undone its switch: %w", linkError(path))
		}
		left = append(left, path)
	}
	return left, nil
}
