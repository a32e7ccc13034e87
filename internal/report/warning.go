package report

import (
	"fmt"
	"maps"
	"slices"

	"slipstream.dev/internal/record"
)

// Severity of a warning.
type Severity int

// A serious warning says that a result may have measured something other than the network path, a
// caution that it is less certain, a note what to know when reading it.
const (
	Serious Severity = iota
	Caution
	Note
)

func (s Severity) String() string { return [...]string{"serious", "caution", "note"}[s] }

// Warning is one code with each of its messages and where it holds.
type Warning struct {
	Code string
	// ID is its anchor in a page.
	ID       string
	Severity Severity
	// Effect is what it does to the result.
	Effect  string
	Entries []Entry
	// CPU tells that it concerns the CPU figures alone; Everywhere, that every cell has it.
	CPU, Everywhere bool
}

// Entry is a message and the cells that it holds for, in words.
type Entry struct{ Message, Where string }

// Warnings that are the report's own.
const (
	warnUnreadable       = "latency-unreadable"
	warnCourseUnreadable = "series-unreadable"
)

// newWarning knows what each code means for a result.
func newWarning(code string) Warning {
	w := Warning{Code: code, ID: "warning-" + code, Severity: Caution}
	switch code {
	case record.WarnGeneratorBound:
		w.Severity, w.Effect = Serious, "The sender was the limit, so the result hides what the network could do."
	case record.WarnThrottled:
		w.Severity, w.Effect = Serious, "A CPU limit was in force, so the result may show the limit, not the network."
	case record.WarnReadback:
		w.Severity, w.Effect = Serious, "The variant may not have run with its settings."
	case record.WarnHeld:
		w.Severity, w.Effect = Serious, "The baseline was accelerated too, so gains are understated."
	case record.WarnSlowPath:
		w.Severity, w.Effect = Serious, "The variant was hardly accelerated, so the result says little of its acceleration."
	case record.WarnVFWithdrawn:
		w.Severity, w.Effect = Serious, "Some packets took the virtual function and others did not, so the result mixes both ways."
	case record.WarnVFIdle:
		w.Severity, w.Effect = Serious, "The result shows the NIC without its virtual function."
	case record.WarnCongestion:
		w.Severity, w.Effect = Serious, "The tool's figures are those of another congestion control, and do not compare with the engine's."
	case record.WarnChanges:
		w.Severity, w.Effect = Serious, "The services changed less often than the variant says, so the cost of changes is understated."
	case record.WarnErrors:
		w.Severity, w.Effect = Serious, "Failed requests are not included in the latencies, so these may look too good."
	case record.WarnUnexpected:
		w.Severity, w.Effect = Serious, "Other traffic ran during the trial, so the result may include it."
	case record.WarnApart:
		w.Severity, w.Effect = Serious, "A difference may come from the time at which a variant was measured, not from the variant."
	case record.WarnSaturated:
		w.Effect = "Latencies include the wait in a full queue."
	case record.WarnRetransmits:
		w.Effect = "Lost segments slow TCP down, so values vary more."
	case record.WarnDrops:
		w.Effect = "Dropped packets lower throughput or raise latency."
	case record.WarnDrift:
		w.Effect = "The machine changed during the run, so means mix its states. Ratios hold, since they are taken within blocks."
	case record.WarnFewBlocks:
		w.Effect = "The interval rests on too few blocks, so it is wide."
	case record.WarnNoRatio:
		w.Effect = "There is no ratio, so there is no verdict."
	case record.WarnSteal:
		w.Effect = "Other virtual machines took CPU time, so means are worse and vary more."
	case record.WarnMoved:
		w.Effect = "The new host may be faster or slower, so values may differ from those before."
	case record.WarnSkew:
		w.Effect = "Client and server measured windows of different lengths, so values may be off by the same percentage."
	case record.WarnFailedPairs:
		w.Severity, w.Effect = Serious, "The sums of all pairs are without those that failed; the matrix and its outliers are not affected."
	case record.WarnFailedTrials:
		w.Effect = "Blocks without the trial are left out of its comparison."
	case record.WarnInterrupts:
		w.Effect = "Receive steering costs more here than it does on real hardware."
	case record.WarnSharedCPUs:
		w.Severity, w.Effect = Note, "Nodes compete for CPU time, so throughput is lower than on separate machines, and ratios may differ there."
	case record.WarnNoEBPF:
		w.Severity, w.CPU, w.Effect = Note, true, "Softirq time is approximate. Verdicts on speed do not depend on it."
	case record.WarnNoCPUs:
		w.Severity, w.CPU, w.Effect = Note, true, "CPU time is missing. Verdicts on speed do not depend on it."
	case warnCourseUnreadable:
		w.Effect = "The figure of the time inside a trial is drawn without these nodes. Verdicts do not depend on it."
	case warnUnreadable:
		w.Effect = "The latency distribution is drawn without these trials. Verdicts do not depend on it."
	}
	return w
}

// SeriousWarnings stand beside the answer, GeneralWarnings at the head of the comparison,
// and CPUWarnings beside the CPU figures; the others are marked in their rows.
func (m *Model) SeriousWarnings() []Warning {
	return m.warningsThat(func(w Warning) bool { return w.Severity == Serious })
}

// GeneralWarnings hold for every row.
func (m *Model) GeneralWarnings() []Warning {
	return m.warningsThat(func(w Warning) bool { return w.Severity != Serious && w.Everywhere && !w.CPU })
}

// CPUWarnings concern the CPU figures alone.
func (m *Model) CPUWarnings() []Warning {
	return m.warningsThat(func(w Warning) bool { return w.CPU })
}

func (m *Model) warningsThat(is func(Warning) bool) []Warning {
	return slices.DeleteFunc(slices.Clone(m.Warnings), func(w Warning) bool { return !is(w) })
}

// summarizeWarnings fills in the model's warnings. Those of everywhere stand once, not at each row.
func (m *Model) summarizeWarnings(everywhere map[string]bool) {
	type message struct{ code, text string }
	var order []message
	held := map[message][]cell{}
	have := map[cell]map[string]bool{} // codes, by whole cell
	add := func(c cell, w record.Warning) {
		key := message{w.Code, w.Message}
		if held[key] == nil {
			order = append(order, key)
		}
		if !slices.Contains(held[key], c) {
			held[key] = append(held[key], c)
		}
		if have[c] == nil {
			have[c] = map[string]bool{}
		}
		have[c][w.Code] = true
	}
	for _, r := range m.summary.Rows {
		for _, w := range r.Warnings {
			add(cell{r.Variant, r.Workload, r.Pairs, ""}, w)
		}
	}
	// A summary sums up what its trials warned of; what it left out counts too.
	summed := map[cell]map[string]bool{}
	for c, codes := range have {
		summed[c] = maps.Clone(codes)
	}
	for _, t := range m.trials {
		c := cell{t.Variant, t.Workload, t.Pairs, ""}
		for _, w := range t.Warnings {
			if !summed[c][w.Code] {
				add(c, w)
			}
		}
	}
	for _, key := range order {
		m.warn(key.code, Entry{key.text, m.words(held[key])})
	}
	for i, w := range m.Warnings {
		m.Warnings[i].Everywhere = everywhere[w.Code]
	}
}

// warn adds an entry to the warning of a code: there is one of each code, as its anchor in a page
// must be one. The most severe come first.
func (m *Model) warn(code string, e Entry) {
	i := slices.IndexFunc(m.Warnings, func(w Warning) bool { return w.Code == code })
	if i < 0 {
		w := newWarning(code)
		if i = slices.IndexFunc(m.Warnings, func(other Warning) bool { return other.Severity > w.Severity }); i < 0 {
			i = len(m.Warnings)
		}
		m.Warnings = slices.Insert(m.Warnings, i, w)
	}
	m.Warnings[i].Entries = append(m.Warnings[i].Entries, e)
}

// everywhere are the codes that every cell with numbers carries; to repeat
// them on each line would hide the others.
func (m *Model) everywhere() map[string]bool {
	count := map[string]int{}
	measured := 0
	for _, r := range m.summary.Rows {
		if r.N == 0 {
			continue
		}
		measured++
		seen := map[string]bool{}
		for _, w := range r.Warnings {
			if !seen[w.Code] {
				count[w.Code]++
			}
			seen[w.Code] = true
		}
	}
	maps.DeleteFunc(count, func(_ string, n int) bool { return n < measured })
	all := map[string]bool{}
	for code := range count {
		all[code] = true
	}
	return all
}

// words names cells, or counts them where they are many. Everywhere is where
// there are numbers.
func (m *Model) words(cells []cell) string {
	measured := map[cell]bool{}
	for c := range m.rows {
		c.metric = ""
		measured[c] = true
	}
	total := len(measured)
	if total > 1 && len(cells) >= total {
		return "everywhere"
	}
	if len(cells) > 8 {
		return fmt.Sprintf("%d of %d combinations of variant, workload and pairs", len(cells), total)
	}
	names := make([]string, 0, len(cells))
	for _, c := range cells {
		names = append(names, fmt.Sprintf("%s %s %s", c.variant, c.workload, pairs(c.pairs)))
	}
	return list(names)
}
