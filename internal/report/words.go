package report

import (
	"fmt"
	"strings"
	"time"

	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/words"
)

// few is the maximum number of things that a sentence lists.
const few = 3

func pairs(n int) string { return words.Count(n, "pair") }

// slug makes a name fit for a file and an HTML id. Names that differ only in a sign,
// such as rps and rps+, stay different.
func slug(parts ...string) string {
	var b strings.Builder
	for _, r := range strings.ToLower(strings.Join(parts, "-")) {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '-', r == '_':
			b.WriteRune(r)
		case r == '+':
			b.WriteString("-plus")
		default:
			fmt.Fprintf(&b, "-%x", r)
		}
	}
	return b.String()
}

// listFew lists the first names, and counts the rest.
func listFew(names []string) string {
	if len(names)-few > 1 {
		return words.First(names, few)
	}
	return words.And(names)
}

// capitalized returns a text that begins with a capital letter.
func capitalized(s string) string {
	if s == "" {
		return s
	}
	return strings.ToUpper(s[:1]) + s[1:]
}

// verdictSign returns a verdict as a sign, for readers who do not see colours.
func verdictSign(v stats.Verdict) string {
	switch v {
	case stats.Faster:
		return "▲"
	case stats.Slower:
		return "▼"
	case stats.Same:
		return "="
	}
	return "?"
}

// agreementSign returns the verdict on a published figure as a sign, for readers who do not see colours.
func agreementSign(v stats.Agreement) string {
	switch v {
	case stats.Agrees:
		return "="
	case stats.Differs:
		return "≠"
	case stats.TooImprecise:
		return "?"
	}
	return "–"
}

func date(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format("2006-01-02 15:04 UTC")
}
