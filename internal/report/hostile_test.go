package report

import (
	"bytes"
	"encoding/csv"
	"strings"
	"testing"

	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/record"
)

// hostile is text that somebody else's results folder may contain.
const hostile = "a\x1b]0;title\x07\x1b[2J\x7f\u009b31m\u202e\u2066b\u2028c\rd|e\nf"

// TestNothingOfAFolderReachesTheTerminal writes a report in which every text is hostile.
func TestNothingOfAFolderReachesTheTerminal(t *testing.T) {
	m := hostileModel(t)
	for name, write := range writers() {
		var b bytes.Buffer
		if err := write(&b, m); err != nil {
			t.Fatal(err)
		}
		if plain.Text(b.String()) != b.String() {
			t.Errorf("%s has characters that are not text", name)
		}
		if name != "csv" && !strings.Contains(b.String(), "title") {
			t.Errorf("%s does not say what is in the folder", name)
		}
	}
}

// TestCSVHasNoFormulas: no text begins like a formula, and numbers stay as they are.
func TestCSVHasNoFormulas(t *testing.T) {
	m := hostileModel(t)
	for i, with := range []string{"=1+1", "+1", "-1", "@SUM(A1)", "\t=1"} {
		row := &m.summary.Rows[i%len(m.summary.Rows)]
		row.Variant, row.Workload = with, with
		var b bytes.Buffer
		if err := CSV(&b, m); err != nil {
			t.Fatal(err)
		}
		rows, err := csv.NewReader(&b).ReadAll()
		if err != nil {
			t.Fatal(err)
		}
		got := rows[1+i%len(m.summary.Rows)]
		if got[0] != "'"+with || got[1] != "'"+with {
			t.Errorf("%q is %q", with, got[:2])
		}
	}
}

// hostileModel returns a report whose texts are hostile.
func hostileModel(t *testing.T) *Model {
	f := demo(t).run(t)
	f.exp.Metadata.Description = hostile
	s := f.summary()
	for i := range s.Rows {
		s.Rows[i].Warnings = append(s.Rows[i].Warnings, record.Warnf("code"+hostile, "%s", hostile))
	}
	f.env.Placement = hostile
	for i := range f.env.Nodes {
		f.env.Nodes[i].Name, f.env.Nodes[i].Kernel = hostile, hostile
	}
	f.trials[0].Status, f.trials[0].Error = record.StatusFailed, hostile
	m := New(f.exp, s, f.trials, f.env)
	m.Name, m.Headline = hostile, hostile
	return m
}
