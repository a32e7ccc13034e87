package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
)

// file is a file of an archive.
type file struct {
	name    string
	mode    fs.FileMode
	content []byte
}

// documents are files of the repository that archives have beside the programs.
var documents = []string{"LICENSE", "README.md", "CHANGELOG.md"}

// hostFiles are those for a host that runs the agent.
var hostFiles = []string{"packaging/slipstream-agent.service", "packaging/policy.yaml"}

// archive packs the programs of a platform, with their manual and completions, below a folder with the archive's name.
func (r release) archive(p platform, programs []string) error {
	var files []file
	add := func(source, name string, mode fs.FileMode) error {
		content, err := os.ReadFile(source)
		files = append(files, file{path.Join(r.name(p), name), mode, content})
		return err
	}
	for _, program := range programs {
		if err := add(program, filepath.Base(program), 0o755); err != nil {
			return err
		}
	}
	others := documents
	if p.os == "linux" {
		others = append(others[:len(others):len(others)], hostFiles...)
	}
	for _, name := range others {
		if err := add(name, path.Base(name), 0o644); err != nil {
			return err
		}
	}
	for _, folder := range []string{"man", "completions"} {
		texts, err := filepath.Glob(filepath.Join(r.from, folder, "*"))
		if err != nil {
			return err
		}
		for _, text := range texts {
			if err := add(text, path.Join(folder, filepath.Base(text)), 0o644); err != nil {
				return err
			}
		}
	}
	if p.os == "windows" {
		return r.writeZip(r.archiveOf(p), files)
	}
	return r.writeTar(r.archiveOf(p), files)
}

// archiveOf returns the name of a platform's archive. Windows unpacks ZIP without further programs.
func (r release) archiveOf(p platform) string {
	if p.os == "windows" {
		return r.name(p) + ".zip"
	}
	return r.name(p) + ".tar.gz"
}

func (r release) writeTar(name string, files []file) error {
	var b bytes.Buffer
	zw, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return err
	}
	tw := tar.NewWriter(zw)
	for _, f := range files {
		header := &tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: int64(f.mode), Size: int64(len(f.content)), ModTime: r.date}
		if err := tw.WriteHeader(header); err != nil {
			return err
		}
		if _, err := tw.Write(f.content); err != nil {
			return err
		}
	}
	if err := tw.Close(); err != nil {
		return err
	}
	if err := zw.Close(); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, name), b.Bytes(), 0o644)
}

func (r release) writeZip(name string, files []file) error {
	var b bytes.Buffer
	zw := zip.NewWriter(&b)
	for _, f := range files {
		header := &zip.FileHeader{Name: f.name, Method: zip.Deflate, Modified: r.date}
		header.SetMode(f.mode)
		w, err := zw.CreateHeader(header)
		if err != nil {
			return err
		}
		if _, err := w.Write(f.content); err != nil {
			return err
		}
	}
	if err := zw.Close(); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, name), b.Bytes(), 0o644)
}

// chartFolder is the chart's source.
const chartFolder = "charts/slipstream"

// chart packs the chart with the version and the image of the release. helm package would do so too, but with the time of
// day in every file.
func (r release) chart([]platform) error {
	var files []file
	err := fs.WalkDir(os.DirFS(chartFolder), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := os.ReadFile(filepath.Join(chartFolder, name))
		if err != nil {
			return err
		}
		if content, err = r.edit(name, content); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		files = append(files, file{path.Join("slipstream", name), 0o644, content})
		return nil
	})
	if err != nil {
		return err
	}
	return r.writeTar("slipstream-"+r.version+".tgz", files)
}

// edit sets what differs between the chart of a release and that of the repository.
func (r release) edit(name string, content []byte) ([]byte, error) {
	for key, value := range map[string]map[string]string{
		"Chart.yaml":  {"version": r.version, "appVersion": r.version},
		"values.yaml": {"  repository": r.image},
	}[name] {
		line := regexp.MustCompile(`(?m)^` + key + `:.*$`)
		if n := len(line.FindAll(content, -1)); n != 1 {
			return nil, fmt.Errorf("%d lines have the key %q, want 1", n, strings.TrimSpace(key))
		}
		content = line.ReplaceAllLiteral(content, []byte(key+": "+value))
	}
	return content, nil
}
