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

// switchedFile exists while a switch is in force, and names the variant.
const switchedFile = "switched.json"

type switched struct {
	Variant string `json:"variant"`
}

// Switched records the variant whose switch is in force, or with "" that the original state is back. The
// record is on disk when Switched returns.
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

// SwitchedVariant returns the name of the variant whose switch is in force, or "" if none is.
func (d *Dir) SwitchedVariant() (string, error) {
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

// LeftSwitched returns the results folders below parent in which a switch is still in force. A symbolic
// link to such a folder is an error, because the folder may be somebody else's.
func LeftSwitched(parent string) (left []string, err error) {
	folders, _ := os.ReadDir(parent) // a missing parent has none
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
