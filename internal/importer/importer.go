// Package importer makes a result from the output of other programs. The name of a file tells its
// variant and block, its content which program wrote it. A trial may consist of several files. The
// package reads files and writes none; internal/traffic/tools has the parsers, internal/experiment
// the metrics.
package importer

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/traffic/tools"
	"slipstream.dev/internal/words"
)

// Options add what the files do not say.
type Options struct {
	// Pattern of the files' names.
	Pattern string
	// Name is the experiment's name, "imported" if empty. Baseline is the variant that the
	// others are compared with. It may be empty if there is only one variant.
	Name, Baseline string
	// Window is the length of each run, for files that do not say it.
	Window time.Duration
}

// Result is the content of the imported files.
type Result struct {
	Experiment *spec.Experiment
	Trials     []record.Trial
	Imported   record.Imported
	// Skipped are files whose names do not match the pattern. Copies are files with runs that were already read from them or
	// from other files.
	Skipped, Copies []Problem
	// Note says in a sentence where the results come from.
	Note string
}

// Problem says what is wrong with a file.
type Problem struct {
	Path string
	Err  error
}

func (p Problem) Error() string { return p.Path + ": " + p.Err.Error() }

// problems has all problems, by file.
type problems []Problem

func (p *problems) add(path string, format string, args ...any) {
	*p = append(*p, Problem{path, fmt.Errorf(format, args...)})
}

func (p problems) err() error {
	errs := make([]error, len(p))
	for i := range p {
		errs[i] = p[i]
	}
	return errors.Join(errs...)
}

// file is a file that has been read.
type file struct {
	path string
	name
	tools.Reading
	hash string
}

// Import reads files, and the files in folders. An error has a line for each file that it cannot
// read, or that does not fit the others.
func Import(paths []string, o Options) (*Result, error) {
	p, err := parsePattern(o.Pattern)
	if err != nil {
		return nil, err
	}
	found, err := find(paths)
	if err != nil {
		return nil, err
	}
	r := &Result{Imported: record.Imported{Pattern: o.Pattern}}
	var files, whole []*file // one for each test, and for each file
	var bad problems
	for _, path := range found {
		n, ok := p.match(path)
		if !ok {
			r.Skipped = append(r.Skipped, Problem{path, errors.New("its name does not match the pattern " + o.Pattern)})
			continue
		}
		of, err := read(path, n, tools.Known{Window: o.Window, Kind: n.workload})
		if err != nil {
			bad = append(bad, Problem{path, err})
			continue
		}
		files = append(files, of...)
		whole = append(whole, of[0])
		for _, f := range of {
			switch {
			case f.Copies == 1:
				r.Copies = append(r.Copies, Problem{path, errors.New("it contains 1 run twice; the copy is not counted")})
			case f.Copies > 1:
				r.Copies = append(r.Copies, Problem{path, fmt.Errorf("it contains %d copies of its own runs; these are not counted", f.Copies)})
			}
		}
	}
	if len(files)+len(bad) == 0 {
		return nil, fmt.Errorf("--pattern %s: it matches none of %s%s", o.Pattern, words.Count(len(found), "file"), such(found))
	}
	if err := bad.err(); err != nil {
		return nil, err
	}
	files, err = r.unique(files)
	if err != nil {
		return nil, err
	}
	workloads, err := r.assemble(p, files, o)
	if err != nil {
		return nil, err
	}
	r.Imported.Conditions = make(map[string]map[string]string)
	for name, reading := range workloads {
		if len(reading.Conditions) > 0 {
			r.Imported.Conditions[name] = reading.Conditions
		}
	}
	formats := make(map[string]bool)
	for _, f := range whole {
		r.Imported.Files = append(r.Imported.Files, record.File{Path: f.path, SHA256: f.hash, Format: f.Format, Version: f.Version})
		formats[strings.TrimSpace(f.Format+" "+f.Version)] = true
	}
	r.Note = fmt.Sprintf("Not measured by slipstream: imported from %s of %s. Where and on what it ran is not known.%s",
		words.Count(len(whole), "file"), strings.Join(slices.Sorted(maps.Keys(formats)), ", "), conditions(workloads))
	return r, nil
}

// conditions describes the unusual conditions of workloads in sentences. It leaves out the client, which the formats
// already name.
func conditions(workloads map[string]*tools.Reading) (text string) {
	for _, name := range slices.Sorted(maps.Keys(workloads)) {
		of := workloads[name].Conditions
		var unusual []string
		for _, key := range slices.Sorted(maps.Keys(of)) {
			if v := of[key]; key != tools.Client && v != tools.Forward && v != tools.NoLimit && v != tools.NoTLS && v != tools.HTTP1 {
				unusual = append(unusual, key+" "+v)
			}
		}
		if len(unusual) > 0 {
			text += fmt.Sprintf(" The traffic of %s has %s.", name, strings.Join(unusual, ", "))
		}
	}
	return text
}

// unique leaves out runs that were already read, and notes that. It is an error if the names of the
// files give such a run two variants, workloads, pairs or nodes.
func (r *Result) unique(files []*file) ([]*file, error) {
	first, content := make(map[string]*file), make(map[string]*file)
	var bad problems
	var kept []*file
	for _, f := range files {
		var runs []tools.Run
		for _, run := range f.Runs {
			other := first[run.ID]
			switch {
			case run.ID == "":
			case other == nil:
				first[run.ID] = f
			case other.variant != f.variant || other.workload != f.workload || other.pairs != f.pairs || other.number == f.number:
				bad.add(f.path, "it has a run that %s has too: one run cannot be of two variants, workloads, pairs or nodes", other.path)
				continue
			default:
				r.Copies = append(r.Copies, Problem{f.path, fmt.Errorf("it has a run that %s also has; it is counted once", other.path)})
				continue
			}
			runs = append(runs, run)
		}
		if other := content[f.hash+f.Test]; other != nil && len(runs) == len(f.Runs) {
			r.Copies = append(r.Copies, Problem{f.path, fmt.Errorf("it is the same as %s, but has so few digits that it may be another run, and is counted: remove it if it is a copy", other.path)})
		}
		content[f.hash+f.Test] = f
		if f.Runs = runs; len(runs) > 0 {
			kept = append(kept, f)
		}
	}
	return kept, bad.err()
}

func such(paths []string) string {
	if len(paths) == 0 {
		return ""
	}
	return ", such as " + paths[0]
}

// find lists files, and those in folders at any depth. It skips hidden folders.
func find(paths []string) ([]string, error) {
	var found []string
	for _, root := range paths {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case d.IsDir() && path != root && strings.HasPrefix(d.Name(), "."):
				return filepath.SkipDir
			case !d.IsDir():
				found = append(found, filepath.ToSlash(path))
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	slices.Sort(found)
	return slices.Compact(found), nil
}

// maxFile bounds the size of a file, in bytes. No tool writes as much for a trial.
const maxFile = 64 << 20

// read returns a file for each test in it.
func read(path string, n name, known tools.Known) ([]*file, error) {
	if err := n.check(); err != nil {
		return nil, err
	}
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, errors.Unwrap(err)
	case !info.Mode().IsRegular():
		return nil, errors.New("it is not a regular file")
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, errors.Unwrap(err)
	}
	defer f.Close()
	data, err := record.ReadAtMost(f, maxFile) // it may grow
	if err != nil {
		return nil, cmp.Or(errors.Unwrap(err), err)
	}
	text, err := decodeText(data)
	if err != nil {
		return nil, err
	}
	if err := record.CheckJSON(text); err != nil {
		return nil, err
	}
	readings, err := tools.Read(text, known)
	switch {
	case tools.NoWindow(err):
		return nil, fmt.Errorf("%w: give it with --duration", err)
	case err != nil:
		return nil, err
	}
	hash := sha256.Sum256(data)
	var files []*file
	for i, reading := range readings {
		if len(reading.Runs) > 1 && n.number >= 0 {
			return nil, fmt.Errorf("it has %d runs, and its name has the number of one: leave {block} or {run} out of the pattern", len(reading.Runs))
		}
		f := &file{path, n, reading, hex.EncodeToString(hash[:])}
		if len(readings) > 1 {
			f.workload = strings.TrimPrefix(n.workload+"-"+testName(readings, i), "-")
		}
		files = append(files, f)
	}
	return files, nil
}

// testName names a test among those of one file: by its kind or, if several tests are of this kind, by its name in the
// file.
func testName(readings []tools.Reading, i int) string {
	kind := readings[i].Workload.Kind()
	for j, other := range readings {
		if j != i && other.Workload.Kind() == kind {
			return readings[i].Test
		}
	}
	return kind
}

// notLabel matches the characters that an experiment's name cannot have.
var notLabel = regexp.MustCompile(`[^a-z0-9]+`)

// experiment makes the experiment of the trials. Its checks are those of any experiment file.
func (r *Result) experiment(p *pattern, trials []*trial, workloads []spec.Workload, o Options) error {
	variants := distinct(trials, func(t *trial) string { return t.variant })
	baseline := o.Baseline
	switch {
	case baseline == "" && len(variants) == 1:
		baseline = variants[0]
	case baseline == "":
		return fmt.Errorf("--baseline: name the variant that the others are compared with: %s", strings.Join(variants, ", "))
	case !slices.Contains(variants, baseline):
		return fmt.Errorf("--baseline %s: no file has this variant; %s", o.Baseline, spec.Suggest(baseline, variants))
	}
	name := strings.Trim(notLabel.ReplaceAllString(strings.ToLower(cmp.Or(o.Name, "imported")), "-"), "-")
	e := &spec.Experiment{APIVersion: v1alpha1.APIVersion, Kind: spec.KindExperiment, Metadata: spec.Metadata{Name: name}}
	e.Spec = spec.Spec{
		Target:   spec.Target{Imported: &spec.Imported{Interleaved: p.has(blockField)}},
		Baseline: baseline, Workloads: workloads,
		Pairs: distinct(trials, func(t *trial) int { return t.pairs }),
		Runs:  spec.Runs{N: len(distinct(trials, func(t *trial) int { return t.number }))},
	}
	e.Spec.Variants = []spec.Variant{{Name: baseline}}
	for _, v := range variants {
		if v != baseline {
			e.Spec.Variants = append(e.Spec.Variants, spec.Variant{Name: v})
		}
	}
	for i := range e.Spec.Workloads {
		w := &e.Spec.Workloads[i]
		of := slices.DeleteFunc(slices.Clone(trials), func(t *trial) bool { return t.workload != w.Name })
		if pairs := distinct(of, func(t *trial) int { return t.pairs }); !slices.Equal(pairs, e.Spec.Pairs) {
			w.Pairs = pairs
		}
	}
	text, err := spec.Marshal(e)
	if err != nil {
		return err
	}
	r.Experiment, err = spec.Parse("the experiment of these files", text, nil)
	return err
}

// distinct returns the different values of the trials, sorted.
func distinct[T cmp.Ordered](trials []*trial, of func(*trial) T) []T {
	seen := make(map[T]bool)
	for _, t := range trials {
		seen[of(t)] = true
	}
	return slices.Sorted(maps.Keys(seen))
}
