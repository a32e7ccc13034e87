package report

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"slipstream.dev/internal/record"
)

// hostile is text that somebody else's results folder may contain.
const hostile = "a\x1b]0;title\x07\x1b[2J\x7f\u009b31m\u202e\u2066b\u2028c\rd|e\nf"

func TestPlain(t *testing.T) {
	for in, want := range map[string]string{
		"Überblick: 3 µs – ▲ 東京\n\tx": "Überblick: 3 µs – ▲ 東京\n\tx",
		"\x1b[31mred":                 `\u001b[31mred`,
		"a\u202eb\u2069":              `a\u202eb\u2069`,
		"\x9b31m":                     `\x9b31m`,
		"a\u0085b\x00\x7f":            `a\u0085b\u0000\u007f`,
		"a\r\nb":                      "a\\u000d\nb",
	} {
		if got := Plain(in); got != want {
			t.Errorf("Plain(%q) is %q, want %q", in, got, want)
		}
	}
	if got := PlainLine("a\n\tb"); got != `a\u000a\u0009b` {
		t.Errorf("PlainLine: %q", got)
	}
}

func FuzzPlain(f *testing.F) {
	f.Add(hostile)
	f.Add("\x9b\xff")
	f.Fuzz(func(t *testing.T, s string) {
		for _, got := range []string{Plain(s), PlainLine(s)} {
			if !utf8.ValidString(got) || Plain(got) != got {
				t.Errorf("%q gives %q", s, got)
			}
			for _, r := range got {
				if r != '\n' && r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r)) {
					t.Errorf("%q gives %q", s, got)
				}
			}
		}
		if strings.ContainsAny(PlainLine(s), "\n\t") {
			t.Errorf("%q gives %q", s, PlainLine(s))
		}
		var back string
		text, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal([]byte(Plain(string(text))), &back); err != nil || utf8.ValidString(s) && back != s {
			t.Errorf("%q is %q by way of JSON: %v", s, back, err)
		}
	})
}

// TestNothingOfAFolderReachesTheTerminal writes a report in which every text is hostile.
func TestNothingOfAFolderReachesTheTerminal(t *testing.T) {
	m := hostileModel(t)
	for name, write := range map[string]func(io.Writer, *Model) error{"html": HTML, "md": Markdown, "json": JSON, "csv": CSV, "text": Terminal} {
		var b bytes.Buffer
		if err := write(&b, m); err != nil {
			t.Fatal(err)
		}
		for _, r := range b.String() {
			if r != '\n' && r != '\t' && control(r) {
				t.Errorf("%s has %q", name, r)
				break
			}
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

// TestPlainWriter: the output is plain, however the text is split into writes.
func TestPlainWriter(t *testing.T) {
	text := "µ 東京 \U0001f600" + hostile + "\x9b\xff\xe6\x9d end"
	for size := 1; size <= len(text); size++ {
		var b bytes.Buffer
		w := PlainWriter(&b)
		for rest := []byte(text); len(rest) > 0; rest = rest[min(size, len(rest)):] {
			part := rest[:min(size, len(rest))]
			if n, err := w.Write(part); n != len(part) || err != nil {
				t.Fatalf("%d bytes at a time: %d, %v", size, n, err)
			}
		}
		if got, want := b.String(), Plain(text); got != want {
			t.Fatalf("%d bytes at a time: %q, want %q", size, got, want)
		}
	}
}
