// Package bundle seals a result in one file, and reads and verifies results: a bundle, or the folder of a run. archive.go knows files and
// hashes, verify.go computes everything again from the trials. A bundle says whether it was changed, not who made it: whoever can
// change a trial can seal it again. So its hash has to be kept elsewhere.
package bundle

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

// Program is the program that wrote figures. Another one may lay them out differently, and round differently.
type Program struct {
	Version string `json:"version"`
	Arch    string `json:"arch"`
}

// This returns the program that runs, by its version.
func This(version string) Program { return Program{version, runtime.GOARCH} }

// writesAs reports whether two programs are certain to write the same bytes. Programs that were not built from a commit are not.
func (p Program) writesAs(other Program) bool {
	return p == other && p.Version != "devel" && !strings.HasSuffix(p.Version, ".dirty")
}

// Seal writes a result as a bundle. The same result gives the same bytes.
func Seal(w io.Writer, dir *record.Dir, by Program) error {
	var files []file
	for _, name := range record.Measured() {
		data, err := dir.Read(name)
		if err != nil {
			return err
		}
		if strings.HasSuffix(name, lines) {
			data = data[:bytes.LastIndexByte(data, '\n')+1] // a run may be writing the last one
		}
		files = append(files, file{name, data})
	}
	r, err := read(fileSet(files).ReadFile)
	if err != nil {
		return err
	}
	for _, f := range r.files() {
		var b bytes.Buffer
		if err := f.Write(&b); err != nil {
			return err
		}
		files = append(files, file{f.Name, b.Bytes()})
	}
	m := manifest{Bundle: format, Program: by, Result: folderName(dir.Path)}
	for _, f := range files {
		m.Files = append(m.Files, sumOf(f))
	}
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return fmt.Errorf("write manifest: %w", err)
	}
	return write(w, m.Result, append([]file{{manifestFile, append(text, '\n')}}, files...))
}

var notInNames = regexp.MustCompile(`[^A-Za-z0-9._+-]+`)

// folderName returns the name of the folder into which a bundle unpacks.
func folderName(path string) string {
	if full, err := filepath.Abs(path); err == nil {
		path = full
	}
	name := strings.Trim(notInNames.ReplaceAllString(filepath.Base(path), "-"), ".-")
	if name == "" {
		return "result"
	}
	return name
}

// Result is a result as its files say it.
type Result struct {
	Experiment  *spec.Experiment
	Environment record.Environment
	Trials      []record.Trial
	// Summary is what the trials give, in place of summary.json.
	Summary *stats.Summary
}

// Read reads a results folder, and computes the summary from its trials. It fails if there are none.
func Read(dir *record.Dir) (*Result, error) { return read(dir.Read) }

// files are the files that follow from the result.
func (r *Result) files() []report.File {
	return report.New(r.Experiment, r.Summary, r.Trials, r.Environment).Files()
}

// read reads what was measured, and computes the rest.
func read(readFile func(string) ([]byte, error)) (*Result, error) {
	names := record.Measured()
	files := make(map[string][]byte)
	for _, name := range names {
		var err error
		if files[name], err = readFile(name); err != nil {
			return nil, err
		}
	}
	environment, experiment, lines := names[0], names[1], names[2]
	var r Result
	var err error
	if r.Environment, err = record.ReadEnvironment(files[environment]); err != nil {
		return nil, fmt.Errorf("%s: %w", environment, err)
	}
	if r.Experiment, err = spec.Parse(experiment, files[experiment], nil); err != nil {
		return nil, err
	}
	if r.Trials, err = record.ReadTrials(bytes.NewReader(files[lines])); err != nil {
		return nil, fmt.Errorf("%s:%w", lines, err)
	}
	if len(r.Trials) == 0 {
		return nil, errors.New("it has no results yet: no trial has ended")
	}
	if r.Summary, err = stats.Analyze(r.Experiment, r.Trials); err != nil {
		return nil, err
	}
	return &r, nil
}

func hash(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// file is a file of a result, by its name in the folder.
type file struct {
	name string
	data []byte
}

type fileSet []file

// ReadFile returns the content of a file.
func (s fileSet) ReadFile(name string) ([]byte, error) {
	i := slices.IndexFunc(s, func(f file) bool { return f.name == name })
	if i < 0 {
		return nil, fmt.Errorf("%s: %w", name, fs.ErrNotExist)
	}
	return s[i].data, nil
}
