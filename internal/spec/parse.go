package spec

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
)

// Error is one problem of an experiment file.
type Error struct {
	// File as given to Parse; Line and Column count from 1.
	File         string
	Line, Column int
	// Override is the "key=value" that caused the problem; there is no Line then.
	Override string
	// Flag is the flag that the user wrote, if the override comes from one ("--runs 0").
	// The caller of Parse sets it.
	Flag string
	// Field is the path of the field, "spec.pairs[2]"; empty where the
	// problem is with the whole file.
	Field string
	// Problem says what is wrong and what is allowed.
	Problem string
}

// Error returns "experiment.yaml:12:7: spec.pairs[2]: must be at least 1, is 0", for example.
// If there is a flag or an override, the text begins with that.
func (e *Error) Error() string {
	if e.Flag != "" {
		return e.Flag + ": " + e.Problem
	}
	at := fmt.Sprintf("%s:%d:%d: ", e.File, e.Line, e.Column)
	if e.Override != "" {
		at = fmt.Sprintf("--set %s: ", e.Override)
	}
	if e.Field != "" {
		at += e.Field + ": "
	}
	return at + e.Problem
}

// Errors are all problems of a file, by line and column, those of overrides last.
type Errors []*Error

// Error returns a line for each problem.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, err := range e {
		lines[i] = err.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap lets errors.As find an *Error.
func (e Errors) Unwrap() []error {
	errs := make([]error, len(e))
	for i, err := range e {
		errs[i] = err
	}
	return errs
}

// maxFile bounds a file, well above any experiment: the YAML parser's time grows
// with the square of some inputs.
const maxFile = 64 << 10

// ReadFile reads a file for Parse or ParsePolicy, and no more of it than they accept.
func ReadFile(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return Read(name, f)
}

// Read is ReadFile for a file that is open already. Its name is for messages only.
func Read(name string, f io.Reader) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(data) > maxFile {
		return nil, fmt.Errorf("%s: must be at most %d KiB", name, maxFile>>10)
	}
	return data, err
}

// Parse reads an experiment: YAML with no unknown fields, then the overrides
// ("spec.runs=5", "spec.workloads.stream.stream.duration=3s"), then every
// default, then the checks. The file's name is for messages only. An error is
// of type Errors and holds all problems that were found.
func Parse(file string, data []byte, overrides []string) (*Experiment, error) {
	return newReader(file).read(data, overrides)
}

func (r *reader) read(data []byte, overrides []string) (*Experiment, error) {
	if len(data) > maxFile {
		r.fail("", "must be at most %d KiB, is %d", maxFile>>10, len(data)>>10)
		return nil, r.err()
	}
	root := r.parse(bytes.TrimPrefix(data, []byte("\ufeff")), "") // editors on Windows write this mark
	if root == nil {
		return nil, r.err()
	}
	for _, set := range overrides {
		r.override(root, set)
	}
	var e Experiment
	r.nodes[""] = root
	if root.kind == null {
		r.fail("", "must be an experiment, is empty")
	}
	r.value(root, &e, "")
	r.malformed = len(r.errors)
	if root.kind == mapping {
		r.experiment(&e)
	}
	if err := r.err(); err != nil {
		return nil, err
	}
	return &e, nil
}
