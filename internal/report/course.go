package report

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"gonum.org/v1/plot/vg"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

// course describes how one trial went: the rate of its busiest NIC, in the busier direction, and the times
// of its busiest core.
type course struct {
	variant       string
	block         int
	seconds       float64
	nic           string
	rate, vf      steps   // bit/s; vf is the part that took the NIC's virtual function, nil without one
	limit         float64 // cap of the NIC, bit/s; 0 if none is known
	core          string  // empty if no CPUs were sampled
	busy, softirq steps   // shares
}

// step is a value between two readings, at times in seconds.
type step struct{ from, to, v float64 }

type steps []step

// share returns the share of the time for which a condition holds.
func (s steps) share(holds func(step) bool) float64 {
	var all, part float64
	for _, one := range s {
		all += one.to - one.from
		if holds(one) {
			part += one.to - one.from
		}
	}
	if all == 0 {
		return 0
	}
	return part / all
}

func (s steps) mean() float64 {
	var time, sum float64
	for _, one := range s {
		time += one.to - one.from
		sum += (one.to - one.from) * one.v
	}
	return sum / max(time, 1e-9)
}

// spread returns the lowest value, the median and the highest.
func (s steps) spread() (lowest, median, highest float64) {
	if len(s) == 0 {
		return 0, 0, 0
	}
	sorted := slices.SortedFunc(slices.Values(s), func(a, b step) int { return cmp.Compare(a.v, b.v) })
	return sorted[0].v, sorted[(len(s)-1)/2].v, sorted[len(s)-1].v
}

// courseFull is the share from which a resource counts as full. It must be full for the share courseRule of
// the time to count for the trial. A rate counts as flat within courseFlat of its median. courseRule allows
// for late readings, which make the rate of a NIC at its cap look lower in one interval and higher in the
// next.
const (
	courseFull = 0.9
	courseRule = 0.75
	courseFlat = 0.02
)

func (c course) atLimit() float64 {
	return c.rate.share(func(s step) bool { return c.limit > 0 && s.v >= courseFull*c.limit })
}

// full allows for half a tick, because idle time comes in whole ticks.
func (c course) full() float64 {
	return c.busy.share(func(s step) bool { return s.v >= courseFull-record.SeriesTick/2/(s.to-s.from) })
}

// vfGone returns when the last bytes took the virtual function, if other bytes came for a while after that.
func (c course) vfGone() (at float64, gone bool) {
	last := -1
	for i, s := range c.vf {
		if s.v > 0 {
			last = i
		}
	}
	if last < 0 || last+2 >= len(c.vf) {
		return 0, false
	}
	after := slices.ContainsFunc(c.rate[last+2:], func(s step) bool { return s.v > 0 })
	return c.vf[last].to, after
}

// findings returns what the course shows, each finding in a few words.
func (c course) findings() (all []string) {
	if at, gone := c.vfGone(); gone {
		all = append(all, fmt.Sprintf("VF unused from %s s", fixed(at, 1)))
	}
	_, median, _ := c.rate.spread()
	flat := func(s step) bool { return median > 0 && math.Abs(s.v-median) <= courseFlat*median }
	switch {
	case c.atLimit() >= courseRule:
		all = append(all, "NIC at its cap")
	case c.limit == 0 && len(c.rate) > 5 && c.rate.share(flat) >= courseRule:
		all = append(all, "NIC flat")
	}
	if c.full() >= courseRule {
		all = append(all, c.core+" full")
	}
	return all
}

// course returns the course of a cell's median trial, by the primary metric of the workload. It is false if
// the cell has no trial with series.
func (m *Model) course(c cell, w spec.Workload) (course, bool) {
	var trials []record.Trial
	for _, t := range m.trials {
		if c.holds(t) && len(t.Series) > 0 {
			trials = append(trials, t)
		}
	}
	if len(trials) == 0 {
		return course{}, false
	}
	metric := stats.Primary(m.exp, w)
	slices.SortStableFunc(trials, func(a, b record.Trial) int { return cmp.Compare(a.Metrics[metric], b.Metrics[metric]) })
	t := trials[(len(trials)-1)/2]
	nodes := make(map[string]record.Series, len(t.Series))
	for node, text := range t.Series {
		s, err := record.DecodeSeries(text)
		if err != nil {
			m.warn(record.WarnSeriesUnreadable, Entry{fmt.Sprintf("block %d, %s: %v", t.Block, node, err), m.words([]cell{c})})
			continue
		}
		nodes[node] = s
	}
	of := course{variant: c.variant, block: t.Block}
	of.busiestNIC(t, nodes)
	of.busiestCore(nodes)
	return of, of.rate != nil || of.busy != nil
}

func (c *course) busiestNIC(t record.Trial, nodes map[string]record.Series) {
	for _, node := range slices.Sorted(maps.Keys(nodes)) {
		s := nodes[node]
		for _, n := range s.NICs {
			below := func(u record.VFUse) bool { return u.Place == node && u.VF == n.Name && u.NIC != n.Name }
			if slices.ContainsFunc(t.VFs, below) {
				continue // the NIC above counts these bytes too
			}
			for _, sends := range []bool{true, false} {
				c.takeNIC(t, node, s, n, sends)
			}
		}
	}
	c.seconds = max(c.seconds, end(c.rate))
}

// takeNIC takes over the rate of a NIC that sent or received more than the busiest one so far.
func (c *course) takeNIC(t record.Trial, node string, s record.Series, n record.NICSeries, sends bool) {
	rate := rates(s, n, sends)
	if rate.mean() <= c.rate.mean() {
		return
	}
	c.nic = fmt.Sprintf("%s of %s, %s", n.Name, node, map[bool]string{true: "sent", false: "received"}[sends])
	c.rate, c.vf, c.limit = rate, vfRates(t, s, node, n.Name, sends), 0
	if i := slices.IndexFunc(t.Loads, func(l record.Load) bool { return l.Node == node }); i >= 0 {
		c.limit = t.Loads[i].Rate
	}
}

// vfRates returns the rates of the virtual function below a NIC.
func vfRates(t record.Trial, s record.Series, node, nic string, sends bool) steps {
	for _, u := range t.VFs {
		for _, n := range s.NICs {
			if u.Place == node && u.NIC == nic && u.VF == n.Name {
				return rates(s, n, sends)
			}
		}
	}
	return nil
}

func (c *course) busiestCore(nodes map[string]record.Series) {
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
			busy := each(s, func(i int, seconds float64) float64 {
				return 1 - min(1, float64(cpu.Idle[i])*record.SeriesTick/seconds)
			})
			if mean := busy.mean(); mean > most {
				most = mean
				c.core = fmt.Sprintf("core %d", cpu.ID)
				if sampled > 1 {
					c.core += " of " + node
				}
				c.busy = busy
				c.softirq = each(s, func(i int, seconds float64) float64 {
					return min(1, float64(cpu.Softirq[i])*record.SeriesTick/seconds)
				})
			}
		}
	}
	c.seconds = max(c.seconds, end(c.busy))
}

func rates(s record.Series, n record.NICSeries, sends bool) steps {
	bytes := n.Rx
	if sends {
		bytes = n.Tx
	}
	return each(s, func(i int, seconds float64) float64 { return 8 * float64(bytes[i]) / seconds })
}

// each computes a value for each interval of a series, except those too short to divide by.
func each(s record.Series, value func(i int, seconds float64) float64) steps {
	var out steps
	for i := range max(0, len(s.At)-1) {
		from, to := float64(s.At[i])/1e6, float64(s.At[i+1])/1e6
		if to-from >= 1e-3 {
			out = append(out, step{from, to, value(i, to-from)})
		}
	}
	return out
}

func end(s steps) float64 {
	if len(s) == 0 {
		return 0
	}
	return s[len(s)-1].to
}

// courseFigure has a panel for each variant, with a NIC's rate above a core's time.
func (m *Model) courseFigure(w spec.Workload, n int) (Figure, bool) {
	var courses []course
	for _, v := range m.exp.Spec.Variants {
		if c, ok := m.course(cell{v.Name, w.Name, n, ""}, w); ok {
			courses = append(courses, c)
		}
	}
	if len(courses) == 0 {
		return Figure{}, false
	}
	var found []string
	data := Data{Columns: []string{"Variant", "Block", "Busiest NIC", "Lowest Gb/s", "Median", "Highest", "At its cap", "Busiest core", "Full"}}
	for _, c := range courses {
		if f := c.findings(); len(f) > 0 {
			found = append(found, fmt.Sprintf("%s (%s)", c.variant, strings.Join(f, ", ")))
		}
		data.Rows = append(data.Rows, c.row())
	}
	if found == nil {
		found = []string{"no NIC at its cap and no core full"}
	}
	f := Figure{
		Section: SectionCourse,
		Name:    slug(w.Name, "course", fmt.Sprint(n)),
		Title:   fmt.Sprintf("NIC and core over time, %s, %s", w.Name, pairs(n)),
		Caption: "The median trial of each variant, read every 100 ms: above, the rate of its busiest NIC; below, how busy its busiest core was. A NIC is at its cap, and a core full, if it was used to 90 % or more for three quarters of the time; a NIC is flat if its rate stayed within 2 % of its median for as long.",
		Alt:     fmt.Sprintf("Rate of the busiest NIC and use of the busiest core over the median trial of %s at %s, for each variant: %s.", w.Name, pairs(n), list(found)),
		Data:    data,
		width:   figureWidth,
	}
	f.drawCourses(courses)
	return f, true
}

// row returns the numbers of a course.
func (c course) row() []string {
	percentOf := func(share float64) string { return fixed(100*share, 0) + " %" }
	row := []string{c.variant, fmt.Sprint(c.block), "–", "–", "–", "–", "–", "–", "–"}
	if c.rate != nil {
		lowest, median, highest := c.rate.spread()
		row[2], row[3], row[4], row[5] = c.nic, significant(lowest/1e9), significant(median/1e9), significant(highest/1e9)
		if at, gone := c.vfGone(); gone {
			row[2] += fmt.Sprintf("; its VF unused from %s s", fixed(at, 1))
		}
	}
	if c.limit > 0 {
		row[6] = percentOf(c.atLimit())
	}
	if c.busy != nil {
		row[7], row[8] = c.core, percentOf(c.full())
	}
	return row
}

// Measures of the panels of courses.
const (
	courseHead, courseRate, courseGap, courseCore, courseFoot = 27.0, 56.0, 13.0, 34.0, 22.0
	coursePanel                                               = courseHead + courseRate + courseGap + courseCore + courseFoot
)

// drawCourses lays out the panels.
func (f *Figure) drawCourses(courses []course) {
	const axis, gap, legend, narrowest = 34.0, 16.0, 20.0, 140.0
	columns := max(1, int((f.width-axis+gap)/(narrowest+gap)))
	columns = min(columns, len(courses))
	rows := (len(courses) + columns - 1) / columns
	panel := (f.width - axis - 8 - gap*float64(columns-1)) / float64(columns)
	f.height = legend + float64(rows)*coursePanel
	highest, vf := 0.0, false
	for _, c := range courses {
		_, _, top := c.rate.spread()
		highest, vf = max(highest, top/1e9), vf || c.vf != nil
	}
	// A cap far above all rates is not drawn, because it would press them to the bottom.
	top := max(1.25*highest, 1e-3)
	limit := false
	for _, c := range courses {
		if inGb := c.limit / 1e9; inGb > 0 && inGb <= top {
			highest, limit = max(highest, inGb), true
		}
	}
	f.draw = func(p *pen) {
		p.courseLegend(axis, vf, limit)
		for i, c := range courses {
			at := frame{left: axis + float64(i%columns)*(panel+gap), top: legend + float64(i/columns)*coursePanel}
			at.right, at.bottom = at.left+panel, at.top+coursePanel
			p.course(c, at, max(highest, 1e-3), i%columns == 0)
		}
	}
}

func (p *pen) courseLegend(x float64, vf, limit bool) {
	key := func(name string, draw func(x float64)) {
		draw(x)
		p.text(point{x + 16, 10.5}, name, small, inkText, alignLeft)
		x += 16 + p.width(name, small) + 10
	}
	line := func(ink int, dash []vg.Length) func(float64) {
		return func(x float64) { p.line(1.4, ink, dash, point{x, 7}, point{x + 12, 7}) }
	}
	key("NIC, Gb/s", line(inkSeries, nil))
	if vf {
		key("by its VF", line(inkSeries+2, nil))
	}
	if limit {
		key("cap", line(inkText, []vg.Length{3, 2}))
	}
	for _, part := range []int{partProcess, partSoftirq} {
		key("core, "+partNames()[part], func(x float64) { p.rect(x+2, 2, 10, 10, partInks()[part]) })
	}
}

// course draws one panel. The rates of NICs reach up to highest Gb/s.
func (p *pen) course(c course, at frame, highest float64, axis bool) {
	width := 0.88 * (at.right - at.left) // a page may have a wider font
	p.text(point{at.left, at.top + 9}, p.fit(c.variant, normal, width), normal, inkText, alignLeft)
	p.text(point{at.left, at.top + 20}, p.fit(strings.Join(c.findings(), ", "), small, width), small, inkMuted, alignLeft)
	nic := frame{left: at.left, right: at.right, top: at.top + courseHead, bottom: at.top + courseHead + courseRate}
	core := frame{left: at.left, right: at.right, top: nic.bottom + courseGap, bottom: at.bottom - courseFoot}
	// plot converts a time and a share of the frame's height into a point.
	plot := func(f frame, t, share float64) point {
		return point{f.left + (f.right-f.left)*t/max(c.seconds, 1e-9), f.bottom - (f.bottom-f.top)*min(max(share, 0), 1)}
	}
	grid := func(f frame, share float64, label string) {
		p.line(0.6, inkGrid, nil, plot(f, 0, share), plot(f, c.seconds, share))
		if axis {
			p.text(point{f.left - 4, plot(f, 0, share).y + 3}, label, small, inkMuted, alignRight)
		}
	}
	top := highest * 1.04
	tick := niceStep(highest / 3)
	grid(nic, 0, "0")
	for v := tick; v <= highest*(1+1e-9); v += tick {
		grid(nic, v/top, fixed(v, stepDecimals(tick)))
	}
	if c.limit > 0 && c.limit/1e9 <= top {
		p.line(0.8, inkText, []vg.Length{3, 2}, plot(nic, 0, c.limit/1e9/top), plot(nic, c.seconds, c.limit/1e9/top))
	}
	p.steps(c.rate, inkSeries, func(t, v float64) point { return plot(nic, t, v/1e9/top) })
	p.steps(c.vf, inkSeries+2, func(t, v float64) point { return plot(nic, t, v/1e9/top) })
	onCore := func(t, v float64) point { return plot(core, t, v) }
	p.area(c.busy, inkProcess, onCore)
	p.area(c.softirq, inkSoftirq, onCore)
	grid(core, 1, "100 %")
	grid(core, 0, "0")
	if c.core == "" {
		p.text(point{at.left + 4, core.bottom - 6}, "CPUs not sampled", small, inkMuted, alignLeft)
	}
	p.text(point{at.left, at.bottom - 11}, "0", small, inkMuted, alignLeft)
	p.text(point{at.right, at.bottom - 11}, significant(c.seconds)+" s", small, inkMuted, alignRight)
	p.text(point{(at.left + at.right) / 2, at.bottom - 11}, p.fit(c.core, small, 0.6*(at.right-at.left)), small, inkMuted, alignCentre)
}

// mostSteps is the number of levels that a panel has room for.
const mostSteps = 60

// joined groups neighbouring steps into at most mostSteps groups.
func (s steps) joined() (groups []steps) {
	size := (len(s) + mostSteps - 1) / mostSteps
	for from := 0; from < len(s); from += size {
		groups = append(groups, s[from:min(from+size, len(s))])
	}
	return groups
}

// line returns points of time and value, with a level for each interval. If the intervals are too short to
// draw, it has the lowest and the highest level of each group, which keeps their spikes.
func (s steps) line() (line []point) {
	for _, group := range s.joined() {
		lowest, _, highest := group.spread()
		if lowest < highest {
			line = append(line, point{group[0].from, lowest})
		}
		line = append(line, point{group[0].from, highest}, point{group[len(group)-1].to, highest})
	}
	return line
}

func (p *pen) steps(s steps, ink int, at func(t, v float64) point) {
	line := s.line()
	for i, q := range line {
		line[i] = at(q.x, q.y)
	}
	if len(line) > 0 {
		p.line(1.2, ink, nil, line...)
	}
}

// area fills the area below the means of the intervals.
func (p *pen) area(s steps, ink int, at func(t, v float64) point) {
	if len(s) == 0 {
		return
	}
	outline := []point{at(s[0].from, 0)}
	for _, group := range s.joined() {
		from, to := at(group[0].from, group.mean()), at(group[len(group)-1].to, group.mean())
		if last := len(outline) - 1; math.Abs(outline[last].y-from.y) < 0.05 && last > 0 {
			outline[last] = to
			continue
		}
		outline = append(outline, from, to)
	}
	p.fill(append(outline, at(end(s), 0)), ink)
}
