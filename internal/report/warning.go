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

// warnUnreadable is the one warning that is the report's own.
const warnUnreadable = "latency-unreadable"

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
	case record.WarnErrors:
		w.Severity, w.Effect = Serious, "Failed requests are not included in the latencies, so these may look too good."
	case record.WarnStrangers:
		w.Severity, w.Effect = Serious, "Traffic of others ran during the trial."
	case record.WarnApart:
		w.Severity, w.Effect = Serious, "A difference may come from the time at which a variant was measured, not from the variant."
	case record.WarnSaturated:
		w.Effect = "Latencies include the wait in a full queue."
	case record.WarnRetransmits:
		w.Effect = "Lost segments slow TCP down and add scatter."
	case record.WarnDrops:
		w.Effect = "Dropped packets lower throughput or raise latency."
	case record.WarnDrift:
		w.Effect = "Ratios stand, since they are taken within blocks; means are of a machine that changed."
	case record.WarnFewBlocks:
		w.Effect = "The interval rests on too few blocks, so it is wide."
	case record.WarnNoRatio:
		w.Effect = "There is no verdict on it."
	case record.WarnSteal:
		w.Effect = "Other virtual machines took CPU time, so means are worse and scatter more."
	case record.WarnSkew:
		w.Effect = "The ends measured different moments, so a value may be off by as much."
	case record.WarnFailedTrials:
		w.Effect = "Blocks without the trial are left out of its comparison."
	case record.WarnInterrupts:
		w.Effect = "Receive steering costs more here than it does on real hardware."
	case record.WarnSharedCPUs:
		w.Severity, w.Effect = Note, "Nodes compete for CPU time, so means are lower than on machines of their own; ratios are of this machine."
	case record.WarnNoEBPF:
		w.Severity, w.CPU, w.Effect = Note, true, "Softirq time is approximate. Verdicts on speed do not depend on it."
	case record.WarnNoCPUs:
		w.Severity, w.CPU, w.Effect = Note, true, "CPU time is missing. Verdicts on speed do not depend on it."
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

// warnings are the most severe first. Those of everywhere stand once, not at each row.
func (m *Model) warnings(everywhere map[string]bool) []Warning {
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
	var out []Warning
	for _, key := range order {
		i := slices.IndexFunc(out, func(w Warning) bool { return w.Code == key.code })
		if i < 0 {
			i = len(out)
			out = append(out, newWarning(key.code))
			out[i].Everywhere = everywhere[key.code]
		}
		out[i].Entries = append(out[i].Entries, Entry{key.text, m.words(held[key])})
	}
	slices.SortStableFunc(out, func(a, b Warning) int { return int(a.Severity - b.Severity) })
	return out
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
		return fmt.Sprintf("%d of %d cells", len(cells), total)
	}
	names := make([]string, 0, len(cells))
	for _, c := range cells {
		names = append(names, fmt.Sprintf("%s %s %s", c.variant, c.workload, pairs(c.pairs)))
	}
	return list(names)
}
