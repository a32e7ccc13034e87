package report

import (
	_ "embed"
	"fmt"
	"io"
	"strings"
	"text/template"
)

//go:embed report.md
var markdownSource string

// Markdown writes the report for a pull request or a page of notes.
func Markdown(w io.Writer, m *Model) error {
	funcs := templateFuncs()
	funcs["escape"] = escapeMarkdown
	t, err := template.New("report.md").Funcs(funcs).Parse(markdownSource)
	if err != nil {
		return fmt.Errorf("report as markdown: %w", err)
	}
	var b strings.Builder
	if err := t.Execute(&b, m); err != nil {
		return fmt.Errorf("report as markdown: %w", err)
	}
	return writePlain(w, b.String(), "markdown")
}

func changesMarkdown(w io.Writer, c Changes) error {
	var b strings.Builder
	for _, n := range c.Notices() {
		fmt.Fprintf(&b, "> ⚠ **%s**\n\n", escapeMarkdown(n))
	}
	fmt.Fprintf(&b, "**%s**\n\n| variant | workload | pairs | metric | before | after | unit | ratio | verdict |\n|---|---|---:|---|---:|---:|---|---|---|\n", escapeMarkdown(c.Summary()))
	for _, r := range c.Rows() {
		fmt.Fprintf(&b, "| %s | %s | %d | %s | %s | %s | %s | %s | %s %s |\n", escapeMarkdown(r.Variant), escapeMarkdown(r.Workload), r.Pairs, r.Metric, r.Before, r.After, r.Unit, r.Ratio, verdictSign(r.Verdict), r.Verdict)
	}
	for i, m := range c.Missing {
		if i == 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, "- missing: %s\n", escapeMarkdown(m))
	}
	return writePlain(w, b.String(), "markdown")
}

// escapeMarkdown escapes a string, so that it is not read as markup and does not end a table's
// cell.
func escapeMarkdown(s string) string {
	return strings.NewReplacer(
		`\`, `\\`, "`", "\\`", "*", `\*`, "_", `\_`, "[", `\[`, "]", `\]`, "|", `\|`, "#", `\#`,
		"<", "&lt;", ">", "&gt;", "&", "&amp;", "\r", " ", "\n", " ",
	).Replace(s)
}
