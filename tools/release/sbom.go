package main

import (
	"bytes"
	"cmp"
	"debug/buildinfo"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// bill writes a bill of materials in the format of CycloneDX: the modules that the Go linker has recorded in programs.
func (r release) bill(name string, programs []string) error {
	components := make(map[string]cdx.Component)
	for _, program := range programs {
		info, err := buildinfo.ReadFile(program)
		if err != nil {
			return err
		}
		for _, m := range modules(info) {
			components[m.PackageURL] = m
		}
	}
	sorted := slices.SortedFunc(maps.Values(components), func(a, b cdx.Component) int { return cmp.Compare(a.PackageURL, b.PackageURL) })
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{Timestamp: r.date.Format(time.RFC3339), Component: &cdx.Component{
		Type: cdx.ComponentTypeApplication, Name: "slipstream", Version: r.version, BOMRef: "slipstream",
		Licenses: &cdx.Licenses{{License: &cdx.License{ID: "Apache-2.0"}}},
	}}
	bom.Components = &sorted
	var b bytes.Buffer
	if err := cdx.NewBOMEncoder(&b, cdx.BOMFileFormatJSON).SetPretty(true).EncodeVersion(bom, cdx.SpecVersion1_6); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, name+".cdx.json"), b.Bytes(), 0o644)
}

// modules returns the standard library and the modules that are in a program.
func modules(info *buildinfo.BuildInfo) (all []cdx.Component) {
	for _, m := range append([]*debug.Module{{Path: "std", Version: strings.TrimPrefix(info.GoVersion, "go")}}, info.Deps...) {
		if m.Replace != nil {
			m = m.Replace
		}
		url := fmt.Sprintf("pkg:golang/%s@%s", m.Path, m.Version)
		all = append(all, cdx.Component{Type: cdx.ComponentTypeLibrary, Name: m.Path, Version: m.Version, PackageURL: url, BOMRef: url})
	}
	return all
}

// billOfImage is about the programs in the image: slipstream for each architecture of Linux.
func (r release) billOfImage(platforms []platform) error {
	var programs []string
	for _, p := range platforms {
		if p.os == "linux" {
			programs = append(programs, filepath.Join(r.dir(p), "slipstream"))
		}
	}
	return r.bill(strings.Join([]string{"slipstream", r.version, "image"}, "_"), programs)
}
