package report

import (
	"fmt"
	"slices"
	"strconv"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/words"
)

// PriceTable shows what each variant achieves for its price.
type PriceTable struct {
	Currency string
	Columns  []PriceColumn
	Rows     []PriceRow
}

// PriceColumn is one metric of one workload and number of pairs.
type PriceColumn struct {
	Title, Unit, Better string

	of cell // of any variant
}

// PriceRow is one variant. Cells are empty if nothing was measured.
type PriceRow struct {
	Variant, Price string
	Cells          []number.Estimate
	// Text names the variants that dominate it.
	Dominated bool
	Text      string
}

// prices returns nil if nothing has a price.
func (m *Model) prices() *PriceTable {
	if len(m.summary.Prices) == 0 {
		return nil
	}
	t := &PriceTable{Currency: m.summary.Prices[0].Currency}
	for _, p := range m.summary.Prices {
		for _, v := range p.Values {
			at := cell{workload: v.Workload, pairs: v.Pairs, metric: v.Metric}
			if slices.ContainsFunc(t.Columns, func(c PriceColumn) bool { return c.of == at }) {
				continue
			}
			t.Columns = append(t.Columns, priceColumn(at, p.Currency))
		}
	}
	for _, p := range m.summary.Prices {
		t.Rows = append(t.Rows, m.priceRow(p, t.Columns))
	}
	return t
}

func priceColumn(at cell, currency string) PriceColumn {
	q, metric := quantityOf(at.metric), metrics.Get(at.metric)
	c := PriceColumn{
		Title: fmt.Sprintf("%s %s, %s", at.workload, q.name, pairs(at.pairs)), Unit: q.unit + " × " + currency + "/h", Better: string(metric.Better), of: at,
	}
	if metric.HigherIsBetter() {
		c.Unit = q.unit + " per " + currency + "/h"
	}
	return c
}

func (m *Model) priceRow(p stats.Price, columns []PriceColumn) PriceRow {
	row := PriceRow{Variant: p.Variant, Price: strconv.FormatFloat(p.Price, 'g', 6, 64), Dominated: len(p.DominatedBy) > 0}
	for _, c := range columns {
		row.Cells = append(row.Cells, m.priceCell(p, c.of))
	}
	switch {
	case row.Dominated:
		row.Text = "dominated by " + words.And(p.DominatedBy)
	case len(p.MaybeBy) > 0:
		row.Text = "perhaps dominated by " + words.And(p.MaybeBy) + " (more blocks would tell)"
	}
	return row
}

// priceCell returns what a variant achieves for its price. It is empty if that was not
// measured.
func (m *Model) priceCell(p stats.Price, column cell) number.Estimate {
	for _, v := range p.Values {
		r := m.rows[cell{p.Variant, v.Workload, v.Pairs, v.Metric}]
		if r != nil && column == (cell{workload: v.Workload, pairs: v.Pairs, metric: v.Metric}) {
			return quantityOf(v.Metric).estimate(v.Value, v.CI95, r.N)
		}
	}
	return number.Estimate{}
}

// Dominated lists the dominated variants, each with the variants that dominate it.
func (t *PriceTable) Dominated() []string {
	var out []string
	for _, r := range t.Rows {
		if r.Dominated {
			out = append(out, r.Variant+" is "+r.Text)
		}
	}
	return out
}
