package plain

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

// hostile is text that somebody else's results folder may contain.
const hostile = "a\x1b]0;title\x07\x1b[2J\x7f\u009b31m\u202e\u2066b\u2028c\rd|e\nf"

func TestText(t *testing.T) {
	for in, want := range map[string]string{
		"Überblick: 3 µs – ▲ 東京\n\tx": "Überblick: 3 µs – ▲ 東京\n\tx",
		"\x1b[31mred":                 `\u001b[31mred`,
		"a\u202eb\u2069":              `a\u202eb\u2069`,
		"\x9b31m":                     `\x9b31m`,
		"a\u0085b\x00\x7f":            `a\u0085b\u0000\u007f`,
		"a\r\nb":                      "a\\u000d\nb",
	} {
		if got := Text(in); got != want {
			t.Errorf("Text(%q) is %q, want %q", in, got, want)
		}
	}
	for in, want := range map[string]string{"": "", "a=1": "a=1", "=1+1": "'=1+1", "-a": "'-a", "\t@a": "'\t@a"} {
		if got := Cell(in); got != want {
			t.Errorf("Cell(%q) is %q, want %q", in, got, want)
		}
	}
	if got := Line("a\n\tb"); got != `a\u000a\u0009b` {
		t.Errorf("Line: %q", got)
	}
}

func FuzzText(f *testing.F) {
	f.Add(hostile)
	f.Add("\x9b\xff")
	f.Fuzz(func(t *testing.T, s string) {
		for _, got := range []string{Text(s), Line(s)} {
			if !utf8.ValidString(got) || Text(got) != got {
				t.Errorf("%q gives %q", s, got)
			}
			for _, r := range got {
				if r != '\n' && r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r)) {
					t.Errorf("%q gives %q", s, got)
				}
			}
		}
		if strings.ContainsAny(Line(s), "\n\t") {
			t.Errorf("%q gives %q", s, Line(s))
		}
		var back string
		text, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal([]byte(Text(string(text))), &back); err != nil || utf8.ValidString(s) && back != s {
			t.Errorf("%q is %q by way of JSON: %v", s, back, err)
		}
	})
}

// TestWriter: the output is plain, however the text is split into writes.
func TestWriter(t *testing.T) {
	text := "µ 東京 \U0001f600" + hostile + "\x9b\xff\xe6\x9d end"
	for size := 1; size <= len(text); size++ {
		var b bytes.Buffer
		w := Writer(&b)
		for rest := []byte(text); len(rest) > 0; rest = rest[min(size, len(rest)):] {
			part := rest[:min(size, len(rest))]
			if n, err := w.Write(part); n != len(part) || err != nil {
				t.Fatalf("%d bytes at a time: %d, %v", size, n, err)
			}
		}
		if got, want := b.String(), Text(text); got != want {
			t.Fatalf("%d bytes at a time: %q, want %q", size, got, want)
		}
	}
}
