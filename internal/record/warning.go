package record

import (
	"fmt"
	"slices"
)

// Warning says what may make a result wrong or uncertain.
type Warning struct {
	// Code names the kind of warning.
	Code string `json:"code"`
	// Message is a sentence for a person, with the figures.
	Message string `json:"message"`
}

// Warnf formats the message of a warning.
func Warnf(code, format string, args ...any) Warning {
	return Warning{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Codes of warnings.
const (
	WarnGeneratorBound    = "generator-bound"
	WarnSaturated         = "path-saturated"
	WarnThrottled         = "cpu-throttled"
	WarnRetransmits       = "retransmits"
	WarnDrops             = "drops"
	WarnErrors            = "request-errors"
	WarnDrift             = "drift"
	WarnApart             = "not-interleaved"
	WarnFewBlocks         = "few-blocks"
	WarnNoRatio           = "no-ratio"
	WarnReadback          = "setting-readback"
	WarnSettingChanged    = "setting-changed"
	WarnSteal             = "steal"
	WarnMoved             = "moved"
	WarnClustersDiffer    = "clusters-differ"
	WarnNetworkChanged    = "network-changed"
	WarnSkew              = "window-skew"
	WarnSharedCPUs        = "shared-cpus"
	WarnFailedTrials      = "failed-trials"
	WarnFailedPairs       = "failed-pairs"
	WarnNoEBPF            = "softirq-ticks"
	WarnNoCPUs            = "cpus-not-sampled"
	WarnInterrupts        = "slow-interrupts"
	WarnHeld              = "already-accelerated"
	WarnUnexpected        = "unexpected-traffic"
	WarnSlowPath          = "slow-path"
	WarnVFWithdrawn       = "vf-withdrawn"
	WarnCongestion        = "congestion-control"
	WarnChanges           = "few-changes"
	WarnVFIdle            = "vf-idle"
	WarnNotObserved       = "daemonset-not-measured"
	WarnCoarse            = "coarse-histogram"
	WarnLatencyUnreadable = "latency-unreadable"
	WarnSeriesUnreadable  = "series-unreadable"
)

// Severity of a warning.
type Severity int

// A serious warning says that a result may have measured something other than the network path. A caution says that
// the result is less certain. A note says what to know when reading it.
const (
	Serious Severity = iota + 1
	Caution
	Note
)

func (s Severity) String() string {
	return [...]string{Serious: "serious", Caution: "caution", Note: "note"}[s]
}

// WarningKind is a row of the table of warnings: everything that the warnings of one code have in common. To add a
// warning, add a row, and raise it with Warnf.
type WarningKind struct {
	Code     string
	Severity Severity
	Meaning  string // a phrase, for the reference
	Effect   string // what it does to a result, in sentences
	// CPU means that the warning concerns the CPU figures alone.
	CPU bool
	// Unrecorded warnings are not in results. Their readers raise them.
	Unrecorded bool
}

// warningKinds has the kinds in the order of the reference.
var warningKinds = []WarningKind{
	{Code: WarnGeneratorBound, Severity: Serious,
		Meaning: "the sender, not the network, is the limit",
		Effect:  "The sender was the limit, so the result hides what the network could do."},
	{Code: WarnSaturated, Severity: Caution,
		Meaning: "the path took less than the set rate",
		Effect:  "Latencies include the wait in a full queue."},
	{Code: WarnThrottled, Severity: Serious,
		Meaning: "a cgroup's CPU limit throttled a node or pod",
		Effect:  "A CPU limit was in force, so the result may show the limit, not the network."},
	{Code: WarnRetransmits, Severity: Caution,
		Meaning: "TCP retransmitted a notable share of its segments",
		Effect:  "Lost segments slow TCP down, so values vary more."},
	{Code: WarnDrops, Severity: Caution,
		Meaning: "a device, a backlog or connection tracking dropped packets",
		Effect:  "Dropped packets lower throughput or raise latency."},
	{Code: WarnErrors, Severity: Serious,
		Meaning: "HTTP requests, or connections of connect, failed",
		Effect:  "Failed requests are not included in the latencies, so these may look too good."},
	{Code: WarnDrift, Severity: Caution,
		Meaning: "the baseline changed over the run",
		Effect:  "The machine changed during the run, so means mix its states. Ratios hold, since they are taken within blocks."},
	{Code: WarnApart, Severity: Serious,
		Meaning: "variants were measured one after the other",
		Effect:  "A difference may come from the time at which a variant was measured, not from the variant."},
	{Code: WarnFewBlocks, Severity: Caution,
		Meaning: "too few blocks for the requested interval",
		Effect:  "The interval rests on too few blocks, so it is wide."},
	{Code: WarnNoRatio, Severity: Caution,
		Meaning: "there is no comparison: a value is 0, or no block has both variants",
		Effect:  "There is no ratio, so there is no verdict."},
	{Code: WarnReadback, Severity: Serious,
		Meaning: "a setting has another value than was written",
		Effect:  "The variant may not have run with its settings."},
	{Code: WarnSettingChanged, Severity: Serious,
		Meaning: "somebody else changed a setting during an earlier trial, and its value stayed",
		Effect:  "Later trials, those of the baseline too, had another value than earlier ones, so the result mixes both."},
	{Code: WarnSteal, Severity: Caution,
		Meaning: "the hypervisor took CPU time away",
		Effect:  "Other virtual machines took CPU time, so means are worse and vary more."},
	{Code: WarnMoved, Severity: Caution,
		Meaning: "a virtual machine runs on another physical host than before",
		Effect:  "The new host may be faster or slower, so values may differ from those before."},
	{Code: WarnClustersDiffer, Severity: Serious,
		Meaning: "the nodes of the compared clusters are not alike",
		Effect:  "A difference between clusters may come from their nodes, not from their networks."},
	{Code: WarnNetworkChanged, Severity: Serious,
		Meaning: "the network of a cluster was replaced during the run",
		Effect:  "The figures are of both networks, so they are of none."},
	{Code: WarnSkew, Severity: Caution,
		Meaning: "the windows of client and server do not match",
		Effect:  "Client and server measured windows of different lengths, so values may be off by the same percentage."},
	{Code: WarnSharedCPUs, Severity: Note,
		Meaning: "nodes of the lab share CPUs",
		Effect:  "Nodes compete for CPU time, so throughput is lower than on separate machines, and ratios may differ there."},
	{Code: WarnFailedTrials, Severity: Caution,
		Meaning: "trials failed and were repeated, or are missing",
		Effect:  "Blocks without the trial are left out of its comparison."},
	{Code: WarnFailedPairs, Severity: Serious,
		Meaning: "pairs of a mesh, or the sampling of a node of it, failed",
		Effect:  "The sums of all pairs are without those that failed; the matrix and its outliers are not affected."},
	{Code: WarnNoEBPF, Severity: Note, CPU: true,
		Meaning: "softirq time is that of clock ticks",
		Effect:  "Softirq time is approximate. Verdicts on speed do not depend on it."},
	{Code: WarnNoCPUs, Severity: Note, CPU: true,
		Meaning: "the CPUs of the nodes were not sampled",
		Effect:  "CPU time is missing. Verdicts on speed do not depend on it."},
	{Code: WarnInterrupts, Severity: Caution,
		Meaning: "an interrupt to another CPU costs more than steering could gain",
		Effect:  "Receive steering costs more here than it does on real hardware."},
	{Code: WarnHeld, Severity: Serious,
		Meaning: "another process keeps the nodes accelerated, also for the baseline",
		Effect:  "The baseline was accelerated too, so gains are understated."},
	{Code: WarnUnexpected, Severity: Serious,
		Meaning: "a server got traffic that is not from its client",
		Effect:  "Other traffic ran during the trial, so the result may include it."},
	{Code: WarnSlowPath, Severity: Serious,
		Meaning: "the fast path forwarded less than half of the packets",
		Effect:  "The variant was hardly accelerated, so the result says little of its acceleration."},
	{Code: WarnVFWithdrawn, Severity: Serious,
		Meaning: "the virtual function of a NIC was withdrawn, interrupted or added",
		Effect:  "Some packets took the virtual function and others did not, so the result mixes both ways."},
	{Code: WarnCongestion, Severity: Serious,
		Meaning: "a tool ran with another congestion control than the experiment's",
		Effect:  "The tool's figures are those of another congestion control, and do not compare with the engine's."},
	{Code: WarnChanges, Severity: Serious,
		Meaning: "fewer endpoints were replaced than the variant asks for",
		Effect:  "The services changed less often than the variant says, so the cost of changes is understated."},
	{Code: WarnVFIdle, Severity: Serious,
		Meaning: "packets did not use the virtual function, which was up",
		Effect:  "The result shows the NIC without its virtual function."},
	{Code: WarnNotObserved, Severity: Note, CPU: true,
		Meaning: "a pod of an observed DaemonSet was missing or restarted within the window",
		Effect:  "The use of CPUs and memory by that DaemonSet is missing from the trial. Verdicts on speed do not depend on it."},
	{Code: WarnCoarse, Severity: Note,
		Meaning: "the buckets of the tool's histogram are too wide for percentiles",
		Effect:  "The result has the mean latency, and no percentiles."},
	{Code: WarnLatencyUnreadable, Severity: Caution, Unrecorded: true,
		Meaning: "the latencies of a trial cannot be read",
		Effect:  "The latency distribution is drawn without these trials. Verdicts do not depend on it."},
	{Code: WarnSeriesUnreadable, Severity: Caution, Unrecorded: true,
		Meaning: "the time series of a node cannot be read",
		Effect:  "The figure of the time inside a trial is drawn without these nodes. Verdicts do not depend on it."},
}

// WarningKinds returns the kinds that results can contain.
func WarningKinds() []WarningKind {
	return slices.DeleteFunc(slices.Clone(warningKinds), func(k WarningKind) bool { return k.Unrecorded })
}

// WarningKindOf returns the kind of a code. An unknown code, from another version, is a caution without an effect.
func WarningKindOf(code string) WarningKind {
	i := slices.IndexFunc(warningKinds, func(k WarningKind) bool { return k.Code == code })
	if i < 0 {
		return WarningKind{Code: code, Severity: Caution}
	}
	return warningKinds[i]
}
