package report

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// A results folder may be somebody else's, and errors quote other programs and
// clusters. What they say is text: it does not move a cursor, set a title or turn a
// line's direction round (CVE-2021-42574).

// Plain is text as it may reach a terminal or a file that people read: characters that
// are no text are spelt out, but the ends of lines and tabs. In JSON it is the same
// string.
func Plain(s string) string { return spell(s, "\n\t") }

// PlainLine is Plain of what is within a line.
func PlainLine(s string) string { return spell(s, "") }

func spell(s, keep string) string {
	if utf8.ValidString(s) && strings.IndexFunc(s, func(r rune) bool { return control(r) && !strings.ContainsRune(keep, r) }) < 0 {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1: // a C1 character by itself, to a terminal of eight bits
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

// control tells of C0, DEL and C1, separators of lines, and what sets the direction of
// text.
func control(r rune) bool {
	return unicode.IsControl(r) || r == '\u2028' || r == '\u2029' || unicode.Is(unicode.Bidi_Control, r)
}

// PlainWriter writes to w as Plain has it, so that no text reaches a terminal otherwise, whoever printed it. A character
// may come in several writes; what is left of one at the end is not written.
func PlainWriter(w io.Writer) io.Writer { return &plainWriter{to: w} }

type plainWriter struct {
	mu   sync.Mutex
	to   io.Writer
	part []byte // of a character whose rest has not come
}

func (w *plainWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := append(w.part, p...)
	whole := len(text)
	for n := 1; n < utf8.UTFMax && n <= len(text); n++ { // the last character begins at most so far from the end
		if start := text[len(text)-n:]; utf8.RuneStart(start[0]) {
			if !utf8.FullRune(start) {
				whole -= n
			}
			break
		}
	}
	w.part = slices.Clone(text[whole:])
	if _, err := io.WriteString(w.to, Plain(string(text[:whole]))); err != nil {
		return 0, err
	}
	return len(p), nil
}

// plainCell is text for a spreadsheet, which would take some for a formula.
func plainCell(s string) string {
	if s != "" && strings.ContainsRune("=+-@\t\r", rune(s[0])) {
		return "'" + s
	}
	return s
}
