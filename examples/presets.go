// Package examples holds the experiments that come with slipstream, as files to
// read and as presets to run by name. It embeds them and runs nothing (see
// internal/experiment); api/v1alpha1 says what may stand in one.
package examples

import (
	"embed"
	"strings"

	"slipstream.dev/internal/spec"
)

//go:embed *.yaml
var files embed.FS

// Preset returns the experiment file of a preset, and whether a preset has that
// name.
func Preset(name string) ([]byte, bool) {
	data, err := files.ReadFile(name + ".yaml")
	return data, err == nil
}

// Names returns the names of all presets, in alphabetical order.
func Names() []string {
	entries, _ := files.ReadDir(".") // an embedded folder is always there, and sorted
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = strings.TrimSuffix(e.Name(), ".yaml")
	}
	return names
}

// Description returns the first line of a preset's description, or "" if there
// is no such preset.
func Description(name string) string {
	data, ok := Preset(name)
	if !ok {
		return ""
	}
	e, err := spec.Parse(name+".yaml", data, nil)
	if err != nil {
		return "" // a test checks that every preset parses
	}
	line, _, _ := strings.Cut(e.Metadata.Description, "\n")
	return line
}
