package report

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/stats"
)

// Mesh shows the links of one variant and workload as a matrix: a row for each client, a column for each server.
type Mesh struct {
	ID, Title, Unit, Better string
	Nodes                   []string
	Rows                    []MeshRow
	// Said are sentences about the outliers, or one that there are none.
	Said []string
	// Secondary: the matrix shows another metric than the workload's primary one.
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
	// Tip has the interval and the number of blocks.
	Tip string
	// Shade is 0 for a link as good as the median one, up to 4 for one that is far worse.
	Shade int
	// Named: the link is an outlier, or one of its nodes is.
	Named bool
}

func (m *Model) meshes() []Mesh {
	var all []Mesh
	for _, s := range m.summary.Meshes {
		q := quantityOf(s.Metric)
		t := Mesh{
			ID: slug("mesh", s.Variant, s.Workload, s.Metric), Title: fmt.Sprintf("%s of %s, %s", q.name, s.Workload, s.Variant),
			Secondary: s.Secondary(), Unit: q.unit, Better: string(metrics.Get(s.Metric).Better), Nodes: s.Nodes, Said: m.meshSentences(s),
		}
		middle := medianLink(s.Links)
		for _, client := range s.Nodes {
			row := MeshRow{Client: client}
			for _, server := range s.Nodes {
				row.Cells = append(row.Cells, meshCell(s, q, client, server, middle))
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

func meshCell(s stats.Mesh, q quantity, client, server string, middle float64) MeshCell {
	i := slices.IndexFunc(s.Links, func(l stats.MeshLink) bool { return l.Client == client && l.Server == server })
	if i < 0 {
		return MeshCell{}
	}
	l := s.Links[i]
	c := MeshCell{Named: slices.ContainsFunc(s.Outliers, func(o stats.Outlier) bool {
		return (o.Client == "" || o.Client == client) && (o.Server == "" || o.Server == server)
	})}
	if l.Failed > l.N {
		c.Value, c.Percent, c.Shade, c.Tip = "failed", "failed", shades, fmt.Sprintf("%s → %s failed in %s", client, server, ofBlocks(l.Failed, l.N))
		return c
	}
	mean := l.Mean * q.scale
	c.Value = significant(mean)
	c.Tip = fmt.Sprintf("%s → %s: %s, n %d", client, server,
		estimate(mean, of(l.CI95, l.N).mapped(func(x float64) float64 { return x * q.scale }), decimalsFor(mean)).with(q.unit), l.N)
	if middle > 0 { // not if nothing is retransmitted
		c.Percent = fixed(100*l.Mean/middle, 0)
		c.Tip += ", " + c.Percent + " % of the median link"
	}
	if l.Failed > 0 {
		c.Tip += fmt.Sprintf("; it failed in %s", plural(l.Failed, "block"))
	}
	worse := middle / l.Mean
	switch {
	case s.Metric == metrics.RetransmitShare:
		worse = (l.Mean + stats.RetransmitFloor) / (middle + stats.RetransmitFloor)
	case !metrics.Get(s.Metric).HigherIsBetter():
		worse = 1 / worse
	}
	// A step is a factor of 1.1, so the fourth begins at about 1.5 times worse.
	c.Shade = min(max(int(math.Log(worse)/math.Log(1.1)), 0), shades)
	return c
}

// shades is the number of shades for cells that are worse than the median one.
const shades = 4

// meshSentences name the nodes and links that are worse than the others, with one sentence for each.
func (m *Model) meshSentences(s stats.Mesh) []string {
	in := ""
	if len(m.exp.Spec.Variants)*len(m.exp.Spec.Workloads) > 1 {
		in = fmt.Sprintf(" (%s, %s)", s.Variant, s.Workload)
	}
	var out []string
	told := make(map[string]bool)
	for i, o := range s.Outliers {
		node := o.Client + o.Server
		if s.Metric == metrics.RetransmitShare {
			if !m.namedBefore(s, o) {
				out = append(out, retransmitSentence(o)+in+".")
			}
			continue
		}
		if o.Kind == stats.OutlierLink {
			out = append(out, m.linkSentence(s, o)+in+".")
			continue
		}
		if told[node] {
			continue
		}
		told[node] = true
		says := []string{nodeSays(s, o)}
		signs := o.Signs
		for _, other := range s.Outliers[i+1:] {
			if other.Kind != stats.OutlierLink && other.Client+other.Server == node {
				says = append(says, nodeSays(s, other))
				signs = append(slices.Clone(signs), other.Signs...)
			}
		}
		text := node + " " + list(says) + " of the others"
		if o.Failed > 0 {
			text = fmt.Sprintf("%s failed in %s: %s", node, ofBlocks(o.Failed, o.N), m.whyFailed(node, ""))
		}
		for _, about := range append(signTexts(signs), m.oddNICs(node)...) {
			text += "; " + about
		}
		out = append(out, text+in+".")
	}
	if some := someFailed(s); some != "" {
		out = append(out, some+in+".")
	}
	switch {
	case len(out) > 0 || s.Secondary(): // nobody asked about it
	case s.Untested != "":
		out = []string{fmt.Sprintf("The mesh of %s was not tested for outliers%s: %s.", plural(len(s.Nodes), "node"), in, s.Untested)}
	default:
		out = []string{fmt.Sprintf("None of %s and %s is worse than the others by %.0f %% or more%s.",
			plural(len(s.Nodes), "node"), plural(len(s.Links), "link"), 100*m.exp.Spec.Mesh.Margin, in)}
	}
	return out
}

// namedBefore reports whether the mesh of the primary metric already names an outlier, with its retransmissions as a
// sign.
func (m *Model) namedBefore(s stats.Mesh, o stats.Outlier) bool {
	return slices.ContainsFunc(m.summary.Meshes, func(primary stats.Mesh) bool {
		return primary.Variant == s.Variant && primary.Workload == s.Workload && !primary.Secondary() &&
			slices.ContainsFunc(primary.Outliers, func(p stats.Outlier) bool {
				return p.Kind == o.Kind && p.Client == o.Client && p.Server == o.Server
			})
	})
}

// retransmitSentence returns "TCP retransmits 9.5 % of the segments from node1 to node2, elsewhere 0.2 %".
func retransmitSentence(o stats.Outlier) string {
	where := ""
	if o.Client != "" {
		where += " from " + o.Client
	}
	if o.Server != "" {
		where += " to " + o.Server
	}
	text := "TCP retransmits more of the segments" + where + " than elsewhere"
	for _, s := range o.Signs {
		if s.Kind == stats.SignRetransmits {
			text = fmt.Sprintf("TCP retransmits %s %% of the segments%s, elsewhere %s %%", significant(100*s.Value), where, significant(100*s.Others))
			continue
		}
		text += "; " + signTexts([]stats.Sign{s})[0]
	}
	return text
}

// ofBlocks returns "5 of 6 blocks", or "every block" if none was good.
func ofBlocks(failed, good int) string {
	if good == 0 {
		return "every block"
	}
	return fmt.Sprintf("%d of %d blocks", failed, failed+good)
}

// someFailed describes the links that failed in some blocks. Links that failed in most blocks are outliers, with
// sentences of their own.
func someFailed(s stats.Mesh) string {
	var links []string
	for _, l := range s.Links {
		if 0 < l.Failed && l.Failed <= l.N {
			links = append(links, fmt.Sprintf("%s → %s failed in %s", l.Client, l.Server, ofBlocks(l.Failed, l.N)))
		}
	}
	switch {
	case len(links) == 0 || s.Secondary(): // the mesh of the primary metric says it
		return ""
	case len(links) == 1:
		return links[0]
	}
	return fmt.Sprintf("%s failed in some blocks; %s", plural(len(links), "link"), links[0])
}

// nodeSays describes a node: "receives at 0.62 (0.55–0.70)".
func nodeSays(s stats.Mesh, o stats.Outlier) string {
	ratio := estimate(o.Ratio, of(o.CI95, o.N), 2).String()
	client := o.Kind == stats.OutlierClient
	switch {
	case s.Metric == metrics.Throughput && client:
		return "sends at " + ratio
	case s.Metric == metrics.Throughput:
		return "receives at " + ratio
	case s.Metric == metrics.ServerCPUPerGB && !client:
		return "receives with " + ratio + " times the CPU time per GB"
	case s.Metric == metrics.ServerCPUPerGB:
		return "makes its servers take " + ratio + " times the CPU time per GB"
	case client:
		return fmt.Sprintf("as a client has %s times the %s", ratio, quantityOf(s.Metric).name)
	}
	return fmt.Sprintf("as a server has %s times the %s", ratio, quantityOf(s.Metric).name)
}

func (m *Model) linkSentence(s stats.Mesh, o stats.Outlier) string {
	if o.Failed > 0 {
		return fmt.Sprintf("%s → %s failed in %s: %s", o.Client, o.Server, ofBlocks(o.Failed, o.N), m.whyFailed(o.Client, o.Server))
	}
	times := "of"
	if !metrics.Get(s.Metric).HigherIsBetter() {
		times = "times"
	}
	text := fmt.Sprintf("%s → %s has %s %s the %s that the two have with others", o.Client, o.Server,
		estimate(o.Ratio, of(o.CI95, o.N), 2), times, quantityOf(s.Metric).name)
	for _, about := range signTexts(o.Signs) {
		text += "; " + about
	}
	return text
}

// whyFailed returns the first error of a node's pairs, or of its link to a server.
func (m *Model) whyFailed(node, server string) string {
	at := func(place, name string) bool { return place == name || strings.HasPrefix(place, name+"/") }
	for _, t := range m.trials {
		for _, p := range t.PerPair {
			if p.Error == "" {
				continue
			}
			if at(p.Client.Place, node) && (server == "" || at(p.Server.Place, server)) || server == "" && at(p.Server.Place, node) {
				return p.Error
			}
		}
	}
	return "the cause is not known"
}

func signTexts(signs []stats.Sign) []string {
	var out []string
	for _, s := range signs {
		text := ""
		switch s.Kind {
		case stats.SignVFIdle:
			text = "its VF is idle"
		case stats.SignRetransmits:
			text = fmt.Sprintf("TCP retransmits %s %% of its segments, elsewhere %s %%", significant(100*s.Value), significant(100*s.Others))
		case stats.SignDrops:
			text = fmt.Sprintf("its %s dropped %.0f packets, those of others %.0f", s.Device, s.Value, s.Others)
		}
		if !slices.Contains(out, text) {
			out = append(out, text)
		}
	}
	return out
}

// oddNICs says how the NICs of a node differ from those of most other nodes.
func (m *Model) oddNICs(name string) []string {
	var own *record.Node
	offloads, mtus, nodes := make(map[string]int), make(map[int]int), 0
	for i := range m.Environment.Nodes {
		n := &m.Environment.Nodes[i]
		if n.Name == name || strings.HasSuffix(n.Name, "/"+name) {
			own = n
			continue
		}
		for _, l := range n.Links {
			if l.Class != v1alpha1.DeviceNIC {
				continue
			}
			nodes++
			mtus[l.MTU]++
			for _, o := range l.Offloads {
				offloads[o]++
			}
		}
	}
	if own == nil {
		return nil
	}
	var out []string
	for _, l := range own.Links {
		if l.Class != v1alpha1.DeviceNIC {
			continue
		}
		var lacks []string
		for offload, n := range offloads {
			if 2*n > nodes && !slices.Contains(l.Offloads, offload) {
				lacks = append(lacks, offload)
			}
		}
		slices.Sort(lacks)
		if len(lacks) > 0 {
			out = append(out, fmt.Sprintf("its %s lacks %s, which others have", l.Name, list(lacks)))
		}
		for mtu, n := range mtus {
			if 2*n > nodes && l.MTU != mtu {
				out = append(out, fmt.Sprintf("its %s has an MTU of %d, those of others %d", l.Name, l.MTU, mtu))
			}
		}
	}
	return out
}

// terminalMesh writes a matrix in percent of the median link. Its columns have numbers, because names are long.
func terminalMesh(b *strings.Builder, t Mesh) {
	names, width := 0, 4
	for i, node := range t.Nodes {
		names = max(names, len([]rune(node))+len(fmt.Sprint(i))+1)
	}
	fmt.Fprintf(b, "\n%s, %% of the median link; a row is a client, a column a server\n", t.Title)
	line := "  " + pad("", names)
	for i := range t.Nodes {
		line += fmt.Sprintf("%*d", width, i)
	}
	b.WriteString(line + "\n")
	for i, row := range t.Rows {
		line := "  " + pad(fmt.Sprintf("%d %s", i, row.Client), names)
		for _, c := range row.Cells {
			text := map[string]string{"": "–", "failed": "✗"}[c.Percent]
			if text == "" {
				text = c.Percent
			}
			line += strings.Repeat(" ", max(1, width-len([]rune(text)))) + text
		}
		b.WriteString(line + "\n")
	}
}
