package main

import (
	"bytes"
	"os"
	"path/filepath"
	"text/template"
)

// published is an archive, as manifests of package managers name it.
type published struct {
	// Folder is the one folder in the archive, and Sum the archive's SHA-256.
	OS, Arch, URL, Folder, Sum string
}

func (r release) published(platforms []platform) (all []published, err error) {
	for _, p := range platforms {
		name := r.archiveOf(p)
		sum, err := checksum(filepath.Join(r.out, name))
		if err != nil {
			return nil, err
		}
		all = append(all, published{OS: p.os, Arch: p.arch, URL: r.url + "/" + name, Folder: r.name(p), Sum: sum})
	}
	return all, nil
}

// krew writes the plugin's manifest. Its name must be that of the plugin.
func (r release) krew(platforms []platform) error {
	archives, err := r.published(platforms)
	if err != nil {
		return err
	}
	return r.fill("krew.yaml.tmpl", "slipstream.yaml", map[string]any{"Version": r.version, "Archives": archives})
}

// brew writes the formula. Homebrew has its own words for systems, and none for Windows.
func (r release) brew(platforms []platform) error {
	archives, err := r.published(platforms)
	if err != nil {
		return err
	}
	systems := make(map[string][]published)
	for _, a := range archives {
		if system, is := map[string]string{"darwin": "macos", "linux": "linux"}[a.OS]; is {
			systems[system] = append(systems[system], a)
		}
	}
	return r.fill("brew.rb.tmpl", "slipstream.rb", map[string]any{"Version": r.version, "Systems": systems})
}

// fill executes a template of packaging.
func (r release) fill(source, to string, data any) error {
	t, err := template.ParseFiles(filepath.Join("packaging", source))
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if err := t.Option("missingkey=error").Execute(&b, data); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, to), b.Bytes(), 0o644)
}
