// Package plain makes text of others safe to show. A results folder may be somebody else's, and errors quote other
// programs and clusters. Their text must stay text: it must not move a cursor, set a title, or change the direction
// of a line (CVE-2021-42574).
package plain

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// Text makes text safe for a terminal or a file that people read: it spells out characters that are not text, except
// newlines and tabs. In JSON it is the same string.
func Text(s string) string { return escape(s, "\n\t") }

// Line does the same for text within a line, which may not have newlines or tabs.
func Line(s string) string { return escape(s, "") }

// Cell keeps a spreadsheet from reading text in a cell as a formula.
func Cell(s string) string {
	if s != "" && strings.ContainsRune("=+-@\t\r", rune(s[0])) {
		return "'" + s
	}
	return s
}

func escape(s, keep string) string {
	if utf8.ValidString(s) && strings.IndexFunc(s, func(r rune) bool { return control(r) && !strings.ContainsRune(keep, r) }) < 0 {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1: // on an 8-bit terminal, a byte may be a C1 character by itself
			fmt.Fprintf(&b, `\x%02x`, s[0])
		case control(r) && !strings.ContainsRune(keep, r):
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteString(s[:n])
		}
		s = s[n:]
	}
	return b.String()
}

// control reports whether a character is in C0, DEL or C1, separates lines, or sets the direction of text.
func control(r rune) bool {
	return unicode.IsControl(r) || r == '\u2028' || r == '\u2029' || unicode.Is(unicode.Bidi_Control, r)
}

// Writer returns a writer that passes everything through Text, so that no other text reaches a terminal, whoever
// printed it. A character may be split over several writes; an incomplete one at the end is not written.
func Writer(w io.Writer) io.Writer { return &writer{to: w} }

type writer struct {
	mu   sync.Mutex
	to   io.Writer
	part []byte // a character whose rest has not arrived
}

func (w *writer) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := append(w.part, p...)
	whole := len(text)
	for n := 1; n < utf8.UTFMax && n <= len(text); n++ { // an incomplete character begins in these last bytes
		if start := text[len(text)-n:]; utf8.RuneStart(start[0]) {
			if !utf8.FullRune(start) {
				whole -= n
			}
			break
		}
	}
	w.part = slices.Clone(text[whole:])
	if _, err := io.WriteString(w.to, Text(string(text[:whole]))); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Wrap breaks text between words into lines of at most width characters, unless a word is longer. All lines but the
// first begin with indent spaces. There is at least one line.
func Wrap(text string, width, indent int) []string {
	var lines []string
	line, words := "", 0
	for _, word := range strings.Fields(text) {
		if words > 0 && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width {
			lines, line, words = append(lines, line), strings.Repeat(" ", indent), 0
		}
		if words++; words > 1 {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}

// Cut shortens a line to width characters; the last of them then says that something is missing.
func Cut(line string, width int) string {
	if utf8.RuneCountInString(line) <= width || width < 1 {
		return line
	}
	return string([]rune(line)[:width-1]) + "…"
}
