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
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/words"
)

// More variants or cores than these could not be told apart on a page.
const (
	mostCoreVariants = 8
	mostCores        = 12
)

// coreParts returns the parts that the figure shows of each core, in the order of its panels.
func coreParts() []int { return []int{partSoftirq, partIdle} }

// coreShares are the shares of each core, with intervals.
type coreShares map[coreID][parts]draw.Share

// coreShares estimates the shares of every core of a cell. The unit is the block, or the period: its trials count as
// one value, their mean.
func (m *Model) coreShares(c cell, hosts *[]record.Host) coreShares {
	type sum struct {
		share [parts]float64
		n     float64
	}
	blocks := make(map[coreID]map[int]*sum)
	for block, h := range m.sampledHosts(c) {
		host := hostIndex(h, hosts)
		for _, cpu := range h.CPUs {
			id := coreID{host, cpu.ID}
			if blocks[id] == nil {
				blocks[id] = make(map[int]*sum)
			}
			if blocks[id][block] == nil {
				blocks[id][block] = new(sum)
			}
			s := blocks[id][block]
			s.n++
			for part, share := range shares(cpu, h.Seconds) {
				s.share[part] += share
			}
		}
	}
	all := make(coreShares)
	for id, of := range blocks {
		var one [parts]draw.Share
		for part := range one {
			var values []float64
			for _, s := range of {
				values = append(values, s.share[part]/s.n)
			}
			slices.Sort(values) // sums must not depend on the order of a map
			one[part] = meanShare(values)
		}
		all[id] = one
	}
	return all
}

// meanShare returns the mean of shares with its interval, limited to the range of a share.
func meanShare(shares []float64) draw.Share {
	mean, ci95 := stats.Mean(shares)
	ci := number.Of(ci95, len(shares))
	if ci.Known() {
		ci = number.Interval{Low: max(0, ci.Low), High: min(1, ci.High)}
	}
	return draw.Share{Mean: mean, CI: ci}
}

// coresChart has the data of a figure.
type coresChart struct {
	variants []string
	shares   []coreShares // by variant
	// published are the published shares of the variants' cores, by part.
	published []map[coreID][parts][]float64
	cores     []coreID
	hosts     []record.Host
}

// coresFigure shows the softirq time and the idle time of each core: the variants stand side by side, each with all of
// its cores and their intervals.
func (m *Model) coresFigure(w spec.Workload, n int) (Figure, bool) {
	var c coresChart
	for _, v := range m.exp.Spec.Variants {
		if shares := m.coreShares(cell{v.Name, w.Name, n, ""}, &c.hosts); len(shares) > 0 {
			c.variants, c.shares = append(c.variants, v.Name), append(c.shares, shares)
		}
	}
	if len(c.variants) < 2 || len(c.variants) > mostCoreVariants {
		return Figure{}, false
	}
	var sources []string
	for _, v := range c.variants {
		published, from := m.publishedCores(cell{v, w.Name, n, ""}, c.hosts)
		c.published, sources = append(c.published, published), append(sources, from...)
	}
	total := c.choose()
	caption := "Share of the window, mean over the blocks; bars are 95% intervals, each of one core and variant by itself."
	if len(c.cores) < total {
		caption += fmt.Sprintf(" These are the %d of %d cores with the most softirq time.", len(c.cores), total)
	}
	slices.Sort(sources)
	if sources = slices.Compact(sources); len(sources) > 0 {
		caption += fmt.Sprintf(" A ring is a published share of the core with that number in another machine: %s.", strings.Join(sources, "; "))
	}
	return Figure{
		Section: SectionCPU,
		Name:    slug(w.Name, "cores", fmt.Sprint(n)),
		Title:   fmt.Sprintf("Softirq and idle time by core, %s, %s", w.Name, pairs(n)),
		Caption: caption,
		Alt:     c.alt(w, n),
		Data:    c.data(),
		Picture: c.dots(m.variantStyle).Picture(),
	}, true
}

// publishedCores returns the published shares of a cell's cores, and their sources. Core i stands beside core i of the
// host that has the servers.
func (m *Model) publishedCores(c cell, hosts []record.Host) (all map[coreID][parts][]float64, sources []string) {
	all = make(map[coreID][parts][]float64)
	host := m.serverHost(c.variant, hosts)
	for _, p := range m.exp.Spec.Published {
		if p.Variant != c.variant || p.Workload != c.workload || p.Pairs != c.pairs || len(p.Cores) == 0 {
			continue
		}
		sources = append(sources, p.Source)
		part := map[string]int{spec.CoreSoftirq: partSoftirq, spec.CoreIdle: partIdle}[p.Metric]
		for cpu, percent := range p.Cores {
			id := coreID{host, cpu}
			shares := all[id]
			shares[part] = append(shares[part], percent/100)
			all[id] = shares
		}
	}
	return all, sources
}

// serverHost returns the index of the host that has a variant's first server.
func (m *Model) serverHost(variant string, hosts []record.Host) int {
	node := ""
	switch t := m.exp.Spec.Target; {
	case t.Kubernetes != nil && len(t.Kubernetes.NodeNames) > 1:
		node = t.Kubernetes.NodeNames[1]
	case t.Kubernetes != nil:
		node = t.Kubernetes.ServerNode
	case t.Hosts != nil:
		_, server := m.exp.HostsOf(m.variant(variant))
		node = t.Hosts[server].Name
	}
	// The nodes of a lab share one host, and imported results come from a single one.
	return max(0, slices.IndexFunc(hosts, func(h record.Host) bool { return slices.Contains(h.Nodes, node) }))
}

// choose selects the cores to show, and returns the number of all cores.
func (c *coresChart) choose() (total int) {
	most := make(map[coreID]float64) // largest softirq share of any variant
	for _, shares := range c.shares {
		for id, s := range shares {
			most[id] = max(most[id], s[partSoftirq].Mean)
		}
	}
	for _, published := range c.published {
		for id := range published {
			most[id] = max(most[id], 0)
		}
	}
	c.cores = slices.SortedFunc(maps.Keys(most), func(a, b coreID) int {
		return cmp.Or(cmp.Compare(most[b], most[a]), a.compare(b))
	})
	total = len(c.cores)
	c.cores = c.cores[:min(total, mostCores)]
	slices.SortFunc(c.cores, coreID.compare)
	return total
}

// name returns the name of a core, with its host's nodes if there are several hosts.
func (c *coresChart) name(id coreID) string {
	if len(c.hosts) < 2 {
		return fmt.Sprint(id.cpu)
	}
	return fmt.Sprintf("%s, %d", words.And(c.hosts[id.host].Nodes), id.cpu)
}

// order lists the cores in the order of their marks: "cores 0 to 3, from left to right in each variant".
func (c *coresChart) order() string {
	var texts []string
	for host, h := range c.hosts {
		var of []int
		for _, id := range c.cores {
			if id.host == host {
				of = append(of, id.cpu)
			}
		}
		if len(of) == 0 {
			continue
		}
		text := numbers(of)
		if len(c.hosts) > 1 {
			text += " of " + words.And(h.Nodes)
		}
		texts = append(texts, text)
	}
	return fmt.Sprintf("cores %s, from left to right in each variant", words.And(texts))
}

// numbers lists rising numbers: "0 to 3" without a gap, "0, 2 and 3" with one.
func numbers(of []int) string {
	first, last := of[0], of[len(of)-1]
	if n := len(of); n > 1 && last-first == n-1 {
		return fmt.Sprintf("%d to %d", first, last)
	}
	var texts []string
	for _, n := range of {
		texts = append(texts, fmt.Sprint(n))
	}
	return words.And(texts)
}

func (c *coresChart) alt(w spec.Workload, n int) string {
	var variant string
	var at coreID
	highest := -1.0
	for i, shares := range c.shares {
		for _, id := range c.cores {
			if s, ok := shares[id]; ok && s[partSoftirq].Mean > highest {
				variant, at, highest = c.variants[i], id, s[partSoftirq].Mean
			}
		}
	}
	return fmt.Sprintf("Softirq and idle time of each core during %s at %s, with intervals, the variants side by side. Most softirq time has core %s of %s: %s.",
		w.Name, pairs(n), c.name(at), variant, number.Share(highest))
}

func (c *coresChart) data() Data {
	d := Data{Columns: []string{"Variant", "Core"}}
	for _, part := range coreParts() {
		d.Columns = append(d.Columns, partNames()[part]+", %")
	}
	for i, variant := range c.variants {
		for _, id := range c.cores {
			s, measured := c.shares[i][id]
			published := c.published[i][id]
			row := []string{variant, c.name(id)}
			for _, part := range coreParts() {
				var texts []string
				if measured {
					texts = append(texts, number.Format(100*s[part].Mean, s[part].CI.Scale(100), 1).String())
				}
				for _, share := range published[part] {
					texts = append(texts, "published "+number.Fixed(100*share, 1))
				}
				row = append(row, cmp.Or(strings.Join(texts, ", "), "–"))
			}
			if measured || len(published[partSoftirq])+len(published[partIdle]) > 0 {
				d.Rows = append(d.Rows, row)
			}
		}
	}
	return d
}

// dots describes the picture: a panel for each part.
func (c *coresChart) dots(style func(variant string) draw.Style) draw.Shares {
	d := draw.Shares{XTitle: c.order()}
	for _, id := range c.cores {
		d.Items = append(d.Items, fmt.Sprint(id.cpu))
	}
	for _, part := range coreParts() {
		d.Panels = append(d.Panels, partNames()[part])
	}
	for i, variant := range c.variants {
		group := draw.ShareGroup{Name: variant, Ink: style(variant).Ink}
		for _, part := range coreParts() {
			dots := make([]draw.Share, len(c.cores))
			for n, id := range c.cores {
				dots[n].Mean = math.NaN()
				if s, ok := c.shares[i][id]; ok {
					dots[n] = s[part]
				}
				dots[n].Rings = c.published[i][id][part]
			}
			group.Values = append(group.Values, dots)
		}
		d.Groups = append(d.Groups, group)
	}
	return d
}
