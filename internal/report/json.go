package report

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

// JSON writes summary.json: the summary as it is.
func JSON(w io.Writer, m *Model) error { return writeJSON(w, m.summary, "report") }

func changesJSON(w io.Writer, c Changes) error { return writeJSON(w, c.Comparison, "comparison") }

func writeJSON(w io.Writer, v any, what string) error {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return fmt.Errorf("%s as json: %w", what, err)
	}
	return writePlain(w, b.String(), "json")
}
