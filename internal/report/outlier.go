package report

import (
	"fmt"
	"slices"
	"strings"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/words"
)

// meshSentences name the nodes and links that are worse than the others, with one sentence for each.
func (m *Model) meshSentences(s stats.Mesh) []string {
	in := ""
	if len(m.exp.Spec.Variants)*len(m.exp.Spec.Workloads) > 1 {
		in = fmt.Sprintf(" (%s, %s)", s.Variant, s.Workload)
	}
	var out []string
	described := make(map[string]bool)
	for i, o := range s.Outliers {
		text := ""
		switch node := o.Client + o.Server; {
		case s.Metric == metrics.RetransmitShare && m.inPrimaryMesh(s, o), o.Kind != stats.OutlierLink && described[node]:
			continue
		case s.Metric == metrics.RetransmitShare:
			text = retransmitSentence(o)
		case o.Kind == stats.OutlierLink:
			text = m.linkSentence(s, o)
		default:
			described[node] = true
			text = m.nodeSentence(s, s.Outliers[i:])
		}
		out = append(out, text+in+".")
	}
	if failed := someFailed(s); failed != "" {
		out = append(out, failed+in+".")
	}
	switch {
	case len(out) > 0 || s.Secondary(): // a secondary metric is mentioned only if it has outliers
	case s.Untested != "":
		out = []string{fmt.Sprintf("The mesh of %s was not tested for outliers%s: %s.", words.Count(len(s.Nodes), "node"), in, s.Untested)}
	default:
		out = []string{fmt.Sprintf("None of %s and %s is worse than the others by %.0f%% or more%s.",
			words.Count(len(s.Nodes), "node"), words.Count(len(s.Links), "link"), 100*m.exp.Spec.Mesh.Margin, in)}
	}
	return out
}

// nodeSentence describes the node of the first outlier, as a client and as a server. If it is an outlier in both roles,
// the second role is among the rest.
func (m *Model) nodeSentence(s stats.Mesh, outliers []stats.Outlier) string {
	o := outliers[0]
	node := o.Client + o.Server
	texts := []string{nodeText(s, o)}
	signs := o.Signs
	for _, other := range outliers[1:] {
		if other.Kind != stats.OutlierLink && other.Client+other.Server == node {
			texts = append(texts, nodeText(s, other))
			signs = append(slices.Clone(signs), other.Signs...)
		}
	}
	text := node + " " + words.And(texts) + " of the others"
	if o.Failed > 0 {
		text = fmt.Sprintf("%s failed in %s: %s", node, ofBlocks(o.Failed, o.N), m.whyFailed(node, ""))
	}
	for _, about := range append(signTexts(signs), m.nicDifferences(node)...) {
		text += "; " + about
	}
	return text
}

// inPrimaryMesh reports whether the mesh of the primary metric already names an outlier, with its retransmissions as a
// sign.
func (m *Model) inPrimaryMesh(s stats.Mesh, o stats.Outlier) bool {
	return slices.ContainsFunc(m.summary.Meshes, func(primary stats.Mesh) bool {
		return primary.Variant == s.Variant && primary.Workload == s.Workload && !primary.Secondary() &&
			slices.ContainsFunc(primary.Outliers, func(p stats.Outlier) bool {
				return p.Kind == o.Kind && p.Client == o.Client && p.Server == o.Server
			})
	})
}

// retransmitSentence returns "TCP retransmits 9.5% of the segments from node1 to node2, elsewhere 0.2%".
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
			text = fmt.Sprintf("TCP retransmits %s%% of the segments%s, elsewhere %s%%", number.Significant(100*s.Value), where, number.Significant(100*s.Others))
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
	return fmt.Sprintf("%s failed in some blocks; %s", words.Count(len(links), "link"), links[0])
}

// nodeText describes a node: "receives at 0.62 (0.55–0.70)".
func nodeText(s stats.Mesh, o stats.Outlier) string {
	times := ratio(o.Ratio, o.CI95, o.N).String()
	client := o.Kind == stats.OutlierClient
	switch {
	case s.Metric == metrics.Throughput && client:
		return "sends at " + times
	case s.Metric == metrics.Throughput:
		return "receives at " + times
	case s.Metric == metrics.ServerCPUPerGB && !client:
		return "receives with " + times + " times the CPU time per GB"
	case s.Metric == metrics.ServerCPUPerGB:
		return "makes its servers take " + times + " times the CPU time per GB"
	case client:
		return fmt.Sprintf("as a client has %s times the %s", times, quantityOf(s.Metric).name)
	}
	return fmt.Sprintf("as a server has %s times the %s", times, quantityOf(s.Metric).name)
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
		ratio(o.Ratio, o.CI95, o.N), times, quantityOf(s.Metric).name)
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
			text = fmt.Sprintf("TCP retransmits %s%% of its segments, elsewhere %s%%", number.Significant(100*s.Value), number.Significant(100*s.Others))
		case stats.SignDrops:
			text = fmt.Sprintf("its %s dropped %.0f packets, those of others %.0f", s.Device, s.Value, s.Others)
		}
		if !slices.Contains(out, text) {
			out = append(out, text)
		}
	}
	return out
}

// nicDifferences says how the NICs of a node differ from those of most other nodes.
func (m *Model) nicDifferences(name string) []string {
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
			out = append(out, fmt.Sprintf("its %s lacks %s, which others have", l.Name, words.And(lacks)))
		}
		for mtu, n := range mtus {
			if 2*n > nodes && l.MTU != mtu {
				out = append(out, fmt.Sprintf("its %s has an MTU of %d, those of others %d", l.Name, l.MTU, mtu))
			}
		}
	}
	return out
}
