package report

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report/draw"
	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/words"
)

// timeline describes one trial over time: the rate of its busiest NIC, in the busier direction, and the times of
// its busiest core.
type timeline struct {
	variant       string
	block         int
	seconds       float64
	node, nic     string
	sends         bool
	rate, vf      draw.Steps // bit/s; vf is the part that took the NIC's virtual function, nil without one
	limit         float64    // cap of the NIC, bit/s; 0 if none is known
	core          string     // empty if no CPUs were sampled
	busy, softirq draw.Steps // shares
}

// A resource is full while it is used to fullShare or more, and limits a trial if it is full for mostOfTime of it.
// mostOfTime allows for late readings, which make the rate of a NIC at its cap look lower in one interval and higher in
// the next. A rate is flat while it stays within flatWithin of its median.
const (
	fullShare  = 0.9
	mostOfTime = 0.75
	flatWithin = 0.02
)

// atLimit returns the share of the time in which the NIC was at its cap.
func (t timeline) atLimit() float64 {
	return t.rate.Share(func(s draw.Step) bool { return t.limit > 0 && s.Value >= fullShare*t.limit })
}

// coreFull returns the share of the time in which the core was full. It allows for half a tick, because idle time
// comes in whole ticks.
func (t timeline) coreFull() float64 {
	return t.busy.Share(func(s draw.Step) bool { return s.Value >= fullShare-record.SeriesTick/2/(s.To-s.From) })
}

// vfUnused returns the time from which no bytes took the virtual function, although the traffic continued.
func (t timeline) vfUnused() (from float64, unused bool) {
	last := -1
	for i, s := range t.vf {
		if s.Value > 0 {
			last = i
		}
	}
	if last < 0 || last+2 >= len(t.vf) {
		return 0, false
	}
	after := slices.ContainsFunc(t.rate[last+2:], func(s draw.Step) bool { return s.Value > 0 })
	return t.vf[last].To, after
}

// findings describes what stands out in the timeline, each finding in a few words.
func (t timeline) findings() (all []string) {
	if from, unused := t.vfUnused(); unused {
		all = append(all, fmt.Sprintf("VF unused from %s s", number.Fixed(from, 1)))
	}
	_, median, _ := t.rate.Range()
	flat := func(s draw.Step) bool { return median > 0 && math.Abs(s.Value-median) <= flatWithin*median }
	switch {
	case t.atLimit() >= mostOfTime:
		all = append(all, "NIC at its cap")
	case t.limit == 0 && len(t.rate) > 5 && t.rate.Share(flat) >= mostOfTime:
		all = append(all, "NIC flat")
	}
	if t.coreFull() >= mostOfTime {
		all = append(all, t.core+" full")
	}
	return all
}

// medianTrial returns the trial with the median primary metric among those of a cell that have series. It returns false
// if there are none.
func (m *Model) medianTrial(c cell, w spec.Workload) (record.Trial, bool) {
	var trials []record.Trial
	for _, t := range m.trials {
		if c.holds(t) && len(t.Series) > 0 {
			trials = append(trials, t)
		}
	}
	if len(trials) == 0 {
		return record.Trial{}, false
	}
	metric := m.summary.Primary(w.Name)
	slices.SortStableFunc(trials, func(a, b record.Trial) int { return cmp.Compare(a.Metrics[metric], b.Metrics[metric]) })
	return trials[(len(trials)-1)/2], true
}

// timeline returns the timeline of a cell's median trial. It returns false if no trial of the cell has series.
func (m *Model) timeline(c cell, w spec.Workload) (timeline, bool) {
	trial, ok := m.medianTrial(c, w)
	if !ok {
		return timeline{}, false
	}
	nodes, unreadable := seriesOf(trial)
	for _, err := range unreadable {
		m.warn(record.WarnSeriesUnreadable, Entry{fmt.Sprintf("block %d, %v", trial.Block, err), m.nameCells([]cell{c})})
	}
	t := timeline{variant: c.variant, block: trial.Block}
	t.findNIC(trial, nodes)
	t.findCore(nodes)
	return t, t.rate != nil || t.busy != nil
}

// seriesOf decodes the series of a trial's nodes, and returns an error for each that cannot be decoded.
func seriesOf(trial record.Trial) (nodes map[string]record.Series, unreadable []error) {
	nodes = make(map[string]record.Series, len(trial.Series))
	for _, node := range slices.Sorted(maps.Keys(trial.Series)) {
		s, err := record.DecodeSeries(trial.Series[node])
		if err != nil {
			unreadable = append(unreadable, fmt.Errorf("%s: %w", node, err))
			continue
		}
		nodes[node] = s
	}
	return nodes, unreadable
}

// findNIC fills in the busiest NIC.
func (t *timeline) findNIC(trial record.Trial, nodes map[string]record.Series) {
	for _, n := range nicTimelines(trial, nodes) {
		if n.rate.Mean() > t.rate.Mean() {
			t.node, t.nic, t.sends, t.rate, t.vf, t.limit = n.node, n.nic, n.sends, n.rate, n.vf, n.limit
		}
	}
	t.seconds = max(t.seconds, t.rate.End())
}

// nicTimelines returns each NIC of a trial in its busier direction.
func nicTimelines(trial record.Trial, nodes map[string]record.Series) (all []timeline) {
	for _, node := range slices.Sorted(maps.Keys(nodes)) {
		s := nodes[node]
		for _, n := range s.NICs {
			below := func(u record.VFUse) bool { return u.Place == node && u.VF == n.Name && u.NIC != n.Name }
			if slices.ContainsFunc(trial.VFs, below) {
				continue // the NIC above counts these bytes too
			}
			t := timeline{node: node, sends: true, rate: rates(s, n, true), limit: loadOf(trial, node).Rate}
			if received := rates(s, n, false); received.Mean() > t.rate.Mean() {
				t.sends, t.rate = false, received
			}
			t.nic, t.vf = fmt.Sprintf("%s of %s, %s", n.Name, node, t.direction()), vfRates(trial, s, node, n.Name, t.sends)
			all = append(all, t)
		}
	}
	return all
}

func (t timeline) direction() string {
	return map[bool]string{true: "sent", false: "received"}[t.sends]
}

// vfRates returns the rates of the virtual function below a NIC.
func vfRates(t record.Trial, s record.Series, node, nic string, sends bool) draw.Steps {
	for _, u := range t.VFs {
		for _, n := range s.NICs {
			if u.Place == node && u.NIC == nic && u.VF == n.Name {
				return rates(s, n, sends)
			}
		}
	}
	return nil
}

// findCore fills in the busiest core.
func (t *timeline) findCore(nodes map[string]record.Series) {
	sampled := 0
	for _, s := range nodes {
		if len(s.CPUs) > 0 {
			sampled++
		}
	}
	most := -1.0
	for _, node := range slices.Sorted(maps.Keys(nodes)) {
		s := nodes[node]
		for _, cpu := range s.CPUs {
			busy := stepsOf(s, func(i int, seconds float64) float64 {
				return 1 - min(1, float64(cpu.Idle[i])*record.SeriesTick/seconds)
			})
			mean := busy.Mean()
			if mean <= most {
				continue
			}
			most = mean
			t.core = fmt.Sprintf("core %d", cpu.ID)
			if sampled > 1 {
				t.core += " of " + node
			}
			t.busy = busy
			t.softirq = stepsOf(s, func(i int, seconds float64) float64 {
				return min(1, float64(cpu.Softirq[i])*record.SeriesTick/seconds)
			})
		}
	}
	t.seconds = max(t.seconds, t.busy.End())
}

func rates(s record.Series, n record.NICSeries, sends bool) draw.Steps {
	bytes := n.Rx
	if sends {
		bytes = n.Tx
	}
	return stepsOf(s, func(i int, seconds float64) float64 { return 8 * float64(bytes[i]) / seconds })
}

// stepsOf computes a value for each interval of a series, except those too short to divide by.
func stepsOf(s record.Series, value func(i int, seconds float64) float64) draw.Steps {
	var out draw.Steps
	for i := range max(0, len(s.At)-1) {
		from, to := float64(s.At[i])/1e6, float64(s.At[i+1])/1e6
		if to-from >= 1e-3 {
			out = append(out, draw.Step{From: from, To: to, Value: value(i, to-from)})
		}
	}
	return out
}

// timelineFigure has a panel for each variant, with a NIC's rate above a core's time.
func (m *Model) timelineFigure(w spec.Workload, n int) (Figure, bool) {
	var timelines []timeline
	for _, v := range m.exp.Spec.Variants {
		if t, ok := m.timeline(cell{v.Name, w.Name, n, ""}, w); ok {
			timelines = append(timelines, t)
		}
	}
	if len(timelines) == 0 {
		return Figure{}, false
	}
	var found []string
	data := Data{Columns: []string{"Variant", "Block", "Busiest NIC", "Lowest Gb/s", "Median", "Highest", "At its cap", "Busiest core", "Full"}}
	for _, t := range timelines {
		if f := t.findings(); len(f) > 0 {
			found = append(found, fmt.Sprintf("%s (%s)", t.variant, strings.Join(f, ", ")))
		}
		data.Rows = append(data.Rows, t.row())
	}
	if found == nil {
		found = []string{"no NIC at its cap and no core full"}
	}
	return Figure{
		Section: SectionTimeline,
		Name:    slug(w.Name, "course", fmt.Sprint(n)),
		Title:   fmt.Sprintf("NIC and core over time, %s, %s", w.Name, pairs(n)),
		Caption: "The median trial of each variant, read every 100 ms: above, the rate of its busiest NIC; below, how busy its busiest core was. A NIC is at its cap, and a core full, if it was used to 90% or more for three quarters of the time; a NIC is flat if its rate stayed within 2% of its median for as long.",
		Alt:     fmt.Sprintf("Rate of the busiest NIC and use of the busiest core over the median trial of %s at %s, for each variant: %s.", w.Name, pairs(n), words.And(found)),
		Data:    data,
		Picture: timelinesChart(timelines).Picture(),
	}, true
}

// row returns the numbers of a timeline.
func (t timeline) row() []string {
	row := []string{t.variant, fmt.Sprint(t.block), "–", "–", "–", "–", "–", "–", "–"}
	if t.rate != nil {
		lowest, median, highest := t.rate.Range()
		row[2], row[3], row[4], row[5] = t.nic, number.Significant(lowest/1e9), number.Significant(median/1e9), number.Significant(highest/1e9)
		if from, unused := t.vfUnused(); unused {
			row[2] += fmt.Sprintf("; its VF unused from %s s", number.Fixed(from, 1))
		}
	}
	if t.limit > 0 {
		row[6] = number.Share(t.atLimit())
	}
	if t.busy != nil {
		row[7], row[8] = t.core, number.Share(t.coreFull())
	}
	return row
}

// timelinesChart describes the picture. Rates are in Gb/s.
func timelinesChart(timelines []timeline) draw.Timelines {
	chart := draw.Timelines{
		Lines: []draw.Key{{Name: "NIC, Gb/s", Ink: draw.Series}},
		Limit: "cap",
	}
	if slices.ContainsFunc(timelines, func(t timeline) bool { return t.vf != nil }) {
		chart.Lines = append(chart.Lines, draw.Key{Name: "by its VF", Ink: draw.Series + 2})
	}
	for _, part := range []int{partProcess, partSoftirq} {
		chart.Areas = append(chart.Areas, draw.Key{Name: "core, " + partNames()[part], Ink: partInks()[part]})
	}
	gigabits := func(v float64) float64 { return v / 1e9 }
	for _, t := range timelines {
		chart.Panels = append(chart.Panels, draw.Timeline{
			Title: t.variant, Note: strings.Join(t.findings(), ", "), Seconds: t.seconds,
			Lines: []draw.Steps{t.rate.Map(gigabits), t.vf.Map(gigabits)}[:len(chart.Lines)], Limit: gigabits(t.limit),
			Areas: []draw.Steps{t.busy, t.softirq}, AreasName: t.core, AreasMissing: "CPUs not sampled",
		})
	}
	return chart
}
