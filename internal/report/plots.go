package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/HdrHistogram/hdrhistogram-go"
	"gonum.org/v1/plot/vg"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/stats"
)

// Measures of every figure, in points.
const (
	figureWidth = 366.0 // two side by side on a desk, one on a phone
	small       = 9.0   // ticks
	normal      = 10.0  // labels
)

// look is how a variant is drawn, the same in every figure.
type look struct {
	ink, shape int
	dash       []vg.Length
}

// look gives the baseline the colour of text and the host network a dashed grey,
// since both are what the others are read against.
func (m *Model) look(name string) look {
	v := m.variant(name)
	switch {
	case name == m.exp.Spec.Baseline:
		return look{ink: inkText}
	case m.native(v):
		return look{ink: inkMuted, shape: 3, dash: []vg.Length{4, 3}}
	}
	n := 0
	for _, o := range m.exp.Spec.Variants {
		if o.Name == name {
			break
		}
		if o.Name != m.exp.Spec.Baseline && !m.native(o) {
			n++
		}
	}
	return look{ink: inkSeries + n%seriesInks, shape: n % markers}
}

func (m *Model) drawFigures() []Figure {
	var out []Figure
	for _, w := range m.exp.Spec.Workloads {
		tables := m.judgedTables(w.Name)
		if len(tables) == 0 {
			continue
		}
		for _, versus := range tables[0].Baselines {
			out = append(out, m.scalingFigure(tables[0], versus))
		}
	}
	for _, draw := range []func(v1alpha1.Workload, int) (Figure, bool){m.latencyFigure, m.cpuFigure} {
		for _, w := range m.exp.Spec.Workloads {
			for _, pairs := range smallestAndLargest(m.pairsOf(w)) {
				if f, ok := draw(w, pairs); ok {
					out = append(out, f)
				}
			}
		}
	}
	return out
}

// curve is one variant's line in a plot.
type curve struct {
	variant string
	look    look
	points  []sample
}

// sample is one value with its interval; x is the place on the x axis.
type sample struct {
	x, y   float64
	ci     interval
	filled bool
}

// scalingFigure sets every variant's ratio against the number of pairs.
func (m *Model) scalingFigure(t Table, versus string) Figure {
	var curves []curve
	top, bound := 1.0, 1.0
	data := Data{Columns: []string{"Variant"}}
	for _, p := range t.Pairs {
		data.Columns = append(data.Columns, pairs(p))
	}
	for _, row := range t.Rows {
		c := curve{variant: row.Variant, look: m.look(row.Variant)}
		numbers := []string{row.Variant}
		for i, l := range row.Cells {
			if !l.drawable() || l.Versus != versus {
				numbers = append(numbers, "–")
				continue
			}
			ratio := spreadOf(l.row)
			c.points = append(c.points, sample{float64(i), ratio.at, ratio.ci,
				l.Verdict == stats.Faster || l.Verdict == stats.Slower})
			top = max(top, ratio.at)
			if ratio.ci.known() {
				bound = max(bound, ratio.ci.hi)
			}
			numbers = append(numbers, strings.TrimSpace(l.Ratio.String()+" "+string(l.Verdict)))
		}
		if len(c.points) > 0 {
			curves = append(curves, c)
			data.Rows = append(data.Rows, numbers)
		}
	}
	// Few blocks give intervals that would flatten everything; they are cut.
	bound = min(bound, 1.6*top) * 1.01
	step := niceStep(bound / 7)
	most := math.Ceil(bound/step-1e-9) * step
	f := Figure{
		Section: SectionScaling,
		Name:    slug(t.Workload, t.Metric, "versus", versus),
		Title:   fmt.Sprintf("%s relative to %s", upper(t.Title), versus),
		Caption: fmt.Sprintf("Ratio to %s in the same block; %s is better. Bars are 95 %% intervals. A filled mark is faster or slower, a hollow one is the same or inconclusive.",
			versus, t.Better),
		Alt: fmt.Sprintf("%s relative to %s at %s: %s.", upper(t.Title), versus,
			listPairs(t.Pairs), list(ends(curves, t.Pairs))),
		Data:   data,
		width:  figureWidth,
		height: max(260, 70+12*float64(len(curves)+1)),
	}
	f.draw = func(p *pen) {
		labels := 0.0
		for _, c := range curves {
			labels = max(labels, p.width(c.variant, normal))
		}
		labels = min(max(labels, p.width(versus, normal)), 0.2*f.width)
		area := frame{left: 40, top: 26, right: f.width - labels - 30, bottom: f.height - 36}
		slot := (area.right - area.left) / float64(len(t.Pairs))
		x := func(i float64) float64 { return area.left + (i+0.5)*slot }
		y := func(v float64) float64 { return area.bottom - (area.bottom-area.top)*v/most }
		p.text(point{0, 12}, "ratio to "+versus, small, inkMuted, alignLeft)
		for v := 0.0; v <= most+step/2; v += step {
			p.line(0.6, inkGrid, nil, point{area.left, y(v)}, point{area.right, y(v)})
			p.text(point{area.left - 6, y(v) + 3}, fixed(v, stepDecimals(step)), small, inkMuted, alignRight)
		}
		p.line(1.2, inkText, nil, point{area.left, y(1)}, point{area.right, y(1)})
		for i, n := range t.Pairs {
			p.text(point{x(float64(i)), area.bottom + 14}, pairs(n), small, inkMuted, alignCentre)
		}
		tags := []tag{{point{area.right, y(1)}, versus, look{ink: inkText}, false}}
		dodge := min(9, 0.6*slot/float64(len(curves)))
		for i, c := range curves {
			off := (float64(i) - float64(len(curves)-1)/2) * dodge
			var line []point
			for _, s := range c.points {
				line = append(line, point{x(s.x) + off, y(s.y)})
			}
			p.line(1.4, c.look.ink, c.look.dash, line...)
			for j, s := range c.points {
				if q := line[j]; s.ci.known() {
					p.line(1.2, c.look.ink, nil, point{q.x, y(max(s.ci.lo, 0))}, point{q.x, y(min(s.ci.hi, most))})
				}
			}
			for j, s := range c.points {
				p.marker(c.look.shape, line[j], 3, c.look.ink, s.filled)
			}
			tags = append(tags, tag{line[len(line)-1], c.variant, c.look, true})
		}
		p.tags(tags, area, labels)
	}
	return f
}

// ends words the last point of each curve.
func ends(curves []curve, pairCounts []int) []string {
	var out []string
	for _, c := range curves {
		s := c.points[len(c.points)-1]
		out = append(out, fmt.Sprintf("%s %s at %s", c.variant, estimate(s.y, s.ci, 2), pairs(pairCounts[int(s.x)])))
	}
	return out
}

// frame is the area between a plot's axes.
type frame struct{ left, top, right, bottom float64 }

// tag names a curve at its end, which spares the reader a legend.
type tag struct {
	from   point
	text   string
	look   look
	leader bool
}

// tags stand right of the frame, moved apart where they would overlap.
func (p *pen) tags(tags []tag, f frame, width float64) {
	const apart = normal + 2
	slices.SortStableFunc(tags, func(a, b tag) int { return cmp.Compare(a.from.y, b.from.y) })
	ys := make([]float64, len(tags))
	for i, t := range tags {
		ys[i] = max(t.from.y, f.top)
		if i > 0 {
			ys[i] = max(ys[i], ys[i-1]+apart)
		}
	}
	limit := f.bottom + apart
	for i := len(ys) - 1; i >= 0; i-- {
		ys[i] = min(ys[i], limit)
		limit = ys[i] - apart
	}
	for i, t := range tags {
		x := f.right + 18
		if t.leader {
			p.line(0.5, t.look.ink, []vg.Length{1, 2}, point{t.from.x + 5, t.from.y}, point{f.right + 3, ys[i]}, point{x - 12, ys[i]})
			p.marker(t.look.shape, point{x - 8, ys[i]}, 2.4, t.look.ink, true)
		}
		p.text(point{x, ys[i] + 3.2}, p.fit(t.text, normal, width), normal, t.look.ink, alignLeft)
	}
}

// niceStep is the next 1, 2 or 5 × a power of ten.
func niceStep(least float64) float64 {
	unit := math.Pow(10, math.Floor(math.Log10(least)))
	for _, n := range []float64{1, 2, 5} {
		if n*unit >= least*(1-1e-9) {
			return n * unit
		}
	}
	return 10 * unit
}

func stepDecimals(step float64) int { return max(0, int(math.Ceil(-math.Log10(step)-1e-9))) }

func upper(s string) string {
	if s == "" {
		return s
	}
	return strings.ToUpper(s[:1]) + s[1:]
}

func listPairs(n []int) string {
	var words []string
	for _, p := range n {
		words = append(words, fmt.Sprint(p))
	}
	if len(n) == 1 {
		return pairs(n[0])
	}
	return list(words) + " pairs"
}

// latencyFigure draws the percentiles of each variant, its trials merged, at one number of
// pairs. The x axis is logarithmic in the share of slower messages, as is usual for HDR
// histograms.
func (m *Model) latencyFigure(w v1alpha1.Workload, n int) (Figure, bool) {
	var curves []curve
	least, most, end := math.Inf(1), 0.0, 2.0
	data := Data{Columns: []string{"Variant", "Messages", "p50 µs", "p90 µs", "p99 µs", "p99.9 µs", "Largest µs"}}
	var alt []string
	for _, v := range m.exp.Spec.Variants {
		h := m.merged(cell{v.Name, w.Name, n, ""})
		if h == nil || h.TotalCount() == 0 {
			continue
		}
		row := []string{v.Name, fmt.Sprint(h.TotalCount())}
		for _, q := range []float64{50, 90, 99, 99.9, 100} {
			row = append(row, significant(microseconds(h, q)))
		}
		data.Rows = append(data.Rows, row)
		alt = append(alt, fmt.Sprintf("%s %s and %s", v.Name, row[2], row[4]))
		c, last := percentiles(h)
		if len(c) == 0 {
			continue
		}
		for _, s := range c {
			least, most = min(least, s.y), max(most, s.y)
		}
		end = max(end, math.Ceil(last*2)/2)
		curves = append(curves, curve{v.Name, m.look(v.Name), c})
	}
	if len(curves) == 0 {
		return Figure{}, false
	}
	lo, hi := ladder(least, false), ladder(most, true)
	if lo == hi {
		hi = ladder(hi*1.01, true)
	}
	f := Figure{
		Section: SectionLatency,
		Name:    slug(w.Name, "latency-distribution", fmt.Sprint(n)),
		Title:   fmt.Sprintf("%s latency distribution, %s", upper(w.Name), pairs(n)),
		Caption: "All trials of a variant merged. Both axes are logarithmic: to the right, each tick leaves a tenth of the messages; a curve ends where fewer than ten are left. Lower is better.",
		Alt:     fmt.Sprintf("Percentile curves of %s latency at %s, in µs. Median and p99: %s.", w.Name, pairs(n), strings.Join(alt, "; ")),
		Data:    data,
		width:   figureWidth,
		height:  max(260, 80+12*float64(len(m.exp.Spec.Variants))),
	}
	f.draw = func(p *pen) { p.latencies(curves, f, lo, hi, end) }
	return f, true
}

func microseconds(h *hdrhistogram.Histogram, percentile float64) float64 {
	return float64(h.ValueAtPercentile(percentile)) / 1e3
}

// percentiles are the points of a curve, filled at each tenth of the messages, and how many
// tenths there are.
func percentiles(h *hdrhistogram.Histogram) (points []sample, last float64) {
	const perDecade = 20
	// Beyond ten slower messages a percentile is one message's luck.
	last = min(math.Log10(max(float64(h.TotalCount())/10, 1)), 5)
	for i := 0; float64(i)/perDecade <= last; i++ {
		x := float64(i) / perDecade
		if y := microseconds(h, 100*(1-math.Pow(10, -x))); y > 0 {
			points = append(points, sample{x: x, y: y, filled: i%perDecade == 0 && i > 0})
		}
	}
	return points, last
}

func (p *pen) latencies(curves []curve, f Figure, lo, hi, end float64) {
	labels := 0.0
	for _, c := range curves {
		labels = max(labels, p.width(c.variant, normal))
	}
	labels = min(labels, 0.2*f.width)
	area := frame{left: 40, top: 22, right: f.width - labels - 30, bottom: f.height - 36}
	x := func(v float64) float64 { return area.left + (area.right-area.left)*v/end }
	y := func(v float64) float64 {
		return area.bottom - (area.bottom-area.top)*math.Log(v/lo)/math.Log(hi/lo)
	}
	p.text(point{0, 12}, "µs", small, inkMuted, alignLeft)
	for v := lo; v <= hi*1.001; v = ladder(v*1.01, true) {
		p.line(0.6, inkGrid, nil, point{area.left, y(v)}, point{area.right, y(v)})
		p.text(point{area.left - 6, y(v) + 3}, fixed(v, stepDecimals(v)), small, inkMuted, alignRight)
	}
	ticks := []struct {
		at   float64
		text string
	}{{0, "0"}, {math.Log10(2), "50"}, {1, "90"}, {2, "99"}, {3, "99.9"}, {4, "99.99"}, {5, "99.999"}}
	for _, t := range ticks {
		if t.at > end {
			break
		}
		p.line(0.6, inkGrid, nil, point{x(t.at), area.top}, point{x(t.at), area.bottom})
		p.text(point{x(t.at), area.bottom + 13}, t.text, small, inkMuted, alignCentre)
	}
	p.text(point{(area.left + area.right) / 2, area.bottom + 28}, "percentile", small, inkMuted, alignCentre)
	var tags []tag
	for _, c := range curves {
		var line []point
		for _, s := range c.points {
			line = append(line, point{x(s.x), y(s.y)})
		}
		p.line(1.4, c.look.ink, c.look.dash, line...)
		for j, s := range c.points {
			if s.filled {
				p.marker(c.look.shape, line[j], 2.4, c.look.ink, true)
			}
		}
		tags = append(tags, tag{line[len(line)-1], c.variant, c.look, true})
	}
	p.tags(tags, area, labels)
}

// ladder is the nearest 1, 2 or 5 × a power of ten at or above, or at or below.
func ladder(v float64, above bool) float64 {
	up := niceStep(v)
	if above || up <= v*(1+1e-9) {
		return up
	}
	unit := math.Pow(10, math.Floor(math.Log10(v)))
	for _, n := range []float64{5, 2} {
		if n*unit <= v*(1+1e-9) {
			return n * unit
		}
	}
	return unit
}

// merged is the histogram of all trials of a cell; nil where none has one. One
// that cannot be read is warned of and left out.
func (m *Model) merged(c cell) *hdrhistogram.Histogram {
	var all *hdrhistogram.Histogram
	for _, t := range m.trials {
		if t.Status != record.StatusOK || t.Latency == "" || t.Variant != c.variant || t.Workload != c.workload || t.Pairs != c.pairs {
			continue
		}
		h, err := record.DecodeHistogram(t.Latency)
		if err != nil {
			w := newWarning(warnUnreadable)
			w.Entries = []Entry{{fmt.Sprintf("block %d: %v", t.Block, err), m.words([]cell{c})}}
			m.Warnings = append(m.Warnings, w)
			continue
		}
		if all == nil {
			all = h
			continue
		}
		all.Merge(h)
	}
	return all
}

// Parts of a core's time, in the order in which they are stacked.
const (
	partProcess = iota
	partSoftirq
	partIRQ
	partSteal
	partIdle
	parts
)

func partNames() [parts]string { return [parts]string{"process", "softirq", "irq", "steal", "idle"} }

func partInks() [parts]int {
	return [parts]int{inkProcess, inkSoftirq, inkIrq, inkSteal, inkIdle}
}

// core is the mean share of each part over a cell's trials; as a bar it can
// stand for several neighbours.
type core struct {
	name  string
	host  int
	share [parts]float64
}

// load is one cell's cores.
type load struct {
	variant string
	cores   []core
}

// sum is over the cores: the number of cores that a part fills.
func (l load) sum(part int) float64 {
	s := 0.0
	for _, c := range l.cores {
		s += c.share[part]
	}
	return s
}

func (l load) busy() float64 { return float64(len(l.cores)) - l.sum(partIdle) }

// load averages over the trials of a cell. The hosts are numbered as in hosts,
// which grows.
func (m *Model) load(c cell, hosts *[]record.Host, sources map[string]bool) load {
	type key struct{ host, cpu int }
	sums := map[key]*core{}
	counts := map[key]int{}
	for _, t := range m.trials {
		if t.Status != record.StatusOK || t.Variant != c.variant || t.Workload != c.workload || t.Pairs != c.pairs {
			continue
		}
		for _, h := range t.Hosts {
			if h.Seconds <= 0 {
				continue
			}
			sources[h.Source] = true
			host := slices.IndexFunc(*hosts, func(o record.Host) bool { return o.Boot == h.Boot })
			if host < 0 {
				host = len(*hosts)
				*hosts = append(*hosts, h)
			}
			for _, cpu := range h.CPUs {
				k := key{host, cpu.ID}
				if sums[k] == nil {
					sums[k] = &core{name: fmt.Sprint(cpu.ID), host: host}
				}
				counts[k]++
				for part, share := range shares(cpu, h.Seconds) {
					sums[k].share[part] += share
				}
			}
		}
	}
	keys := make([]key, 0, len(sums))
	for k := range sums {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b key) int { return cmp.Or(a.host-b.host, a.cpu-b.cpu) })
	l := load{variant: c.variant}
	for _, k := range keys {
		one := *sums[k]
		for part := range one.share {
			one.share[part] /= float64(counts[k])
		}
		l.cores = append(l.cores, one)
	}
	return l
}

// shares of the window. Busy is all but idle, so what is neither softirq, irq
// nor stolen is processes, the kernel's part of them included.
func shares(c record.CPU, seconds float64) [parts]float64 {
	s := [parts]float64{
		partSoftirq: c.Softirq / seconds,
		partIRQ:     c.IRQ / seconds,
		partSteal:   c.Steal / seconds,
	}
	taken := s[partSoftirq] + s[partIRQ] + s[partSteal]
	s[partProcess] = max(0, c.Busy/seconds-taken)
	taken += s[partProcess]
	// Two clocks can disagree by a tick; a core is never more than full.
	if taken > 1 {
		for i := range s {
			s[i] /= taken
		}
	}
	s[partIdle] = max(0, 1-taken)
	return s
}

// bars joins neighbouring cores of one host so that no more than most remain.
func (l load) bars(most int) []core {
	each := (len(l.cores) + most - 1) / most
	if each < 2 {
		return l.cores
	}
	var out []core
	for i := 0; i < len(l.cores); {
		j := i
		var bar core
		for ; j < len(l.cores) && j-i < each && l.cores[j].host == l.cores[i].host; j++ {
			for part, s := range l.cores[j].share {
				bar.share[part] += s
			}
		}
		for part := range bar.share {
			bar.share[part] /= float64(j - i)
		}
		bar.host, bar.name = l.cores[i].host, l.cores[i].name
		if j-i > 1 {
			bar.name += "–" + l.cores[j-1].name
		}
		out = append(out, bar)
		i = j
	}
	return out
}

// cpuFigure is a small multiple: a panel a variant, a bar a core, at one number of pairs.
func (m *Model) cpuFigure(w v1alpha1.Workload, n int) (Figure, bool) {
	var hosts []record.Host
	sources := map[string]bool{}
	var loads []load
	widest := 0
	for _, v := range m.exp.Spec.Variants {
		if l := m.load(cell{v.Name, w.Name, n, ""}, &hosts, sources); len(l.cores) > 0 {
			loads = append(loads, l)
			widest = max(widest, len(l.cores))
		}
	}
	if len(loads) == 0 {
		return Figure{}, false
	}
	// As many bars as a page can carry, whatever the machine.
	const bars = 700
	most := min(64, max(16, bars/len(loads)))
	shown := min(widest, most)
	busiest := slices.MaxFunc(loads, func(a, b load) int { return cmp.Compare(a.busy(), b.busy()) })
	f := Figure{
		Section: SectionCPU,
		Name:    slug(w.Name, "cpu", fmt.Sprint(n)),
		Title:   fmt.Sprintf("CPU time per core, %s, %s", w.Name, pairs(n)),
		Caption: cpuCaption(widest, most, sources),
		Alt: fmt.Sprintf("Stacked CPU time of each core during %s at %s, for each variant. Busiest is %s: %s of %s in use, %s of them in softirq.",
			w.Name, pairs(n), busiest.variant, fixed(busiest.busy(), 1), plural(len(busiest.cores), "core"), fixed(busiest.sum(partSoftirq), 1)),
		Data:  cpuData(loads, len(loads)*shown, most),
		width: figureWidth,
	}
	const (
		axis, gap          = 34.0, 14.0
		title, plot, under = 14.0, 78.0, 30.0
		legend             = 24.0
	)
	columns := max(1, int((f.width-axis+gap)/(max(88, 4*float64(shown))+gap)))
	rows := (len(loads) + columns - 1) / columns
	columns = (len(loads) + rows - 1) / rows // no row with a single orphan
	panel := (f.width - axis - 4 - gap*float64(columns-1)) / float64(columns)
	f.height = legend + float64(rows)*(title+plot+under)
	f.draw = func(p *pen) {
		x := axis
		for part, name := range partNames() {
			p.rect(x, 2, 10, 10, partInks()[part])
			p.text(point{x + 14, 10.5}, name, normal, inkText, alignLeft)
			x += 14 + p.width(name, normal) + 18
		}
		for i, l := range loads {
			at := frame{left: axis + float64(i%columns)*(panel+gap), top: legend + float64(i/columns)*(title+plot+under) + title}
			at.right, at.bottom = at.left+panel, at.top+plot
			p.panel(l, l.bars(most), at, hosts, i%columns == 0)
		}
	}
	return f, true
}

func cpuCaption(widest, most int, sources map[string]bool) string {
	caption := "Mean over the trials; a bar is a core"
	if widest > most {
		caption = fmt.Sprintf("Mean over the trials; a bar is the mean of %d neighbouring cores, numbered by the first", (widest+most-1)/most)
	}
	switch {
	case sources[record.SoftirqEBPF] && len(sources) == 1:
		return caption + ". Softirq time is exact (eBPF)."
	case sources[record.SoftirqEBPF]:
		return caption + ". Softirq time is exact (eBPF) on some machines and counted in ticks on others."
	}
	return caption + ". Softirq time is counted in ticks, which miss part of it on idle cores."
}

// panel draws one variant's cores.
func (p *pen) panel(l load, bars []core, at frame, hosts []record.Host, axis bool) {
	busy := fixed(l.busy(), 1) + " busy"
	p.text(point{at.right, at.top - 5}, busy, small, inkMuted, alignRight)
	p.text(point{at.left, at.top - 5}, p.fit(l.variant, normal, at.right-at.left-p.width(busy, small)-4), normal, inkText, alignLeft)
	const between = 6.0 // hosts
	hostCount := 1
	for i := range bars {
		if i > 0 && bars[i].host != bars[i-1].host {
			hostCount++
		}
	}
	slot := (at.right - at.left - between*float64(hostCount-1)) / float64(len(bars))
	air := min(6, 0.16*slot)
	var stacks [parts][][4]float64
	x, from := at.left, at.left
	every := max(1, int(math.Ceil((p.width("000", small)+4)/slot)))
	nth := 0 // of its host
	for i, b := range bars {
		if i > 0 && b.host != bars[i-1].host {
			x += between
			from, nth = x, 0
		}
		y := at.bottom
		for part, share := range b.share {
			h := share * (at.bottom - at.top)
			if h > 0.05 {
				stacks[part] = append(stacks[part], [4]float64{x + air/2, y - h, slot - air, h})
			}
			y -= h
		}
		if nth%every == 0 {
			first, _, _ := strings.Cut(b.name, "–")
			p.text(point{x + slot/2, at.bottom + 10}, first, small, inkMuted, alignCentre)
		}
		nth++
		x += slot
		if hostCount > 1 && (i == len(bars)-1 || bars[i+1].host != b.host) {
			name := p.fit(list(hosts[b.host].Nodes), small, x-from)
			p.text(point{(from + x) / 2, at.bottom + 20}, name, small, inkMuted, alignCentre)
		}
	}
	for part, rects := range stacks {
		p.rects(rects, partInks()[part])
	}
	for _, v := range []float64{0, 0.5, 1} {
		y := at.bottom - v*(at.bottom-at.top)
		if v == 0 {
			p.line(0.8, inkMuted, nil, point{at.left, y}, point{at.right, y})
		}
		if axis {
			p.text(point{at.left - 5, y + 3}, fmt.Sprintf("%g %%", 100*v), small, inkMuted, alignRight)
		}
	}
}

// cpuData has a row a bar, or a row a panel where those would be too many to
// listen to.
func cpuData(loads []load, bars, most int) Data {
	const many = 80
	percentOf := func(share float64) string { return fixed(100*share, 0) + " %" }
	names := partNames()
	if bars <= many {
		d := Data{Columns: append([]string{"Variant", "Core"}, names[:]...)}
		for _, l := range loads {
			for _, c := range l.bars(most) {
				row := []string{l.variant, c.name}
				for _, s := range c.share {
					row = append(row, percentOf(s))
				}
				d.Rows = append(d.Rows, row)
			}
		}
		return d
	}
	d := Data{Columns: append([]string{"Variant", "Cores", "Busiest core"}, names[:]...)}
	for _, l := range loads {
		top := slices.MinFunc(l.cores, func(a, b core) int { return cmp.Compare(a.share[partIdle], b.share[partIdle]) })
		row := []string{l.variant, fmt.Sprint(len(l.cores)), top.name + " (" + percentOf(1-top.share[partIdle]) + ")"}
		for part := range names {
			row = append(row, percentOf(l.sum(part)/float64(len(l.cores))))
		}
		d.Rows = append(d.Rows, row)
	}
	return d
}
