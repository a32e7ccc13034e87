package report

import (
	"slices"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/stats"
)

// Cost shows one metric of one overlay path, as a share of the host network's.
type Cost struct {
	Variant, Native string
	// What names the workload and the metric. Better is the better direction.
	What, Better string
	Shares       []Share
}

// Share is a percentage of the host network at one number of pairs.
type Share struct {
	Pairs int
	number.Estimate
}

// costs returns a row for each overlay that was compared with the host network, whichever of them is the baseline.
func (m *Model) costs() []Cost {
	var out []Cost
	for _, t := range m.Tables {
		if !t.Judged && t.Metric != metrics.CPUPerGB && t.Metric != metrics.CPUPerMessage {
			continue
		}
		for _, row := range t.Rows {
			shares := map[[2]string][]Share{}
			var order [][2]string
			for _, p := range t.Pairs {
				r := m.rows[cell{row.Variant, t.Workload, p, t.Metric}]
				if !m.hasComparison(r, overlayCost) {
					continue
				}
				key, share := m.share(r)
				if shares[key] == nil {
					order = append(order, key)
				}
				shares[key] = append(shares[key], Share{p, share})
			}
			for _, key := range order {
				out = append(out, Cost{Variant: key[0], Native: key[1], What: t.Title, Better: t.Better, Shares: shares[key]})
			}
		}
	}
	return out
}

// share converts a comparison to the ratio of the overlay to the host network.
func (m *Model) share(r *stats.Row) (overlayAndNative [2]string, share number.Estimate) {
	ci := number.Of(r.Versus.CI95, r.Versus.N)
	if !m.native(m.variant(r.Variant)) {
		return [2]string{r.Variant, r.Versus.Baseline}, number.Percent(r.Versus.Ratio, ci)
	}
	return [2]string{r.Versus.Baseline, r.Variant},
		number.Percent(1/r.Versus.Ratio, ci.Inverse())
}

// CostPairs returns the columns of the table of costs.
func (m *Model) CostPairs() []int {
	var all []int
	for _, c := range m.Costs {
		for _, s := range c.Shares {
			all = append(all, s.Pairs)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// At returns the share at a number of pairs, or an empty one if there is none.
func (c Cost) At(pairs int) number.Estimate {
	for _, s := range c.Shares {
		if s.Pairs == pairs {
			return s.Estimate
		}
	}
	return number.Estimate{}
}
