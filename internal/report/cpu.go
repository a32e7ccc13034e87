package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
)

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

// core has the mean share of each part over a cell's trials. As a bar it can stand for several neighbouring
// cores.
type core struct {
	name       string
	host       int
	share      [parts]float64
	interrupts float64 // 1/s
}

// load has the cores of one cell.
type load struct {
	variant string
	cores   []core
}

// sum adds up the shares of a part over the cores. It is the number of cores that the part fills.
func (l load) sum(part int) float64 {
	s := 0.0
	for _, c := range l.cores {
		s += c.share[part]
	}
	return s
}

func (l load) busy() float64 { return float64(len(l.cores)) - l.sum(partIdle) }

// load averages over the trials of a cell. It numbers the hosts as in hosts, and adds new ones.
func (m *Model) load(c cell, hosts *[]record.Host, sources map[string]bool) load {
	type key struct{ host, cpu int }
	sums := map[key]*core{}
	counts := map[key]int{}
	for _, t := range m.trials {
		if !c.holds(t) {
			continue
		}
		for _, h := range t.Hosts {
			if h.Seconds <= 0 {
				continue
			}
			sources[h.Source] = true
			host := numbered(h, hosts)
			for _, cpu := range h.CPUs {
				k := key{host, cpu.ID}
				if sums[k] == nil {
					sums[k] = &core{name: fmt.Sprint(cpu.ID), host: host}
				}
				counts[k]++
				sums[k].interrupts += float64(cpu.Interrupts) / h.Seconds
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
		one.interrupts /= float64(counts[k])
		l.cores = append(l.cores, one)
	}
	return l
}

// shares returns the shares of the parts in the window. Busy is everything but idle, so the time that is
// neither softirq, irq nor stolen belongs to processes, including their time in the kernel.
func shares(c record.CPU, seconds float64) [parts]float64 {
	s := [parts]float64{
		partSoftirq: c.Softirq / seconds,
		partIRQ:     c.IRQ / seconds,
		partSteal:   c.Steal / seconds,
	}
	taken := s[partSoftirq] + s[partIRQ] + s[partSteal]
	s[partProcess] = max(0, c.Busy/seconds-taken)
	taken += s[partProcess]
	// Two clocks can differ by a tick, but a core is never more than full.
	if taken > 1 {
		for i := range s {
			s[i] /= taken
		}
	}
	s[partIdle] = max(0, 1-taken)
	return s
}

// bars joins neighbouring cores of one host, so that at most most remain.
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
			bar.interrupts += l.cores[j].interrupts
		}
		for part := range bar.share {
			bar.share[part] /= float64(j - i)
		}
		bar.interrupts /= float64(j - i)
		bar.host, bar.name = l.cores[i].host, l.cores[i].name
		if j-i > 1 {
			bar.name += "–" + l.cores[j-1].name
		}
		out = append(out, bar)
		i = j
	}
	return out
}

// cpuFigure has a panel for each variant and a bar for each core, at one number of pairs.
func (m *Model) cpuFigure(w spec.Workload, n int) (Figure, bool) {
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
	// A page has room for this many bars, whatever the machine.
	const bars = 700
	most := min(64, max(16, bars/len(loads)))
	shown := min(widest, most)
	busiest := slices.MaxFunc(loads, func(a, b load) int { return cmp.Compare(a.busy(), b.busy()) })
	f := Figure{
		Section: SectionCPU,
		Name:    slug(w.Name, "cpu", fmt.Sprint(n)),
		Title:   fmt.Sprintf("CPU time per core, %s, %s", w.Name, pairs(n)),
		Caption: cpuCaption(widest, most, sources) + m.sleepCaption(w, n),
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
	columns = (len(loads) + rows - 1) / rows // no row with a single panel
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

// Sleeps per read or write of a stream. An end that sleeps mostly waits for the other end; one that sleeps
// rarely is busy. If one end does the first and the other the second, the busy end is the limit.
const mostly, rarely = 0.5, 0.1

// sleepCaption says how often each end of a stream slept, and which end was the limit. It is empty for other
// workloads, and if no program counted sleeps.
func (m *Model) sleepCaption(w spec.Workload, n int) string {
	if w.Stream == nil {
		return ""
	}
	var parts []string
	for _, v := range m.exp.Spec.Variants {
		var reads, writes, receiver, sender float64
		for _, t := range m.trials {
			if !(cell{v.Name, w.Name, n, ""}).holds(t) {
				continue
			}
			for _, p := range t.PerPair {
				receiver, reads = receiver+float64(p.Server.Sleeps), reads+float64(p.Server.Messages)
				sender, writes = sender+float64(p.Client.Sleeps), writes+float64(p.Client.Messages)
			}
		}
		if receiver+sender == 0 || reads == 0 || writes == 0 {
			continue
		}
		part := fmt.Sprintf("%s %s and %s", v.Name, fixed(receiver/reads, 2), fixed(sender/writes, 2))
		switch receiver, sender := receiver/reads, sender/writes; {
		case receiver >= mostly && sender < rarely:
			part += " (the sender was the limit)"
		case sender >= mostly && receiver < rarely:
			part += " (the receiver was the limit)"
		}
		parts = append(parts, part)
	}
	if len(parts) == 0 {
		return ""
	}
	return " Sleeps per read of the receiver and per write of the sender: " + strings.Join(parts, "; ") + "."
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
	nth := 0 // number of the bar on its host
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

// cpuData has a row for each bar, or for each panel if there are too many bars to listen to.
func cpuData(loads []load, bars, most int) Data {
	const many = 80
	percentOf := func(share float64) string { return fixed(100*share, 0) + " %" }
	names := partNames()
	if bars <= many {
		d := Data{Columns: append(append([]string{"Variant", "Core"}, names[:]...), "Interrupts/s")}
		for _, l := range loads {
			for _, c := range l.bars(most) {
				row := []string{l.variant, c.name}
				for _, s := range c.share {
					row = append(row, percentOf(s))
				}
				d.Rows = append(d.Rows, append(row, perSecond(c.interrupts)))
			}
		}
		return d
	}
	d := Data{Columns: append(append([]string{"Variant", "Cores", "Busiest core"}, names[:]...), "Interrupts/s of a core")}
	for _, l := range loads {
		top := slices.MinFunc(l.cores, func(a, b core) int { return cmp.Compare(a.share[partIdle], b.share[partIdle]) })
		row := []string{l.variant, fmt.Sprint(len(l.cores)), top.name + " (" + percentOf(1-top.share[partIdle]) + ")"}
		for part := range names {
			row = append(row, percentOf(l.sum(part)/float64(len(l.cores))))
		}
		interrupts := 0.0
		for _, c := range l.cores {
			interrupts += c.interrupts / float64(len(l.cores))
		}
		d.Rows = append(d.Rows, append(row, perSecond(interrupts)))
	}
	return d
}

// perSecond formats a rate of interrupts. Older results do not have it.
func perSecond(rate float64) string {
	if rate == 0 {
		return "–"
	}
	return fixed(rate, 0)
}
