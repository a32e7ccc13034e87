package report

import (
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"fmt"
	"html/template"
	"io"
	"maps"
	"strings"
	"sync"

	"slipstream.dev/internal/report/draw"
)

// The pages of one result, of two, of many and of a run in progress, and the parts that they share.
//
//go:embed report.html beside.html history.html live.html parts.html
var pages embed.FS

//go:embed report.js
var scriptSource string

//go:embed live.js
var liveScript string

//go:embed search.js
var searchScript string

//go:embed report.css
var styleSource string

//go:embed history.css
var historyStyle string

// HTML writes the page: one file that needs no other, and works without its script.
func HTML(w io.Writer, m *Model) error { return writePage(w, "page", m) }

func changesHTML(w io.Writer, c Changes) error { return writePage(w, "compare", c) }

// HTML writes the page of two results.
func (b Beside) HTML(w io.Writer) error { return writePage(w, "beside", b) }

// Policy is the Content-Security-Policy of all pages: it allows their own scripts and nothing from elsewhere. Styles may
// be inline, because bars and figures have some.
func Policy() string { return scriptPolicy() }

var scriptPolicy = sync.OnceValue(func() string {
	var scripts strings.Builder
	for _, source := range []string{scriptSource, liveScript, searchScript} {
		sum := sha256.Sum256([]byte(source))
		fmt.Fprintf(&scripts, " 'sha256-%s'", base64.StdEncoding.EncodeToString(sum[:]))
	}
	return "default-src 'none'; script-src" + scripts.String() +
		"; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; form-action 'self'; base-uri 'none'"
})

// templates has all pages.
var templates = sync.OnceValues(func() (*template.Template, error) {
	funcs := templateFuncs()
	maps.Copy(funcs, template.FuncMap{
		"counts":   verdictCounts,
		"effect":   func(code string) string { return newWarning(code).Effect },
		"inline":   func(f Figure) template.HTML { return template.HTML(f.Picture.InlineSVG(f.Alt)) },
		"live":     func() template.JS { return template.JS(liveScript) },
		"more":     func() template.CSS { return template.CSS(historyStyle) },
		"policy":   Policy,
		"rest":     func(all []Entry) int { return len(all) - 1 },
		"says":     Says,
		"script":   func() template.JS { return template.JS(scriptSource) },
		"search":   func() template.JS { return template.JS(searchScript) },
		"severity": func(code string) string { return newWarning(code).Severity.String() },
		"style":    func() template.CSS { return template.CSS(draw.CSS() + styleSource) },
		"unbroken": unbroken,
	})
	return template.New("").Funcs(funcs).ParseFS(pages, "*.html")
})

// writePage executes one of the templates that are a page.
func writePage(w io.Writer, name string, data any) error {
	t, err := templates()
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
	return strings.NewReplacer(" (", "\u00a0(", "–", "–\u2060").Replace(s)
}
