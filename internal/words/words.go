// Package words counts and lists things in sentences. Package plain makes text of others safe; number, of package report,
// formats figures.
package words

import (
	"fmt"
	"strings"
)

// Count returns a number of things: "1 pair", "4 pairs".
func Count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// And lists names: "a, b and c".
func And(names []string) string { return list(names, " and ") }

// Or lists alternatives: "a, b or c".
func Or(names []string) string { return list(names, " or ") }

func list(names []string, last string) string {
	if len(names) < 2 {
		return strings.Join(names, "")
	}
	rest := len(names) - 1
	return strings.Join(names[:rest], ", ") + last + names[rest]
}

// First lists the first names, and counts the rest: "a, b and 7 more". There may be thousands.
func First(names []string, most int) string {
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
