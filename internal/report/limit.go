package report

import (
	"fmt"
	"slices"
	"strings"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/stats"
)

// LimitLine says what held one cell back.
type LimitLine struct {
	Workload, Variant string
	Pairs             int
	Text              string
}

func (m *Model) limits() []LimitLine {
	var out []LimitLine
	for _, l := range m.summary.Limits {
		line := LimitLine{Workload: l.Workload, Variant: l.Variant, Pairs: l.Pairs}
		var texts []string
		for _, r := range l.Resources {
			texts = append(texts, use(r))
		}
		line.Text = strings.Join(texts, "; ")
		if !l.Reached {
			line.Text = "no NIC or core was at its limit; the busiest: " + line.Text
		}
		out = append(out, line)
	}
	return out
}

// use says how much of a resource was used: "the proxy's NIC sends 96 % of 1.00 Gb/s".
func use(r stats.Resource) string {
	share := fixed(100*r.Share, 0) + " %"
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
		return fmt.Sprintf("the NICs of %d %ss", len(r.Nodes), r.Roles[0])
	case r.Roles[0] == v1alpha1.RoleBackend:
		return "the NIC of the backend " + r.Nodes[0]
	}
	return "the " + r.Roles[0] + "'s NIC"
}

func coreOf(r stats.Resource) string {
	var whose []string
	for _, role := range r.Roles {
		if role == v1alpha1.RoleBackend {
			if r.Shared || len(r.Nodes) > 1 {
				role = "backends"
			}
			if !r.Shared {
				role += " " + list(r.Nodes)
			}
		}
		whose = append(whose, "the "+role)
	}
	owner := list(whose)
	switch {
	case owner == "" && r.Shared:
		owner = "all nodes"
	case owner == "":
		owner = list(r.Nodes)
	}
	if len(r.Cores) == 1 {
		return fmt.Sprintf("core %d of %s", r.Cores[0], owner)
	}
	return "a core of " + owner
}

// bounds say of each series of balancers that differ in their backends alone what more
// backends bring.
func (m *Model) bounds() []string {
	var out []string
	for _, first := range m.summary.Limits {
		if b := m.path(m.variant(first.Variant)).Balancer; b == nil || first.More != nil {
			continue
		}
		series := []stats.Limit{first}
		for found := true; found; {
			found = false
			for _, l := range m.summary.Limits {
				last := series[len(series)-1]
				if l.Workload == first.Workload && l.Pairs == first.Pairs && l.More != nil && l.More.Versus.Baseline == last.Variant {
					series, found = append(series, l), true
					break
				}
			}
		}
		if len(series) > 1 {
			out = append(out, fmt.Sprintf("%s, %s, variants %s to %s: %s.", first.Workload, pairs(first.Pairs), first.Variant, series[len(series)-1].Variant, m.bound(series)))
		}
	}
	return out
}

// bound speaks of one series, in the order of its backends.
func (m *Model) bound(series []stats.Limit) string {
	proxy := func(l stats.Limit) int {
		if !l.Reached {
			return -1
		}
		return slices.IndexFunc(l.Resources, func(r stats.Resource) bool { return slices.Contains(r.Roles, v1alpha1.RoleProxy) })
	}
	backends := func(l stats.Limit) string {
		return plural(m.path(m.variant(l.Variant)).Balancer.Backends, "backend")
	}
	from := len(series)
	for from > 0 && proxy(series[from-1]) >= 0 {
		from--
	}
	last := series[len(series)-1]
	switch {
	case from < len(series):
	case last.Reached:
		return fmt.Sprintf("with %s, the most that were tried, the limit is not the proxy: %s", backends(last), use(last.Resources[0]))
	default:
		return fmt.Sprintf("with %s, the most that were tried, no NIC and no core is at its limit", backends(last))
	}
	at := series[from]
	text := fmt.Sprintf("from %s on, the limit is the proxy: %s", backends(at), use(at.Resources[proxy(at)]))
	if from == len(series)-1 {
		return text + "; no more were tried"
	}
	helps, open := false, false
	var ratios []string
	for _, l := range series[from+1:] {
		v := l.More.Versus
		helps = helps || v.Verdict == stats.Faster
		open = open || v.Verdict == stats.Inconclusive
		ratios = append(ratios, fmt.Sprintf("%d have %s times the %s of %d", l.More.Backends, estimate(v.Ratio, of(v.CI95, v.N), 2), quantityOf(l.More.Metric).name, l.More.Fewer))
	}
	verb := "more backends do not help"
	switch {
	case helps:
		verb = "more backends help nevertheless"
	case open:
		verb = "whether more backends help is inconclusive"
	}
	return fmt.Sprintf("%s; %s: %s", text, verb, list(ratios))
}
