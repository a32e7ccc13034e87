package report

import (
	"embed"
	"fmt"
	"html/template"
	"io"
	"maps"
	"strings"

	"slipstream.dev/internal/report/draw"
)

// The page of one result, that of two, and what both are made of.
//
//go:embed report.html beside.html parts.html
var pages embed.FS

//go:embed report.js
var scriptSource string

//go:embed report.css
var styleSource string

// HTML writes the page: one file that needs no other, and works without its script.
func HTML(w io.Writer, m *Model) error { return writePage(w, "page", m) }

func changesHTML(w io.Writer, c Changes) error { return writePage(w, "compare", c) }

// HTML writes the page of two results.
func (b Beside) HTML(w io.Writer) error { return writePage(w, "beside", b) }

// writePage executes one of the templates that are a page.
func writePage(w io.Writer, name string, data any) error {
	funcs := templateFuncs()
	maps.Copy(funcs, template.FuncMap{
		"effect":   func(code string) string { return newWarning(code).Effect },
		"inline":   func(f Figure) template.HTML { return template.HTML(f.Picture.InlineSVG(f.Alt)) },
		"rest":     func(all []Entry) int { return len(all) - 1 },
		"script":   func() template.JS { return template.JS(scriptSource) },
		"severity": func(code string) string { return newWarning(code).Severity.String() },
		"style":    func() template.CSS { return template.CSS(draw.CSS() + styleSource) },
		"unbroken": unbroken,
	})
	t, err := template.New("").Funcs(funcs).ParseFS(pages, "*.html")
	if err != nil {
		return fmt.Errorf("report as html: %w", err)
	}
	var b strings.Builder
	if err := t.ExecuteTemplate(&b, name, data); err != nil {
		return fmt.Errorf("report as html: %w", err)
	}
	return writePlain(w, b.String(), "html")
}

// unbroken keeps an estimate on one line.
func unbroken(s string) string {
	return strings.NewReplacer(" %", "\u00a0%", " (", "\u00a0(", "–", "–\u2060").Replace(s)
}
