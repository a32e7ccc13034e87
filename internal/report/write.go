package report

import (
	"embed"
	"encoding/csv"
	"encoding/json"
	"fmt"
	htmltemplate "html/template"
	"io"
	"slices"
	"strconv"
	"strings"
	texttemplate "text/template"
	"time"
	"unicode/utf8"

	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/stats"
)

// The page of one result, that of two, and what both are made of.
//
//go:embed report.html beside.html parts.html
var pages embed.FS

//go:embed report.js
var scriptSource string

//go:embed report.css
var styleSource string

//go:embed report.md
var markdownSource string

// HTML writes the page: one file that needs no other, and works without its script.
func HTML(w io.Writer, m *Model) error { return putPage(w, "page", m) }

// putPage executes one of the templates that are a page.
func putPage(w io.Writer, name string, data any) error {
	t, err := htmltemplate.New("").Funcs(htmltemplate.FuncMap{
		"agreement": agreementMark,
		"date":      date,
		"effect":    func(code string) string { return newWarning(code).Effect },
		"inline":    func(f Figure) htmltemplate.HTML { return htmltemplate.HTML(f.inline()) },
		"list":      list,
		"mark":      mark,
		"pairs":     pairs,
		"plural":    plural,
		"rest":      func(all []Entry) int { return len(all) - 1 },
		"script":    func() htmltemplate.JS { return htmltemplate.JS(scriptSource) },
		"severity":  func(code string) string { return newWarning(code).Severity.String() },
		"style":     func() htmltemplate.CSS { return htmltemplate.CSS(themes() + styleSource) },
		"unbroken":  unbroken,
	}).ParseFS(pages, "*.html")
	if err != nil {
		return fmt.Errorf("report as html: %w", err)
	}
	var b strings.Builder
	if err := t.ExecuteTemplate(&b, name, data); err != nil {
		return fmt.Errorf("report as html: %w", err)
	}
	return put(w, b.String(), "html")
}

// put writes a report. All writers use it, because it makes the text plain.
func put(w io.Writer, text, format string) error {
	if _, err := io.WriteString(w, plain.Text(text)); err != nil {
		return fmt.Errorf("report as %s: %w", format, err)
	}
	return nil
}

// unbroken keeps an estimate on one line.
func unbroken(s string) string {
	return strings.NewReplacer(" %", "\u00a0%", " (", "\u00a0(", "–", "–\u2060").Replace(s)
}

// themes returns the inks as variables of the page.
func themes() string {
	var light, dark strings.Builder
	for _, i := range inks() {
		fmt.Fprintf(&light, "--%s:%s;", i.name, i.light)
		fmt.Fprintf(&dark, "--%s:%s;", i.name, i.dark)
	}
	// Paper is light even if the screen is dark.
	return ":root{" + light.String() + "}\n@media screen and (prefers-color-scheme:dark){:root{" + dark.String() + "}}\n"
}

// Markdown writes the report for a pull request or a page of notes.
func Markdown(w io.Writer, m *Model) error {
	t, err := texttemplate.New("report.md").Funcs(texttemplate.FuncMap{
		"agreement": agreementMark,
		"date":      date,
		"escape":    escapeMarkdown,
		"list":      list,
		"mark":      mark,
		"pairs":     pairs,
		"plural":    plural,
	}).Parse(markdownSource)
	if err != nil {
		return fmt.Errorf("report as markdown: %w", err)
	}
	var b strings.Builder
	if err := t.Execute(&b, m); err != nil {
		return fmt.Errorf("report as markdown: %w", err)
	}
	return put(w, b.String(), "markdown")
}

// escapeMarkdown escapes a string, so that it is not read as markup and does not end a table's
// cell.
func escapeMarkdown(s string) string {
	return strings.NewReplacer(
		`\`, `\\`, "`", "\\`", "*", `\*`, "_", `\_`, "[", `\[`, "]", `\]`, "|", `\|`, "#", `\#`,
		"<", "&lt;", ">", "&gt;", "&", "&amp;", "\r", " ", "\n", " ",
	).Replace(s)
}

// JSON writes summary.json: the summary as it is.
func JSON(w io.Writer, m *Model) error {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	if err := e.Encode(m.summary); err != nil {
		return fmt.Errorf("report as json: %w", err)
	}
	return put(w, b.String(), "json")
}

// CSV writes the rows of the summary flat, in its units and full precision. Columns of a
// comparison are empty in a baseline's rows; warnings are codes, separated by spaces; unfinished
// is empty for a complete run. In a mesh each link has a row too, and the last two columns are
// its nodes.
func CSV(w io.Writer, m *Model) error {
	var b strings.Builder
	c := csv.NewWriter(&b)
	records := [][]string{{
		"variant", "workload", "pairs", "metric", "unit", "n", "mean", "ci95_lo", "ci95_hi",
		"versus", "ratio", "ratio_ci95_lo", "ratio_ci95_hi", "p", "verdict", "warnings", "unfinished",
	}}
	for _, r := range m.summary.Rows {
		row := []string{
			plainCell(r.Variant), plainCell(r.Workload), strconv.Itoa(r.Pairs), r.Metric, r.Unit, strconv.Itoa(r.N),
			number(r.Mean), number(r.CI95[0]), number(r.CI95[1]),
		}
		if v := r.Versus; v != nil {
			row = append(row, plainCell(v.Baseline), number(v.Ratio), number(v.CI95[0]), number(v.CI95[1]), number(v.P), string(v.Verdict))
		} else {
			row = append(row, "", "", "", "", "", "")
		}
		var codes []string
		for _, w := range r.Warnings {
			if !slices.Contains(codes, w.Code) {
				codes = append(codes, w.Code)
			}
		}
		records = append(records, append(row, plainCell(strings.Join(codes, " ")), m.summary.Unfinished))
	}
	if len(m.summary.Meshes) > 0 {
		records = withLinks(records, m.summary)
	}
	if err := c.WriteAll(records); err != nil {
		return fmt.Errorf("report as csv: %w", err)
	}
	return put(w, b.String(), "csv")
}

func number(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }

// withLinks adds columns for the nodes of links, and the rows of links.
func withLinks(records [][]string, s *stats.Summary) [][]string {
	for i := range records {
		nodes := []string{"", ""}
		if i == 0 {
			nodes = []string{"client", "server"}
		}
		records[i] = append(records[i], nodes...)
	}
	for _, t := range s.Meshes {
		for _, l := range t.Links {
			records = append(records, []string{
				plainCell(t.Variant), plainCell(t.Workload), "1", t.Metric, t.Unit, strconv.Itoa(l.N),
				number(l.Mean), number(l.CI95[0]), number(l.CI95[1]), "", "", "", "", "", "", "", s.Unfinished,
				plainCell(l.Client), plainCell(l.Server),
			})
		}
	}
	return records
}

// Terminal writes the verdicts as plain text, 80 columns wide if names allow it: a table for
// each workload, the warnings, and at the end, where readers of a terminal look first, the
// conclusions.
func Terminal(w io.Writer, m *Model) error {
	var b strings.Builder
	if m.Unfinished != "" {
		b.WriteString(wrap("! "+m.Unfinished, 80, "  "))
	}
	for _, t := range m.Tables {
		if t.Judged && t.Metric == m.judgedTables(t.Workload)[0].Metric {
			terminalTable(&b, t)
		}
	}
	for _, t := range m.Meshes {
		if !t.Secondary {
			terminalMesh(&b, t)
		}
	}
	if len(m.Warnings) > 0 {
		b.WriteByte('\n')
	}
	for _, warning := range m.Warnings {
		e := warning.Entries[0]
		text := fmt.Sprintf("! %s (%s): %s (%s)", warning.Code, warning.Severity, e.Message, e.Where)
		if n := len(warning.Entries) - 1; n > 0 {
			text += fmt.Sprintf(", and %d more", n)
		}
		b.WriteString(wrap(text, 80, "  "))
	}
	said := slices.Concat(m.Crossovers, m.Bounds)
	if m.Prices != nil {
		said = append(said, m.Prices.Dominated()...)
	}
	b.WriteByte('\n')
	if m.Design != "" {
		said = append(said, m.Design)
	}
	for _, text := range slices.Concat(m.LeftOut, said, m.conclusion) {
		b.WriteString(wrap(text, 80, "  "))
	}
	for _, e := range m.Expected {
		b.WriteString(wrap(e.Text(), 80, "  "))
	}
	if m.PublishedCount != "" {
		b.WriteString(wrap(m.PublishedCount, 80, "  "))
	}
	return put(w, strings.TrimPrefix(b.String(), "\n"), "text")
}

// JUnit writes a test case for each expectation, for a pipeline to show. An inconclusive
// expectation fails, because it fails the run too.
func JUnit(w io.Writer, m *Model) error {
	s := junitSuite{Name: plain.Line("slipstream " + m.Name)}
	if m.Unfinished != "" {
		s.Properties = &junitProps{[]junitProp{{"unfinished", m.Unfinished}}}
	}
	for _, e := range m.Expected {
		failure := ""
		if e.Outcome != stats.OutcomeMet {
			failure = fmt.Sprintf("%s: %s", e.Outcome, e.Why)
		}
		s.add(plain.Line(m.Name), plain.Line(e.Claim), e.Why, failure, "", true)
	}
	return s.write(w)
}

func terminalTable(b *strings.Builder, t Table) {
	// There is a column for each number of pairs, as wide as its widest cell. The table is
	// split into as many parts as 80 columns require.
	cells := make([][]string, 1+len(t.Rows))
	cells[0] = []string{""}
	for _, p := range t.Pairs {
		cells[0] = append(cells[0], pairs(p))
	}
	for i, row := range t.Rows {
		cells[i+1] = []string{row.Variant}
		for _, l := range row.Cells {
			cells[i+1] = append(cells[i+1], terminalCell(l))
		}
	}
	versus := ""
	switch len(t.Baselines) {
	case 0:
	case 1:
		versus = "; ratio to " + t.Baselines[0] + " (95 % interval)"
	default:
		versus = "; ratio to each one's baseline (95 % interval)"
	}
	width := make([]int, len(cells[0]))
	for _, row := range cells {
		for i, s := range row {
			width[i] = max(width[i], utf8.RuneCountInString(s))
		}
	}
	for from := 1; from < len(width); {
		to, used := from, 2+width[0]
		for to < len(width) && (to == from || used+2+width[to] <= 80) {
			used += 2 + width[to]
			to++
		}
		fmt.Fprintf(b, "\n%s, %s%s\n", t.Title, t.Unit, versus)
		for _, row := range cells {
			line := "  " + pad(row[0], width[0])
			for i := from; i < to; i++ {
				line += "  " + pad(row[i], width[i])
			}
			b.WriteString(strings.TrimRight(line, " ") + "\n")
		}
		from = to
	}
}

func terminalCell(l Line) string {
	switch {
	case l.Missing != "":
		return l.Missing
	case !l.Compared:
		return l.Estimate.String()
	}
	return fmt.Sprintf("%s  %s %s", l.Estimate.Value, l.Ratio, mark(l.Verdict))
}

func pad(s string, width int) string {
	return s + strings.Repeat(" ", max(0, width-utf8.RuneCountInString(s)))
}

func wrap(s string, width int, indent string) string {
	var b strings.Builder
	column := 0
	for i, word := range strings.Fields(s) {
		n := utf8.RuneCountInString(word)
		switch {
		case i == 0:
		case column+1+n > width:
			b.WriteString("\n" + indent)
			column = len(indent)
		default:
			b.WriteByte(' ')
			column++
		}
		b.WriteString(word)
		column += n
	}
	b.WriteByte('\n')
	return b.String()
}

// mark returns a verdict as a sign, for readers who do not see colours.
func mark(v stats.Verdict) string {
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

func date(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format("2006-01-02 15:04 UTC")
}

// plainCell makes text safe for a spreadsheet, which would take some for a formula.
func plainCell(s string) string {
	if s != "" && strings.ContainsRune("=+-@\t\r", rune(s[0])) {
		return "'" + s
	}
	return s
}
