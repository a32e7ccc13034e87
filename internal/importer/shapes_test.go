package importer

import (
	"bufio"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestShapes imports each folder of testdata/shapes. A folder has files in one of the shapes in which people keep outputs, and a file
// "want" with the flags and the expected outcome. In the outcome, a trial has a line with its variant, workload, block and all
// metrics; a copy and an error have a line with a part of their message.
func TestShapes(t *testing.T) {
	folders, err := filepath.Glob("testdata/shapes/*")
	if err != nil || len(folders) < 80 {
		t.Fatalf("%d shapes, %v", len(folders), err)
	}
	for _, folder := range folders {
		t.Run(filepath.Base(folder), func(t *testing.T) {
			o, want := wanted(t, filepath.Join(folder, "want"))
			files, err := filepath.Glob(filepath.Join(folder, "*-*"))
			if single, _ := filepath.Glob(filepath.Join(folder, "a.*")); err == nil {
				files = append(files, single...)
			}
			r, err := Import(files, o)
			got := outcome(folder, r, err)
			if len(got) != len(want) {
				t.Fatalf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
			for i := range got {
				kind, text, _ := strings.Cut(want[i], ": ")
				if exact := kind == "trial" || kind == "warning"; !strings.HasPrefix(got[i], kind+": ") || exact && got[i] != want[i] || !strings.Contains(got[i], text) {
					t.Errorf("got\n%s\nwant\n%s", got[i], want[i])
				}
			}
		})
	}
}

// wanted reads the flags and the lines of a file "want".
func wanted(t *testing.T, path string) (o Options, lines []string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		key, value, _ := strings.Cut(s.Text(), ": ")
		switch key {
		case "pattern":
			o.Pattern = value
		case "baseline":
			o.Baseline = value
		case "duration":
			if o.Window, err = time.ParseDuration(value); err != nil {
				t.Fatal(err)
			}
		case "":
		default:
			lines = append(lines, s.Text())
		}
	}
	return o, lines
}

// outcome describes the result of importing a folder, in the lines of a file "want".
func outcome(folder string, r *Result, err error) (lines []string) {
	if err != nil {
		for line := range strings.SplitSeq(err.Error(), "\n") {
			lines = append(lines, "error: "+strings.ReplaceAll(line, folder+"/", ""))
		}
		return lines
	}
	for _, c := range r.Copies {
		lines = append(lines, "copy: "+strings.ReplaceAll(c.Error(), folder+"/", ""))
	}
	for _, tr := range r.Trials {
		line := fmt.Sprintf("trial: %s %s %d", tr.Variant, tr.Workload, tr.Block)
		for _, name := range slices.Sorted(maps.Keys(tr.Metrics)) {
			line += fmt.Sprintf(" %s=%.6g", name, tr.Metrics[name])
		}
		lines = append(lines, line)
		for _, w := range tr.Warnings {
			lines = append(lines, "warning: "+string(w.Code))
		}
	}
	return lines
}
