package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report/draw"
	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/words"
)

// The figure is for trials with more than fewNICs NICs, and shows the mostNICs busiest of them. NICs with less than
// idleShare of the busiest one's traffic are left out.
const (
	fewNICs   = 2
	mostNICs  = 16
	idleShare = 0.01
)

// A NIC rests while its rate is below restShare of its highest rate.
const restShare = 0.1

// rests returns the share of the time during which the NIC rests.
func (t timeline) rests() float64 {
	_, _, highest := t.rate.Range()
	return t.rate.Share(func(s draw.Step) bool { return s.Value < restShare*highest })
}

// nicsFigure shows all NICs of a trial over time, with a panel for each variant that has more than two. If a proxy is the
// bottleneck, its NIC stays flat at its cap, while the NICs of the nodes behind it peak in turn.
func (m *Model) nicsFigure(w spec.Workload, n int) (Figure, bool) {
	chart := draw.Strips{Limit: "cap of the NIC"}
	data := Data{Columns: []string{"Variant", "NIC", "Role", "Lowest Gb/s", "Median", "Highest", "At its cap", "Rests"}}
	var texts []string
	highest := 0.0
	for _, v := range m.exp.Spec.Variants {
		trial, ok := m.medianTrial(cell{v.Name, w.Name, n, ""}, w)
		if !ok {
			continue
		}
		nodes, _ := seriesOf(trial) // the figure of the busiest NIC reports what cannot be read
		nics := busyNICs(trial, nodes)
		if len(nics) <= fewNICs {
			continue
		}
		panel := draw.StripsPanel{Title: v.Name}
		full := 0
		for _, t := range nics {
			role := loadOf(trial, t.node).Role
			panel.Seconds = max(panel.Seconds, t.rate.End())
			panel.Strips = append(panel.Strips, draw.Strip{Name: strings.TrimSpace(role+" "+t.node) + ", " + t.direction(), Ink: roleInk(role), Steps: t.rate, Limit: t.limit})
			data.Rows = append(data.Rows, t.nicRow(v.Name, role))
			_, _, most := t.rate.Range()
			highest = max(highest, most)
			if t.atLimit() >= mostOfTime {
				full++
			}
		}
		chart.Panels = append(chart.Panels, panel)
		texts = append(texts, fmt.Sprintf("%s, %d of %s at the cap", v.Name, full, words.Count(len(nics), "NIC")))
	}
	if len(chart.Panels) == 0 {
		return Figure{}, false
	}
	return Figure{
		Section: SectionTimeline,
		Name:    slug(w.Name, "nics", fmt.Sprint(n)),
		Title:   fmt.Sprintf("All NICs over time, %s, %s", w.Name, pairs(n)),
		Caption: fmt.Sprintf("The median trial of each variant, read every 100 ms: the rate of each NIC (the %d busiest, if there are more) in its busier direction, all on one scale; the highest is %s Gb/s. In the numbers, a NIC rests while it has less than 10%% of its highest rate. NICs with less than %.0f%% of the busiest one's traffic are left out.", mostNICs, number.Significant(highest/1e9), 100*idleShare),
		Alt:     fmt.Sprintf("Rate of every NIC over the median trial of %s at %s, the NICs of a variant below each other: %s.", w.Name, pairs(n), words.And(texts)),
		Data:    data,
		Picture: chart.Picture(),
	}, true
}

// busyNICs returns the timelines of a trial's NICs, in the order of its nodes, without those that were idle.
func busyNICs(trial record.Trial, nodes map[string]record.Series) []timeline {
	all := nicTimelines(trial, nodes)
	busiest := 0.0
	for _, t := range all {
		busiest = max(busiest, t.rate.Mean())
	}
	all = slices.DeleteFunc(all, func(t timeline) bool { return busiest == 0 || t.rate.Mean() < idleShare*busiest })
	slices.SortStableFunc(all, func(a, b timeline) int { return cmp.Compare(b.rate.Mean(), a.rate.Mean()) })
	all = all[:min(len(all), mostNICs)]
	order := func(t timeline) int {
		return slices.IndexFunc(trial.Loads, func(l record.Load) bool { return l.Node == t.node })
	}
	slices.SortStableFunc(all, func(a, b timeline) int {
		return cmp.Or(order(a)-order(b), cmp.Compare(a.node, b.node), cmp.Compare(a.nic, b.nic))
	})
	return all
}

// loadOf returns the load of a node in a trial, or a zero one if it was not recorded.
func loadOf(trial record.Trial, node string) record.Load {
	for _, l := range trial.Loads {
		if l.Node == node {
			return l
		}
	}
	return record.Load{}
}

// roleInk gives the proxy the colour of text, because readers compare the others with it.
func roleInk(role string) draw.Ink {
	switch role {
	case spec.RoleProxy:
		return draw.Text
	case spec.RoleClient:
		return draw.Muted
	}
	return draw.Series
}

// nicRow returns the numbers of a NIC.
func (t timeline) nicRow(variant, role string) []string {
	lowest, median, highest := t.rate.Range()
	row := []string{variant, t.nic, cmp.Or(role, "–"), number.Significant(lowest / 1e9), number.Significant(median / 1e9), number.Significant(highest / 1e9), "–", number.Share(t.rests())}
	if t.limit > 0 {
		row[6] = number.Share(t.atLimit())
	}
	return row
}
