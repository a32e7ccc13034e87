package report

import (
	"fmt"
	"math"
	"slices"

	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/words"
)

// Mesh shows the links of one variant and workload as a matrix: a row for each client, a column for each server.
type Mesh struct {
	ID, Title, Unit, Better string
	Nodes                   []string
	Rows                    []MeshRow
	// Sentences are about the outliers, or say that there are none.
	Sentences []string
	// Secondary means that the matrix does not show the workload's primary metric.
	Secondary bool
}

// MeshRow is one client with every server, in the order of the nodes.
type MeshRow struct {
	Client string
	Cells  []MeshCell
}

// MeshCell is one link.
type MeshCell struct {
	// Value is empty for a node with itself. Percent is the link's share of the median link's value.
	Value, Percent string
	// Tooltip has the interval and the number of blocks.
	Tooltip string
	// Shade is 0 for a link as good as the median one, up to 4 for one that is far worse.
	Shade int
	// Outlier means that the link or one of its nodes is an outlier.
	Outlier bool
}

// meshes returns a matrix for each variant, workload and metric.
func (m *Model) meshes() []Mesh {
	var all []Mesh
	for _, s := range m.summary.Meshes {
		q := quantityOf(s.Metric)
		t := Mesh{
			ID: slug("mesh", s.Variant, s.Workload, s.Metric), Title: fmt.Sprintf("%s of %s, %s", q.name, s.Workload, s.Variant),
			Secondary: s.Secondary(), Unit: q.unit, Better: string(metrics.Get(s.Metric).Better), Nodes: s.Nodes, Sentences: m.meshSentences(s),
		}
		median := medianLink(s.Links)
		for _, client := range s.Nodes {
			row := MeshRow{Client: client}
			for _, server := range s.Nodes {
				row.Cells = append(row.Cells, meshCell(s, q, client, server, median))
			}
			t.Rows = append(t.Rows, row)
		}
		all = append(all, t)
	}
	return all
}

func medianLink(links []stats.MeshLink) float64 {
	var means []float64
	for _, l := range links {
		if l.N > 0 {
			means = append(means, l.Mean)
		}
	}
	if len(means) == 0 {
		return math.NaN()
	}
	slices.Sort(means)
	return means[len(means)/2]
}

func meshCell(s stats.Mesh, q quantity, client, server string, median float64) MeshCell {
	i := slices.IndexFunc(s.Links, func(l stats.MeshLink) bool { return l.Client == client && l.Server == server })
	if i < 0 {
		return MeshCell{}
	}
	l := s.Links[i]
	c := MeshCell{Outlier: slices.ContainsFunc(s.Outliers, func(o stats.Outlier) bool {
		return (o.Client == "" || o.Client == client) && (o.Server == "" || o.Server == server)
	})}
	if l.Failed > l.N {
		c.Value, c.Percent, c.Shade, c.Tooltip = "failed", "failed", shades, fmt.Sprintf("%s → %s failed in %s", client, server, ofBlocks(l.Failed, l.N))
		return c
	}
	c.Value = number.Significant(l.Mean * q.scale)
	c.Tooltip = fmt.Sprintf("%s → %s: %s, n %d", client, server, q.estimate(l.Mean, l.CI95, l.N).With(q.unit), l.N)
	if median > 0 { // it is 0 if nothing is retransmitted
		c.Percent = number.Fixed(100*l.Mean/median, 0)
		c.Tooltip += ", " + c.Percent + "% of the median link"
	}
	if l.Failed > 0 {
		c.Tooltip += fmt.Sprintf("; it failed in %s", words.Count(l.Failed, "block"))
	}
	c.Shade = shadeOf(s.Metric, l.Mean, median)
	return c
}

// shades is the number of shades for cells that are worse than the median one.
const shades = 4

func shadeOf(metric string, mean, median float64) int {
	worse := median / mean
	switch {
	case metric == metrics.RetransmitShare:
		worse = (mean + stats.RetransmitFloor) / (median + stats.RetransmitFloor)
	case !metrics.Get(metric).HigherIsBetter():
		worse = 1 / worse
	}
	// A step is a factor of 1.1, so the fourth begins at about 1.5 times worse.
	return min(max(int(math.Log(worse)/math.Log(1.1)), 0), shades)
}
