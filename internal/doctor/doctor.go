// Package doctor checks machines, and the paths between them, for faults that make a container network slow
// or lossy. It changes nothing. ReadFacts reads the facts of one machine with internal/collect and internal/accel;
// Path.Explore reads those of a path by sending datagrams. Examine and ExaminePath judge the facts with one
// pure function for each rule. Only an experiment shows what a fault costs on a machine, so the finding names
// the experiment. internal/worker and internal/place reach other machines.
package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
)

// Severity of a finding.
type Severity string

// Severities, the worst first.
const (
	// Serious means that traffic is lost or soon will be, or that a run would fail.
	Serious Severity = "serious"
	// Warning means that something works less well than it could on this machine.
	Warning Severity = "warning"
	// Note means that a setting is worth an experiment, or affects one. The setting may be right as it is.
	Note Severity = "note"
)

var severities = []Severity{Serious, Warning, Note}

// Finding is the result of a rule.
type Finding struct {
	// Where names the machine or the pair of machines; it is empty for the machine that doctor runs on.
	Where string `json:"where,omitempty"`
	// Rule is the name of the rule, and a heading of docs/how-to/doctor.md.
	Rule     string   `json:"rule"`
	Severity Severity `json:"severity"`
	// Fault distinguishes the faults that one rule can find. It is the same on all machines that have the fault, and
	// empty if the rule can find only one.
	Fault string `json:"fault,omitempty"`
	What  string `json:"what"`
	// Evidence holds the values that the rule judged.
	Evidence []Evidence `json:"evidence"`
	// Cost describes what the fault costs, and where that was measured.
	Cost string `json:"cost"`
	// Do is the command that corrects the fault, or the experiment that shows whether correcting it helps.
	Do string `json:"do"`
}

// Evidence is a value, with the place where it was read.
type Evidence struct {
	From  string `json:"from"`
	Value string `json:"value"`
}

// rules are the rules for machines, by name; those of stackLosses follow.
var rules = []struct {
	name string
	find func(Facts) []Finding
}{
	{"not-permitted", notPermitted},
	{"no-btf", noBTF},
	{"fast-path", fastPath},
	{"flowtable", flowtable},
	{"mtu-too-large", mtuTooLarge},
	{"mtu-small", mtuSmall},
	{"overlay-down", overlayDown},
	{"overlay-gone", overlayGone},
	{"overlay-local", overlayLocal},
	{"overlay-nic", overlayNIC},
	{"pod-mtu", podMTU},
	{"vtep", vtep},
	{"other-mac", otherMAC},
	{"blackhole", blackhole},
	{"pod-gateway", podGateway},
	{"pod-subnet", podSubnet},
	{"no-neighbour", noNeighbour},
	{"ip-forward", ipForward},
	{"forward-policy", forwardPolicy},
	{"rule-drops", ruleDrops},
	{"bridge-nf", bridgeNF},
	{"hairpin", hairpin},
	{"link-managed", linkManaged},
	{"iptables-twice", iptablesTwice},
	{"backlog-full", backlogFull},
	{"flow-limit", flowLimit},
	{"squeezed", squeezed},
	{"device-drops", deviceDrops},
	{"ring-small", ringSmall},
	{"nic-cap", nicCap},
	{"one-cpu-receives", oneCPUReceives},
	{"rps-useless", rpsUseless},
	{"rfs-off", rfsOff},
	{"irqbalance", irqbalance},
	{"conntrack-full", conntrackFull},
	{"offload-off", offloadOff},
	{"rp-filter", rpFilter},
	{"vf", vf},
	{"link-flaps", linkFlaps},
	{"qdisc-drops", qdiscDrops},
	{"netem", netem},
	{"neighbour-full", neighbourFull},
	{"throttled", throttled},
}

// Examine applies all rules and returns the findings, the worst first.
func Examine(f Facts) []Finding {
	all := []Finding{} // not null in JSON
	for _, r := range rules {
		for _, found := range r.find(f) {
			found.Rule = r.name
			all = append(all, found)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(stackLosses)) {
		for _, found := range stackLosses[name].find(f) {
			found.Rule = name
			all = append(all, found)
		}
	}
	SortWorstFirst(all)
	return all
}

// SortWorstFirst sorts findings by severity. Findings of the same severity keep their order.
func SortWorstFirst(all []Finding) {
	slices.SortStableFunc(all, func(a, b Finding) int {
		return cmp.Compare(slices.Index(severities, a.Severity), slices.Index(severities, b.Severity))
	})
}

// IsSerious reports whether a finding is serious.
func IsSerious(f Finding) bool { return f.Severity == Serious }

func evidence(from, format string, args ...any) Evidence {
	return Evidence{from, fmt.Sprintf(format, args...)}
}
