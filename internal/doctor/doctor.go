// Package doctor checks machines, and the paths between them, for faults that make a container network
// slow or lossy, and changes nothing. Look reads the facts of one machine, by internal/collect and
// internal/accel; Path.Explore those of a path, by datagrams. Examine and ExaminePath judge them, by one pure
// function for each rule. Only an experiment shows what a fault costs on a machine: the finding names it.
// internal/worker and internal/target reach other machines.
package doctor

import (
	"cmp"
	"fmt"
	"slices"
)

// Severity of a finding.
type Severity string

// Severities, the worst first.
const (
	// Serious: traffic is lost, or soon will be; or a run would fail.
	Serious Severity = "serious"
	// Warning: something works less well than this machine could.
	Warning Severity = "warning"
	// Note: something that is worth an experiment, or that bears on one. It may be right as it is.
	Note Severity = "note"
)

var severities = []Severity{Serious, Warning, Note}

// Finding is what a rule found.
type Finding struct {
	// Where is the machine that it is about, or the pair; empty for the one that doctor runs on.
	Where string `json:"where,omitempty"`
	// Rule is the name of the rule, and a heading of docs/how-to/doctor.md.
	Rule     string   `json:"rule"`
	Severity Severity `json:"severity"`
	What     string   `json:"what"`
	// Evidence is the values that the rule judged.
	Evidence []Evidence `json:"evidence"`
	// Cost says what it costs, and where that was measured.
	Cost string `json:"cost"`
	// Do is the command that corrects it, or the experiment that tells whether correcting it helps.
	Do string `json:"do"`
}

// Evidence is a value, and where it was read.
type Evidence struct {
	From  string `json:"from"`
	Value string `json:"value"`
}

// rules by name.
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
	{"throttled", throttled},
}

// Names are those of all rules.
func Names() (names []string) {
	for _, r := range rules {
		names = append(names, r.name)
	}
	for _, r := range pathRules {
		names = append(names, r.name)
	}
	for _, r := range clusterRules {
		names = append(names, r.name)
	}
	return append(names, hostUnfit, labLacks)
}

// Examine applies all rules. The worst findings are first.
func Examine(f Facts) []Finding {
	all := []Finding{} // not null in JSON
	for _, r := range rules {
		for _, found := range r.find(f) {
			found.Rule = r.name
			all = append(all, found)
		}
	}
	SortWorstFirst(all)
	return all
}

// SortWorstFirst sorts findings by severity, and otherwise leaves their order.
func SortWorstFirst(all []Finding) {
	slices.SortStableFunc(all, func(a, b Finding) int {
		return cmp.Compare(slices.Index(severities, a.Severity), slices.Index(severities, b.Severity))
	})
}

// IsSerious tells whether a finding is.
func IsSerious(f Finding) bool { return f.Severity == Serious }

func evidence(from, format string, args ...any) Evidence {
	return Evidence{from, fmt.Sprintf(format, args...)}
}
