package report

import (
	"fmt"
	"io"
	"text/template"

	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/words"
)

// Format is a format of a report or of a comparison.
type Format[T any] struct {
	Name  string
	Write func(io.Writer, T) error
	// Part names the part of the report that the format contains; it is empty for the whole report.
	Part string
}

// Formats returns the formats of a report.
func Formats() []Format[*Model] {
	return []Format[*Model]{
		{"html", HTML, ""}, {"md", Markdown, ""}, {"csv", CSV, ""}, {"json", JSON, ""}, {"junit", JUnit, "the expectations"}, {"text", Text, ""},
		{"openmetrics", OpenMetrics, ""}, {"otlp", OTLP, ""}, {"bencher", Bencher, "the means"},
	}
}

// ChangesFormats returns the formats of a comparison.
func ChangesFormats() []Format[Changes] {
	return []Format[Changes]{
		{"text", changesText, ""}, {"md", changesMarkdown, ""}, {"json", changesJSON, ""}, {"junit", changesJUnit, ""}, {"html", changesHTML, ""},
	}
}

// String returns the name and the part.
func (f Format[T]) String() string {
	if f.Part != "" {
		return f.Name + " (" + f.Part + ")"
	}
	return f.Name
}

// templateFuncs returns the functions that all templates share.
func templateFuncs() template.FuncMap {
	return template.FuncMap{
		"agreement": agreementSign,
		"date":      date,
		"list":      words.And,
		"mark":      verdictSign,
		"pairs":     pairs,
		"plural":    words.Count,
	}
}

// writePlain writes a report. Formats use it because it escapes control characters, which names and errors may contain.
func writePlain(w io.Writer, text, format string) error {
	if _, err := io.WriteString(w, plain.Text(text)); err != nil {
		return fmt.Errorf("report as %s: %w", format, err)
	}
	return nil
}
