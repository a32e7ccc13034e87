package report

import (
	"encoding/csv"
	"fmt"
	"io"
	"strconv"
	"strings"

	"slipstream.dev/internal/plain"
	"slipstream.dev/internal/stats"
)

// CSV writes the rows of the summary as one flat table, in its units and full precision. The mean
// and its interval are empty if no trial succeeded. Columns of a comparison are empty in a
// baseline's rows; warnings are codes, separated by spaces; unfinished is empty for a complete
// run. In a mesh each link has a row too, and the last two columns are its nodes.
func CSV(w io.Writer, m *Model) error {
	var b strings.Builder
	c := csv.NewWriter(&b)
	records := [][]string{{
		"variant", "workload", "pairs", "metric", "unit", "n", "mean", "ci95_lo", "ci95_hi",
		"versus", "ratio", "ratio_ci95_lo", "ratio_ci95_hi", "p", "verdict", "warnings", "unfinished",
	}}
	for _, r := range m.summary.Rows {
		records = append(records, append(csvRow(r), m.summary.Unfinished))
	}
	if len(m.summary.Meshes) > 0 {
		records = withLinks(records, m.summary)
	}
	if err := c.WriteAll(records); err != nil {
		return fmt.Errorf("report as csv: %w", err)
	}
	return writePlain(w, b.String(), "csv")
}

// csvRow returns the record of a row, except its last column.
func csvRow(r stats.Row) []string {
	row := []string{
		plain.Cell(r.Variant), plain.Cell(r.Workload), strconv.Itoa(r.Pairs), r.Metric, r.Unit, strconv.Itoa(r.N),
		"", "", "",
	}
	if r.N > 0 {
		row[6], row[7], row[8] = csvNumber(r.Mean), csvNumber(r.CI95[0]), csvNumber(r.CI95[1])
	}
	if v := r.Versus; v != nil {
		row = append(row, plain.Cell(v.Baseline), csvNumber(v.Ratio), csvNumber(v.CI95[0]), csvNumber(v.CI95[1]), csvNumber(v.P), string(v.Verdict))
	} else {
		row = append(row, "", "", "", "", "", "")
	}
	return append(row, plain.Cell(strings.Join(warningCodes(&r), " ")))
}

func csvNumber(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }

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
				plain.Cell(t.Variant), plain.Cell(t.Workload), "1", t.Metric, t.Unit, strconv.Itoa(l.N),
				csvNumber(l.Mean), csvNumber(l.CI95[0]), csvNumber(l.CI95[1]), "", "", "", "", "", "", "", s.Unfinished,
				plain.Cell(l.Client), plain.Cell(l.Server),
			})
		}
	}
	return records
}
