package report

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	"slipstream.dev/internal/plain"
)

// textWidth is the width of text, in columns, if that of the terminal is unknown or larger. A width below leastWidth counts as
// unknown, because nothing would be readable.
const textWidth, leastWidth = 80, 20

// Text writes the verdicts as plain text, textWidth columns wide if names allow it.
func Text(w io.Writer, m *Model) error { return TerminalText(w, m, 0) }

// TerminalText is Text for a terminal of a number of columns, 0 if unknown: a table for each workload, the warnings, and at the end,
// where readers of a terminal look first, the conclusions.
func TerminalText(w io.Writer, m *Model, columns int) error {
	width := textWidth
	if columns >= leastWidth {
		width = min(width, columns)
	}
	var b strings.Builder
	if m.Unfinished != "" {
		b.WriteString(wrap("! "+m.Unfinished, width))
	}
	for _, t := range m.Tables {
		if t.Judged && t.Metric == m.judgedTables(t.Workload)[0].Metric {
			writeTable(&b, t, width)
		}
	}
	for _, t := range m.Meshes {
		if !t.Secondary {
			writeMesh(&b, t)
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
		b.WriteString(wrap(text, width))
	}
	b.WriteByte('\n')
	for _, sentence := range m.sentences() {
		b.WriteString(wrap(sentence, width))
	}
	return writePlain(w, strings.TrimPrefix(b.String(), "\n"), "text")
}

// sentences returns what the text says at its end.
func (m *Model) sentences() []string {
	all := slices.Concat(m.LeftOut, m.Crossovers, m.Bounds)
	if m.Prices != nil {
		all = append(all, m.Prices.Dominated()...)
	}
	if m.Design != "" {
		all = append(all, m.Design)
	}
	all = append(all, m.conclusion...)
	for _, e := range m.Expected {
		all = append(all, e.Text())
	}
	if m.PublishedCount != "" {
		all = append(all, m.PublishedCount)
	}
	return all
}

// writeTable writes a column for each number of pairs, as wide as its widest cell. A table that is wider than columns
// is split into parts.
func writeTable(b *strings.Builder, t Table, columns int) {
	cells := textCells(t)
	width := make([]int, len(cells[0]))
	for _, row := range cells {
		for i, s := range row {
			width[i] = max(width[i], utf8.RuneCountInString(s))
		}
	}
	versus := ""
	switch len(t.Baselines) {
	case 0:
	case 1:
		versus = "; ratio to " + t.Baselines[0] + " (95% interval)"
	default:
		versus = "; ratio to each one's baseline (95% interval)"
	}
	for from := 1; from < len(width); {
		to, used := from, 2+width[0]
		for to < len(width) && (to == from || used+2+width[to] <= columns) {
			used += 2 + width[to]
			to++
		}
		b.WriteString("\n" + wrap(fmt.Sprintf("%s, %s%s", t.Title, t.Unit, versus), columns))
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

// textCells returns the cells of a table, with its header.
func textCells(t Table) [][]string {
	header := []string{""}
	for _, p := range t.Pairs {
		header = append(header, pairs(p))
	}
	cells := [][]string{header}
	for _, row := range t.Rows {
		line := []string{row.Variant}
		for _, l := range row.Cells {
			line = append(line, textCell(l))
		}
		cells = append(cells, line)
	}
	return cells
}

func textCell(l Line) string {
	switch {
	case l.Missing != "":
		return l.Missing
	case !l.Compared:
		return l.Estimate.String()
	}
	return fmt.Sprintf("%s  %s %s", l.Estimate.Value, l.Ratio, verdictSign(l.Verdict))
}

// pad fills a text up with spaces.
func pad(s string, width int) string {
	return s + strings.Repeat(" ", max(0, width-utf8.RuneCountInString(s)))
}

// wrap breaks a text into lines, and indents all but the first.
func wrap(s string, width int) string { return strings.Join(plain.Wrap(s, width, 2), "\n") + "\n" }

// writeMesh writes a matrix in percent of the median link. Its columns have numbers, because names are long.
func writeMesh(b *strings.Builder, t Mesh) {
	names, width := 0, 4
	for i, node := range t.Nodes {
		names = max(names, len([]rune(node))+len(fmt.Sprint(i))+1)
	}
	fmt.Fprintf(b, "\n%s, %% of the median link; a row is a client, a column a server\n", t.Title)
	line := "  " + pad("", names)
	for i := range t.Nodes {
		line += fmt.Sprintf("%*d", width, i)
	}
	b.WriteString(line + "\n")
	for i, row := range t.Rows {
		line := "  " + pad(fmt.Sprintf("%d %s", i, row.Client), names)
		for _, c := range row.Cells {
			text := map[string]string{"": "–", "failed": "✗"}[c.Percent]
			if text == "" {
				text = c.Percent
			}
			line += strings.Repeat(" ", max(1, width-len([]rune(text)))) + text
		}
		b.WriteString(line + "\n")
	}
}

func changesText(w io.Writer, c Changes) error {
	var b strings.Builder
	for _, n := range c.Notices() {
		b.WriteString(wrap("! "+n, textWidth))
	}
	tw := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "VARIANT\tWORKLOAD\tPAIRS\tMETRIC\tBEFORE\tAFTER\tUNIT\tRATIO\tVERDICT")
	for _, r := range c.Rows() {
		fmt.Fprintf(tw, "%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s %s\n", plain.Line(r.Variant), plain.Line(r.Workload), r.Pairs, r.Metric, r.Before, r.After, r.Unit, r.Ratio, verdictSign(r.Verdict), r.Verdict)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for _, m := range c.Missing {
		fmt.Fprintln(&b, "missing:", plain.Line(m))
	}
	b.WriteString("\n" + wrap(c.Summary(), textWidth))
	return writePlain(w, b.String(), "text")
}
