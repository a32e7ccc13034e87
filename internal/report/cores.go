package report

import (
	"cmp"
	"fmt"
	"slices"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
)

// More variants or cores than these could not be told apart on a page.
const (
	mostCoreVariants = 8
	mostCores        = 16
)

// coreID is a core of one of the hosts of a figure.
type coreID struct{ host, cpu int }

// shareSpread is the mean of a share over the blocks of a cell, with its interval.
type shareSpread struct {
	mean float64
	ci   interval
}

// coreParts returns the parts that the figure shows of each core, in the order of its panels.
func coreParts() []int { return []int{partSoftirq, partIdle} }

// cores estimates the shares of every core of a cell. The unit is the block, or the period: the trials of one
// count as their mean.
func (m *Model) cores(c cell, hosts *[]record.Host) map[coreID][parts]shareSpread {
	type sums struct {
		share [parts]float64
		n     float64
	}
	blocks := make(map[coreID]map[int]*sums)
	for _, t := range m.trials {
		if !c.holds(t) {
			continue
		}
		for _, h := range t.Hosts {
			if h.Seconds <= 0 {
				continue
			}
			host := numbered(h, hosts)
			for _, cpu := range h.CPUs {
				id := coreID{host, cpu.ID}
				if blocks[id] == nil {
					blocks[id] = make(map[int]*sums)
				}
				if blocks[id][t.Block] == nil {
					blocks[id][t.Block] = new(sums)
				}
				s := blocks[id][t.Block]
				s.n++
				for part, share := range shares(cpu, h.Seconds) {
					s.share[part] += share
				}
			}
		}
	}
	all := make(map[coreID][parts]shareSpread)
	for id, of := range blocks {
		var one [parts]shareSpread
		for part := range one {
			var values []float64
			for _, s := range of {
				values = append(values, s.share[part]/s.n)
			}
			slices.Sort(values) // sums must not depend on the order of a map
			one[part] = spread95(values)
		}
		all[id] = one
	}
	return all
}

// spread95 returns the mean of shares with its interval, limited to the range of a share.
func spread95(shares []float64) shareSpread {
	mean, ci := stats.Mean(shares)
	bounds := of(ci, len(shares))
	if bounds.known() {
		bounds = interval{max(0, bounds.lo), min(1, bounds.hi)}
	}
	return shareSpread{mean, bounds}
}

// numbered returns the index of a host in hosts. It adds a host that is new.
func numbered(h record.Host, hosts *[]record.Host) int {
	i := slices.IndexFunc(*hosts, func(o record.Host) bool { return o.Boot == h.Boot })
	if i < 0 {
		i = len(*hosts)
		*hosts = append(*hosts, h)
	}
	return i
}

// coreGroups has the data of a figure.
type coreGroups struct {
	variants []string
	of       []map[coreID][parts]shareSpread // by variant
	ids      []coreID
	hosts    []record.Host
}

// coresFigure shows the softirq time and the idle time of each core, grouped by core: the variants stand side
// by side, with their intervals.
func (m *Model) coresFigure(w spec.Workload, n int) (Figure, bool) {
	var g coreGroups
	for _, v := range m.exp.Spec.Variants {
		if cores := m.cores(cell{v.Name, w.Name, n, ""}, &g.hosts); len(cores) > 0 {
			g.variants, g.of = append(g.variants, v.Name), append(g.of, cores)
		}
	}
	if len(g.variants) < 2 || len(g.variants) > mostCoreVariants {
		return Figure{}, false
	}
	total := g.choose()
	f := Figure{
		Section: SectionCPU,
		Name:    slug(w.Name, "cores", fmt.Sprint(n)),
		Title:   fmt.Sprintf("Softirq and idle time by core, %s, %s", w.Name, pairs(n)),
		Caption: "Share of the window, mean over the blocks; bars are 95 % intervals, each of one core and variant by itself.",
		Alt:     g.alt(w, n),
		Data:    g.data(),
		width:   figureWidth,
	}
	if len(g.ids) < total {
		f.Caption += fmt.Sprintf(" These are the %d of %d cores with the most softirq time.", len(g.ids), total)
	}
	const legend, plot, under = 14.0, 92.0, 30.0
	lines := (len(g.variants) + 3) / 4
	f.height = legend*float64(lines) + 2*(plot+under)
	f.draw = func(p *pen) {
		for i, name := range g.variants {
			x, y := 34+float64(i%4)*83, 7+legend*float64(i/4)
			p.rect(x, y-4, 8, 8, m.look(name).ink)
			p.text(point{x + 12, y + 3.5}, p.fit(name, normal, 70), normal, inkText, alignLeft)
		}
		for i, part := range coreParts() {
			top := legend*float64(lines) + float64(i)*(plot+under) + 12
			p.cores(g, part, frame{left: 34, right: f.width - 4, top: top, bottom: top + plot - 12}, m.look)
		}
	}
	return f, true
}

// choose selects the cores to show, and returns how many there are.
func (g *coreGroups) choose() (total int) {
	most := make(map[coreID]float64) // largest softirq share of any variant
	for _, cores := range g.of {
		for id, s := range cores {
			most[id] = max(most[id], s[partSoftirq].mean)
		}
	}
	for id := range most {
		g.ids = append(g.ids, id)
	}
	byNumber := func(a, b coreID) int { return cmp.Or(a.host-b.host, a.cpu-b.cpu) }
	slices.SortFunc(g.ids, func(a, b coreID) int { return cmp.Or(cmp.Compare(most[b], most[a]), byNumber(a, b)) })
	total = len(g.ids)
	g.ids = g.ids[:min(total, mostCores)]
	slices.SortFunc(g.ids, byNumber)
	return total
}

// name returns the name of a core, with its host's nodes if there are several hosts.
func (g *coreGroups) name(id coreID) string {
	if len(g.hosts) < 2 {
		return fmt.Sprint(id.cpu)
	}
	return fmt.Sprintf("%s, %d", list(g.hosts[id.host].Nodes), id.cpu)
}

func (g *coreGroups) alt(w spec.Workload, n int) string {
	var variant string
	var at coreID
	highest := -1.0
	for i, cores := range g.of {
		for _, id := range g.ids {
			if s, ok := cores[id]; ok && s[partSoftirq].mean > highest {
				variant, at, highest = g.variants[i], id, s[partSoftirq].mean
			}
		}
	}
	return fmt.Sprintf("Softirq and idle time of each core during %s at %s, with intervals, the variants side by side. Most softirq time has core %s of %s: %s %%.",
		w.Name, pairs(n), g.name(at), variant, fixed(100*highest, 0))
}

func (g *coreGroups) data() Data {
	names := partNames()
	percent := func(share float64) float64 { return 100 * share }
	d := Data{Columns: []string{"Core", "Variant"}}
	for _, part := range coreParts() {
		d.Columns = append(d.Columns, names[part]+", %")
	}
	for _, id := range g.ids {
		for i, variant := range g.variants {
			s, ok := g.of[i][id]
			if !ok {
				continue
			}
			row := []string{g.name(id), variant}
			for _, part := range coreParts() {
				row = append(row, estimate(100*s[part].mean, s[part].ci.mapped(percent), 1).String())
			}
			d.Rows = append(d.Rows, row)
		}
	}
	return d
}

// cores draws a panel: a group for each core, and in it a dash at the mean of each variant, with its interval.
func (p *pen) cores(g coreGroups, part int, area frame, look func(string) look) {
	names := partNames()
	p.text(point{area.left, area.top - 4}, names[part], normal, inkText, alignLeft)
	y := func(share float64) float64 { return area.bottom - share*(area.bottom-area.top) }
	for _, v := range []float64{0, 0.5, 1} {
		p.line(0.5, inkMuted, nil, point{area.left, y(v)}, point{area.right, y(v)})
		p.text(point{area.left - 5, y(v) + 3}, fmt.Sprintf("%g %%", 100*v), small, inkMuted, alignRight)
	}
	group := (area.right - area.left) / float64(len(g.ids))
	slot := group * 0.84 / float64(len(g.variants))
	left := func(core int) float64 { return area.left + (float64(core)+0.08)*group }
	for i, id := range g.ids {
		p.text(point{left(i) + group*0.42, area.bottom + 11}, p.fit(g.name(id), small, group), small, inkMuted, alignCentre)
	}
	for v, name := range g.variants {
		var marks [][4]float64 // in one path, because a page has thousands
		for i, id := range g.ids {
			s, ok := g.of[v][id]
			if !ok {
				continue
			}
			x := left(i) + float64(v)*slot
			marks = append(marks, [4]float64{x + 0.1*slot, y(s[part].mean) - 0.8, 0.8 * slot, 1.6})
			if ci := s[part].ci; ci.known() {
				marks = append(marks, [4]float64{x + 0.5*slot - 0.4, y(ci.hi), 0.8, y(ci.lo) - y(ci.hi)})
			}
		}
		p.rects(marks, look(name).ink)
	}
	p.text(point{(area.left + area.right) / 2, area.bottom + 21}, "core", small, inkMuted, alignCentre)
}
