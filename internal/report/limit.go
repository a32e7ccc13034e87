package report

import (
	"fmt"
	"slices"
	"strings"

	"slipstream.dev/internal/report/number"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/words"
)

// LimitLine says what limited one cell.
type LimitLine struct {
	Workload, Variant string
	Pairs             int
	Text              string
}

// limits says what limited each cell.
func (m *Model) limits() []LimitLine {
	var out []LimitLine
	for _, l := range m.summary.Limits {
		line := LimitLine{Workload: l.Workload, Variant: l.Variant, Pairs: l.Pairs}
		var texts []string
		for _, r := range l.Resources {
			texts = append(texts, resourceText(r))
		}
		line.Text = strings.Join(texts, "; ")
		if !l.Reached {
			line.Text = "no NIC or core was at its limit; the busiest: " + line.Text
		}
		out = append(out, line)
	}
	return out
}

// resourceText describes how much of a resource was used: "the proxy's NIC sends 96% of 1.00
// Gb/s".
func resourceText(r stats.Resource) string {
	share := number.Share(r.Share)
	if r.Kind == stats.ResourceNIC {
		verb := map[bool]string{true: "send", false: "receive"}[r.Sends]
		if len(r.Nodes) == 1 {
			verb += "s"
		}
		return fmt.Sprintf("%s %s %s of %s", nicOf(r), verb, share, bitRate(r.Rate))
	}
	return fmt.Sprintf("%s is %s busy", coreOf(r), share)
}

func nicOf(r stats.Resource) string {
	switch {
	case len(r.Roles) == 0:
		return r.Nodes[0] + "'s NIC"
	case len(r.Nodes) > 1:
		return "the NICs of " + words.Count(len(r.Nodes), r.Roles[0])
	case r.Roles[0] == spec.RoleBackend:
		return "the NIC of the backend " + r.Nodes[0]
	}
	return "the " + r.Roles[0] + "'s NIC"
}

func coreOf(r stats.Resource) string {
	var whose []string
	for _, role := range r.Roles {
		if role == spec.RoleBackend {
			if r.Shared || len(r.Nodes) > 1 {
				role = "backends"
			}
			if !r.Shared {
				role += " " + words.And(r.Nodes)
			}
		}
		whose = append(whose, "the "+role)
	}
	owner := words.And(whose)
	switch {
	case owner == "" && r.Shared:
		owner = "all nodes"
	case owner == "":
		owner = words.And(r.Nodes)
	}
	if len(r.Cores) == 1 {
		return fmt.Sprintf("core %d of %s", r.Cores[0], owner)
	}
	return "a core of " + owner
}

// bounds returns a sentence for each series of balancers: whether more backends help.
func (m *Model) bounds() []string {
	var out []string
	for _, s := range m.summary.Series {
		if s.Axis != spec.AxisBackends || m.exp.PathOf(m.variant(s.Points[0].Variant)).Balancer == nil {
			continue
		}
		if text := m.bound(s); text != "" {
			out = append(out, fmt.Sprintf("%s, %s, series %s: %s.", s.Workload, pairs(s.Pairs), s.Name, text))
		}
	}
	return out
}

// limitOf returns the limit of a point of a series, or nil if it is unknown.
func (m *Model) limitOf(p stats.Point) *stats.Limit {
	for i, l := range m.summary.Limits {
		if l.Variant == p.Variant && l.Workload == p.Workload && l.Pairs == p.Pairs {
			return &m.summary.Limits[i]
		}
	}
	return nil
}

// proxyOf returns the resource of the proxy that limited a point, or nil if none did.
func (m *Model) proxyOf(p stats.Point) *stats.Resource {
	l := m.limitOf(p)
	if l == nil || !l.Reached {
		return nil
	}
	i := slices.IndexFunc(l.Resources, func(r stats.Resource) bool { return slices.Contains(r.Roles, spec.RoleProxy) })
	if i < 0 {
		return nil
	}
	return &l.Resources[i]
}

// bound says from which number of backends the proxy is the limit, and whether more
// backends help.
func (m *Model) bound(s stats.Series) string {
	backends := m.axis(spec.AxisBackends)
	from := len(s.Points) // the proxy is the limit at this point and all later ones
	for from > 0 && m.proxyOf(s.Points[from-1]) != nil {
		from--
	}
	if from == len(s.Points) {
		return m.otherLimit(backends, s.Points[from-1])
	}
	text := fmt.Sprintf("from %s on, the limit is the proxy: %s", backends.at(s.Points[from].Value), resourceText(*m.proxyOf(s.Points[from])))
	if from == len(s.Points)-1 {
		return text + "; no more were tried"
	}
	return text + "; " + m.moreBackends(s, from)
}

// otherLimit describes the limit of the last point of a series, if it is not the proxy.
func (m *Model) otherLimit(backends axis, last stats.Point) string {
	switch l := m.limitOf(last); {
	case l == nil:
		return ""
	case l.Reached:
		return fmt.Sprintf("with %s, the most that were tried, the limit is not the proxy: %s", backends.at(last.Value), resourceText(l.Resources[0]))
	}
	return fmt.Sprintf("with %s, the most that were tried, no NIC and no core is at its limit", backends.at(last.Value))
}

// moreBackends says whether more backends helped, beyond those of a point.
func (m *Model) moreBackends(s stats.Series, from int) string {
	backends := m.axis(spec.AxisBackends)
	helps, inconclusive := false, false
	var ratios []string
	for i := from + 1; i < len(s.Points); i++ {
		v := s.Points[i].Step
		if v == nil { // no block has both points
			inconclusive = true
			continue
		}
		helps = helps || v.Verdict == stats.Faster
		inconclusive = inconclusive || v.Verdict == stats.Inconclusive
		ratios = append(ratios, fmt.Sprintf("%s have %s times the %s of %s", backends.number(s.Points[i].Value),
			ratio(v.Ratio, v.CI95, v.N), quantityOf(s.Metric).name, backends.number(s.Points[i-1].Value)))
	}
	verb := "more backends do not help"
	switch {
	case helps:
		verb = "more backends help nevertheless"
	case inconclusive:
		verb = "whether more backends help is inconclusive"
	}
	if len(ratios) == 0 {
		return verb
	}
	return verb + ": " + words.And(ratios)
}
