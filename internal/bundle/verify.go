package bundle

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"slices"

	"slipstream.dev/internal/experiment"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

// Difference is the first thing in a result that does not follow from the rest of it, or is not as it was sealed.
type Difference struct{ File, Is string }

func (d Difference) Error() string { return d.File + ": " + d.Is }

// Verified says what was verified.
type Verified struct {
	// Result is the name of a bundle's result, Hash its SHA-256 in hexadecimal; both are empty for a folder.
	Result, Hash string
	// By is the program that wrote the figures.
	By Program
	// Trials is the number of those whose metrics and histograms follow from what their pairs and hosts measured; Unmeasured
	// is the number of those that failed, or lack these measurements.
	Trials, Unmeasured int
	// Files follow from the trials byte by byte.
	Files []string
	// Otherwise are the files that another version of the program wrote, and that this one writes differently. The numbers of
	// the summary are the same.
	Otherwise []string
}

// Verify verifies that no file of the bundle was changed, and that all follows from its trials. An error may be a Difference.
func (b *Bundle) Verify(this Program) (Verified, error) {
	if err := b.changed(); err != nil {
		return Verified{}, err
	}
	v, err := verify(b.files.ReadFile, b.manifest.Program, this)
	v.Result, v.Hash = b.manifest.Result, b.hash
	if err != nil {
		return v, err
	}
	for _, f := range b.files[len(record.Measured()):] {
		if !slices.Contains(v.Files, f.name) && !slices.Contains(v.Otherwise, f.name) {
			return v, Difference{f.name, "does not follow from the trials"}
		}
	}
	return v, nil
}

// Folder verifies that all of a results folder follows from its trials. An error may be a Difference.
func Folder(dir *record.Dir, this Program) (Verified, error) {
	env, err := dir.Environment()
	if err != nil {
		return Verified{}, err
	}
	return verify(dir.Read, Program{env.Version, this.Arch}, this)
}

func verify(readFile func(string) ([]byte, error), by, this Program) (v Verified, err error) {
	v.By = by
	r, err := read(readFile)
	if err != nil {
		return v, err
	}
	for i, t := range r.Trials {
		c, ok := r.cell(t)
		if !ok || t.Status != record.StatusOK || len(t.PerPair) == 0 {
			v.Unmeasured++
			continue
		}
		if err := experiment.CheckMetrics(c, t); err != nil {
			return v, later(Difference{record.Measured()[2], fmt.Sprintf("line %d (%s): %v", i+1, describe(t), err)}, by, this)
		}
		v.Trials++
	}
	for _, f := range r.files() {
		is, err := readFile(f.Name)
		if errors.Is(err, fs.ErrNotExist) {
			return v, Difference{f.Name, "is missing"}
		}
		if err != nil {
			return v, err
		}
		var want bytes.Buffer
		if err := f.Write(&want); err != nil {
			return v, err
		}
		same := bytes.Equal(is, want.Bytes())
		if !same && f.Name == "summary.json" {
			if row := differentRow(is, r.Summary); row != "" {
				return v, later(Difference{f.Name, row}, by, this)
			}
		}
		switch {
		case same:
			v.Files = append(v.Files, f.Name)
		case !by.writesAs(this):
			v.Otherwise = append(v.Otherwise, f.Name)
		default:
			return v, Difference{f.Name, "does not follow from the trials: " + differentLine(is, want.Bytes())}
		}
	}
	return v, nil
}

// cell returns the cell of a trial, if the experiment has it. A period that was entered again has trials that do not count.
func (r *Result) cell(t record.Trial) (experiment.Cell, bool) {
	variant := slices.IndexFunc(r.Experiment.Spec.Variants, func(v spec.Variant) bool { return v.Name == t.Variant })
	workload := slices.IndexFunc(r.Experiment.Spec.Workloads, func(w spec.Workload) bool { return w.Name == t.Workload })
	if variant < 0 || workload < 0 {
		return experiment.Cell{}, false
	}
	c := experiment.Cell{Variant: r.Experiment.Spec.Variants[variant], Pairs: t.Pairs, Period: t.Period, Repeat: t.Repeat, Round: t.Round}
	c.Workload = r.Experiment.WorkloadFor(c.Variant, r.Experiment.Spec.Workloads[workload])
	return c, true
}

// later adds to a difference that the method may have changed since.
func later(d Difference, by, this Program) error {
	if by.Version != this.Version {
		d.Is += fmt.Sprintf("; slipstream %s wrote it and this is %s: verify it with that version to tell a changed result from a changed method", by.Version, this.Version)
	}
	return d
}

func describe(t record.Trial) string {
	return fmt.Sprintf("block %d, %s, %s", t.Block, t.Variant, stats.At(t.Workload, t.Pairs))
}

// differentRow describes the first row of a summary whose numbers do not follow from the trials. It is empty if there is no such
// row.
func differentRow(text []byte, want *stats.Summary) string {
	var s stats.Summary
	if err := record.Decode(text, &s); err != nil {
		return "is no summary: " + err.Error()
	}
	for i, w := range want.Rows {
		at := fmt.Sprintf("%s, %s, %s", w.Variant, stats.At(w.Workload, w.Pairs), w.Metric)
		if i >= len(s.Rows) {
			return "lacks the row " + at
		}
		r := s.Rows[i]
		if r.Variant != w.Variant || r.Workload != w.Workload || r.Pairs != w.Pairs || r.Metric != w.Metric {
			return fmt.Sprintf("row %d is not that of %s", i+1, at)
		}
		is, given := versusOf(r), versusOf(w)
		for _, n := range []struct {
			name        string
			is, follows float64
		}{
			{"n", float64(r.N), float64(w.N)}, {"mean", r.Mean, w.Mean}, {"lower end of the mean", r.CI95[0], w.CI95[0]}, {"upper end of the mean", r.CI95[1], w.CI95[1]},
			{"n of the ratio", float64(is.N), float64(given.N)}, {"ratio", is.Ratio, given.Ratio}, {"lower end of the ratio", is.CI95[0], given.CI95[0]},
			{"upper end of the ratio", is.CI95[1], given.CI95[1]}, {"p", is.P, given.P},
		} {
			if math.Abs(n.is-n.follows) > 1e-9*math.Abs(n.follows) {
				return fmt.Sprintf("%s: %s is %v, and the trials give %v", at, n.name, n.is, n.follows)
			}
		}
		if is.Baseline != given.Baseline || is.Verdict != given.Verdict {
			return fmt.Sprintf("%s: it is %q against %q, and the trials give %q against %q", at, is.Verdict, is.Baseline, given.Verdict, given.Baseline)
		}
	}
	if len(s.Rows) > len(want.Rows) {
		return fmt.Sprintf("row %d follows from no trial", len(want.Rows)+1)
	}
	return ""
}

func versusOf(r stats.Row) stats.Versus {
	if r.Versus == nil {
		return stats.Versus{}
	}
	return *r.Versus
}

// differentLine names the first line that differs.
func differentLine(is, want []byte) string {
	a, b := bytes.Split(is, []byte("\n")), bytes.Split(want, []byte("\n"))
	for i := range min(len(a), len(b)) {
		if !bytes.Equal(a[i], b[i]) {
			return fmt.Sprintf("line %d is another", i+1)
		}
	}
	return fmt.Sprintf("it has %d lines, not %d", len(a), len(b))
}
