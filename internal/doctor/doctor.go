// Package doctor looks at one machine for what makes the network of its containers slow or lossy, and
// changes nothing. Look reads the facts, by internal/collect and internal/accel; Examine judges them, by
// one pure function for each rule. What a fault costs on this machine, only an experiment tells: the
// finding names it.
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
	// Serious: packets are lost, or soon will be.
	Serious Severity = "serious"
	// Warning: something works less well than this machine could.
	Warning Severity = "warning"
	// Note: something that is worth an experiment, or that bears on one. It may be right as it is.
	Note Severity = "note"
)

var severities = []Severity{Serious, Warning, Note}

// Finding is what a rule found.
type Finding struct {
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
	{"mtu-too-large", mtuTooLarge},
	{"mtu-small", mtuSmall},
	{"backlog-full", backlogFull},
	{"flow-limit", flowLimit},
	{"squeezed", squeezed},
	{"device-drops", deviceDrops},
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

// Examine applies all rules. The worst findings are first.
func Examine(f Facts) []Finding {
	all := []Finding{} // not null in JSON
	for _, r := range rules {
		for _, found := range r.find(f) {
			found.Rule = r.name
			all = append(all, found)
		}
	}
	slices.SortStableFunc(all, func(a, b Finding) int {
		return cmp.Compare(slices.Index(severities, a.Severity), slices.Index(severities, b.Severity))
	})
	return all
}

// IsSerious tells whether a finding is.
func IsSerious(f Finding) bool { return f.Severity == Serious }

func evidence(from, format string, args ...any) Evidence {
	return Evidence{from, fmt.Sprintf(format, args...)}
}
