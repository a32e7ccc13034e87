package report

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/words"
)

// Fleet is the page of a cluster's policies and of the nodes that run agents.
type Fleet struct {
	Links
	// Read is when the API server was asked.
	Read     time.Time
	Policies []FleetPolicy
	// Nodes are those that need a look. Others are as their policies want them, or no policy selects them.
	Nodes []FleetNode
	// Agents is the number of nodes that run or ran an agent. Accelerated is how many of them have settings of a policy in force.
	Agents, Accelerated int
	Repairs             []Repair
	// Unread says why there are no repairs, if they cannot be read.
	Unread string
}

// FleetPolicy is a policy with the reports of its nodes.
type FleetPolicy struct {
	Name, Accelerators, Nodes string
	// Selected is the number of nodes that the policy selects, and Applied the number of those that have it in force.
	Applied, Selected int
	// Ready is yes, no or unknown, and Why the reason. Rollout describes the progress of the rollout.
	Ready, Why, Rollout string
	// Proof describes the measurement that the policy rests on, and Measured its time and place; empty if the policy
	// does not say.
	Proof, Measured string
}

// FleetNode is a node that is not as its policies want it.
type FleetNode struct {
	Name string
	// Of is a policy or a type of condition, and Reason and Message are from its condition.
	Of, Reason, Message string
}

// Repair is an event: an agent restored settings that another program had changed.
type Repair struct {
	Node, Text string
	At         time.Time
}

// mostRows bounds the rows of nodes and of repairs.
const mostRows = 200

// NewFleet builds the page.
func NewFleet(policies []v1alpha1.AccelerationPolicy, nodes []v1alpha1.NodeAcceleration, repairs []Repair, unread string, now time.Time) *Fleet {
	f := &Fleet{Read: now, Agents: len(nodes), Repairs: repairs[:min(len(repairs), mostRows)], Unread: unread}
	for i := range policies {
		f.Policies = append(f.Policies, fleetPolicy(&policies[i], nodes, now))
	}
	slices.SortFunc(f.Policies, func(a, b FleetPolicy) int { return cmp.Compare(a.Name, b.Name) })
	for _, n := range nodes {
		if slices.ContainsFunc(n.Status.Observed, func(o v1alpha1.ObservedPolicy) bool {
			return o.State == v1alpha1.StateApplied && o.Settings > 0
		}) {
			f.Accelerated++
		}
		f.Nodes = append(f.Nodes, needsLook(n)...)
	}
	f.Nodes = f.Nodes[:min(len(f.Nodes), mostRows)]
	return f
}

// HTML writes the page.
func (f *Fleet) HTML(w io.Writer) error { return writePage(w, "fleet", f) }

// Says sums up the fleet in a sentence.
func (f *Fleet) Says() string {
	if f.Agents == 0 {
		return "No agent has reported yet."
	}
	text := fmt.Sprintf("%d of %s with an agent (%d%%) have settings of a policy", f.Accelerated, words.Count(f.Agents, "node"), 100*f.Accelerated/f.Agents)
	if n := len(f.Nodes); n > 0 {
		return text + "; " + words.Count(n, "finding") + "."
	}
	return text + "; all nodes are as their policies want them."
}

// fleetPolicy describes a policy by the current reports of the nodes. The policy's own counts are up to five minutes
// old.
func fleetPolicy(p *v1alpha1.AccelerationPolicy, nodes []v1alpha1.NodeAcceleration, now time.Time) FleetPolicy {
	out := FleetPolicy{Name: p.Name, Ready: "unknown"}
	var kinds, labels []string
	for _, a := range p.Spec.Accelerate {
		kinds = append(kinds, a.Kind())
	}
	out.Accelerators = words.And(kinds)
	for key, value := range p.Spec.NodeSelector {
		labels = append(labels, key+"="+value)
	}
	slices.Sort(labels)
	if out.Nodes = strings.Join(labels, ","); p.Spec.All {
		out.Nodes = "all"
	}
	for _, n := range nodes {
		for _, o := range n.Status.Observed {
			if o.Policy != p.Name || o.UID != p.UID && o.UID != "" {
				continue
			}
			out.Selected++
			if o.State == v1alpha1.StateApplied && o.Generation == p.Generation {
				out.Applied++
			}
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Type == v1alpha1.ConditionReady {
			out.Ready, out.Why = cmp.Or(map[string]string{"True": "yes", "False": "no"}[string(c.Status)], "unknown"), c.Reason
			if c.Message != "" {
				out.Why += ": " + c.Message
			}
		}
	}
	if r := p.Status.Rollout; r != nil && r.Generation == p.Generation {
		switch {
		case len(r.FailedNodes) > 0:
			out.Rollout = "halted: " + listFew(r.FailedNodes)
		case r.Complete:
			out.Rollout = "complete"
		default:
			out.Rollout = fmt.Sprintf("%d%% of the nodes", r.Percent)
		}
	}
	out.Proof, out.Measured = proof(p.Annotations, now)
	return out
}

// proof reads the annotations that slipstream policy writes.
func proof(annotations map[string]string, now time.Time) (what, measured string) {
	get := func(name string) string { return annotations[v1alpha1.AnnotationPrefix+name] }
	if get("ratio") == "" {
		return "", ""
	}
	what = fmt.Sprintf("%s against %s: %s of %s ×%s (%s), %s blocks", get("variant"), get("baseline"), get("metric"), get("workload"), get("ratio"), strings.Replace(get("interval"), "-", "–", 1), get("blocks"))
	if doubt := get("despite"); doubt != "" {
		what += ", despite: " + doubt
	}
	at, err := time.Parse(time.RFC3339, get("measured"))
	if err != nil {
		return what, ""
	}
	// The clock of the machine that measured may be ahead of this one's.
	days := max(0, int(now.Sub(at).Hours())/24)
	measured = fmt.Sprintf("%s ago, %s", words.Count(days, "day"), at.UTC().Format(time.DateOnly))
	if in, kernel := get("measured-in"), get("kernel"); in != "" && kernel != "" {
		measured += fmt.Sprintf(", %s, kernel %s", in, kernel)
	}
	return what, measured
}

// needsLook returns the problems of a node: policies that are not in force as they should be, and conditions that those
// do not explain.
func needsLook(n v1alpha1.NodeAcceleration) (all []FleetNode) {
	for _, o := range n.Status.Observed {
		switch {
		case o.State == v1alpha1.StateFailed:
			all = append(all, FleetNode{n.Name, "policy " + o.Policy, o.Reason, o.Message})
		case o.Verified < o.Settings:
			all = append(all, FleetNode{n.Name, "policy " + o.Policy, v1alpha1.ReasonNotVerified, fmt.Sprintf("%d of %d settings have the value that the agent wrote", o.Verified, o.Settings)})
		}
	}
	for _, c := range n.Status.Conditions {
		explained := c.Type == v1alpha1.ConditionReady && len(all) > 0
		// It is not known yet whether packets use the virtual function, or the node cannot have one.
		fine := c.Status != "False" || c.Reason == v1alpha1.ReasonVFPresent || c.Reason == v1alpha1.ReasonNoDevice
		if !explained && !fine {
			all = append(all, FleetNode{n.Name, c.Type, c.Reason, c.Message})
		}
	}
	return all
}
