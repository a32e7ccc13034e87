package report

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report/draw"
	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/words"
)

// core has the mean share of each part over a cell's trials. A bar can average several neighbouring cores.
type core struct {
	name       string
	host       int
	share      [parts]float64
	interrupts float64 // 1/s
}

// mean replaces sums over n values by their mean.
func (c *core) mean(n float64) {
	for part := range c.share {
		c.share[part] /= n
	}
	c.interrupts /= n
}

// cpuLoad has the cores of one cell.
type cpuLoad struct {
	variant string
	cores   []core
}

// sum returns the sum of a part's shares: the number of cores that the part keeps busy.
func (l cpuLoad) sum(part int) float64 {
	s := 0.0
	for _, c := range l.cores {
		s += c.share[part]
	}
	return s
}

func (l cpuLoad) busy() float64 { return float64(len(l.cores)) - l.sum(partIdle) }

// cpuLoad averages over the trials of a cell. It numbers the hosts as in hosts, and adds new ones.
func (m *Model) cpuLoad(c cell, hosts *[]record.Host, sources map[string]bool) cpuLoad {
	sums := map[coreID]*core{}
	counts := map[coreID]int{}
	for _, h := range m.sampledHosts(c) {
		sources[h.Source] = true
		host := hostIndex(h, hosts)
		for _, cpu := range h.CPUs {
			id := coreID{host, cpu.ID}
			if sums[id] == nil {
				sums[id] = &core{name: fmt.Sprint(cpu.ID), host: host}
			}
			counts[id]++
			sums[id].interrupts += float64(cpu.Interrupts) / h.Seconds
			for part, share := range shares(cpu, h.Seconds) {
				sums[id].share[part] += share
			}
		}
	}
	l := cpuLoad{variant: c.variant}
	for _, id := range slices.SortedFunc(maps.Keys(sums), coreID.compare) {
		one := *sums[id]
		one.mean(float64(counts[id]))
		l.cores = append(l.cores, one)
	}
	return l
}

// bars joins neighbouring cores of one host, so that at most most remain.
func (l cpuLoad) bars(most int) []core {
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
		bar.mean(float64(j - i))
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
	var loads []cpuLoad
	widest := 0
	for _, v := range m.exp.Spec.Variants {
		if l := m.cpuLoad(cell{v.Name, w.Name, n, ""}, &hosts, sources); len(l.cores) > 0 {
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
	busiest := slices.MaxFunc(loads, func(a, b cpuLoad) int { return cmp.Compare(a.busy(), b.busy()) })
	return Figure{
		Section: SectionCPU,
		Name:    slug(w.Name, "cpu", fmt.Sprint(n)),
		Title:   fmt.Sprintf("CPU time per core, %s, %s", w.Name, pairs(n)),
		Caption: cpuCaption(widest, most, sources) + m.sleepCaption(w, n),
		Alt: fmt.Sprintf("Stacked CPU time of each core during %s at %s, for each variant. Busiest is %s: %s of %s in use, %s of them in softirq.",
			w.Name, pairs(n), busiest.variant, number.Fixed(busiest.busy(), 1), words.Count(len(busiest.cores), "core"), number.Fixed(busiest.sum(partSoftirq), 1)),
		Data:    cpuData(loads, len(loads)*shown, most),
		Picture: cpuStacks(loads, hosts, most, shown).Picture(),
	}, true
}

// cpuStacks describes the picture: a panel for each load.
func cpuStacks(loads []cpuLoad, hosts []record.Host, most, shown int) draw.Stacks {
	s := draw.Stacks{MostBars: shown}
	for part, name := range partNames() {
		s.Parts = append(s.Parts, draw.Part{Name: name, Ink: partInks()[part]})
	}
	for _, h := range hosts {
		s.Groups = append(s.Groups, words.And(h.Nodes))
	}
	for _, l := range loads {
		panel := draw.StacksPanel{Title: l.variant, Note: number.Fixed(l.busy(), 1) + " busy"}
		for _, c := range l.bars(most) {
			panel.Bars = append(panel.Bars, draw.Stack{Name: c.name, Group: c.host, Shares: c.share[:]})
		}
		s.Panels = append(s.Panels, panel)
	}
	return s
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

// sleepCaption says how often each end of a stream slept, and which end was the limit. It is empty for other
// workloads, and if no program counted sleeps.
func (m *Model) sleepCaption(w spec.Workload, n int) string {
	if w.Stream == nil {
		return ""
	}
	var parts []string
	for _, v := range m.exp.Spec.Variants {
		if text := m.sleeps(cell{v.Name, w.Name, n, ""}); text != "" {
			parts = append(parts, text)
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return " Sleeps per read of the receiver and per write of the sender: " + strings.Join(parts, "; ") + "."
}

// sleeps returns the sleeps of one cell, or "" if none were counted.
func (m *Model) sleeps(c cell) string {
	// Sleeps per read or write of a stream. An end that sleeps mostly waits for the other end; one that sleeps
	// rarely is busy. If one end does the first and the other the second, the busy end is the limit.
	const mostly, rarely = 0.5, 0.1
	var reads, writes, receiver, sender float64
	for _, t := range m.trials {
		if !c.holds(t) {
			continue
		}
		for _, p := range t.PerPair {
			receiver, reads = receiver+float64(p.Server.Sleeps), reads+float64(p.Server.Messages)
			sender, writes = sender+float64(p.Client.Sleeps), writes+float64(p.Client.Messages)
		}
	}
	if receiver+sender == 0 || reads == 0 || writes == 0 {
		return ""
	}
	receiver, sender = receiver/reads, sender/writes
	text := fmt.Sprintf("%s %s and %s", c.variant, number.Fixed(receiver, 2), number.Fixed(sender, 2))
	switch {
	case receiver >= mostly && sender < rarely:
		text += " (the sender was the limit)"
	case sender >= mostly && receiver < rarely:
		text += " (the receiver was the limit)"
	}
	return text
}

// cpuData has a row for each bar or, if those would be too many for a screen reader, for each panel.
func cpuData(loads []cpuLoad, bars, most int) Data {
	const many = 80
	names := partNames()
	if bars > many {
		d := Data{Columns: append(append([]string{"Variant", "Cores", "Busiest core"}, names[:]...), "Interrupts/s of a core")}
		for _, l := range loads {
			d.Rows = append(d.Rows, l.row())
		}
		return d
	}
	d := Data{Columns: append(append([]string{"Variant", "Core"}, names[:]...), "Interrupts/s")}
	for _, l := range loads {
		for _, c := range l.bars(most) {
			row := []string{l.variant, c.name}
			for _, s := range c.share {
				row = append(row, number.Share(s))
			}
			d.Rows = append(d.Rows, append(row, perSecond(c.interrupts)))
		}
	}
	return d
}

// row returns the means over all cores, and the busiest core.
func (l cpuLoad) row() []string {
	top := slices.MinFunc(l.cores, func(a, b core) int { return cmp.Compare(a.share[partIdle], b.share[partIdle]) })
	row := []string{l.variant, fmt.Sprint(len(l.cores)), top.name + " (" + number.Share(1-top.share[partIdle]) + ")"}
	for part := range parts {
		row = append(row, number.Share(l.sum(part)/float64(len(l.cores))))
	}
	interrupts := 0.0
	for _, c := range l.cores {
		interrupts += c.interrupts / float64(len(l.cores))
	}
	return append(row, perSecond(interrupts))
}

// perSecond formats a rate of interrupts. Older results do not have it.
func perSecond(rate float64) string {
	if rate == 0 {
		return "–"
	}
	return number.Fixed(rate, 0)
}
