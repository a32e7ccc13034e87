package report

import (
	"fmt"
	"maps"
	"slices"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/words"
)

// Warning is one code with each of its messages and the cells that have it.
type Warning struct {
	record.WarningKind
	// ID is its anchor in a page.
	ID      string
	Entries []Entry
	// Everywhere means that every cell has it.
	Everywhere bool
}

// Entry is a message and a description of the cells that it is about.
type Entry struct{ Message, Where string }

func newWarning(code string) Warning {
	return Warning{WarningKind: record.WarningKindOf(code), ID: "warning-" + code}
}

// SeriousWarnings stand beside the answer, GeneralWarnings at the head of the comparison, and
// CPUWarnings beside the CPU figures. All others are marked in their rows.
func (m *Model) SeriousWarnings() []Warning {
	return m.filterWarnings(func(w Warning) bool { return w.Severity == record.Serious })
}

// GeneralWarnings are about every row.
func (m *Model) GeneralWarnings() []Warning {
	return m.filterWarnings(func(w Warning) bool { return w.Severity != record.Serious && w.Everywhere && !w.CPU })
}

// CPUWarnings are about the CPU figures only.
func (m *Model) CPUWarnings() []Warning {
	return m.filterWarnings(func(w Warning) bool { return w.CPU })
}

func (m *Model) filterWarnings(keep func(Warning) bool) []Warning {
	return slices.DeleteFunc(slices.Clone(m.Warnings), func(w Warning) bool { return !keep(w) })
}

// summarizeWarnings fills in the model's warnings. A warning in everywhere appears once, not at
// each row.
func (m *Model) summarizeWarnings(everywhere map[string]bool) {
	type message struct{ code, text string }
	var order []message
	held := map[message][]cell{}
	have := map[cell]map[string]bool{} // codes, by cell without metric
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
	// The rows already sum up the warnings of their trials. Add the warnings that they leave out.
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
		m.warn(key.code, Entry{key.text, m.nameCells(held[key])})
	}
	for i, w := range m.Warnings {
		m.Warnings[i].Everywhere = everywhere[w.Code]
	}
}

// warn adds an entry to the warning of a code. There is only one warning for each code, because its
// anchor in a page must be unique. The most severe come first.
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

// everywhere returns the codes of the warnings that every measured row has. Repeated on every line, they would hide
// the others.
func (m *Model) everywhere() map[string]bool {
	count := map[string]int{}
	measured := 0
	for _, r := range m.summary.Rows {
		if r.N == 0 {
			continue
		}
		measured++
		for _, code := range warningCodes(&r) {
			count[code]++
		}
	}
	all := map[string]bool{}
	for code, n := range count {
		all[code] = n == measured
	}
	return all
}

// warningCodes returns the codes of a row's warnings, each once.
func warningCodes(r *stats.Row) (codes []string) {
	for _, w := range r.Warnings {
		if !slices.Contains(codes, w.Code) {
			codes = append(codes, w.Code)
		}
	}
	return codes
}

// nameCells names cells, or counts them if there are many. "Everywhere" means all cells with numbers.
func (m *Model) nameCells(cells []cell) string {
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
		names = append(names, c.String())
	}
	return words.And(names)
}

// Failure is an error and the trials that it ended.
type Failure struct {
	Error string
	Where []string
}

// failures groups the failed trials by their error.
func failures(trials []record.Trial) []Failure {
	var out []Failure
	for _, t := range trials {
		if t.Status == record.StatusOK {
			continue
		}
		f := findOrAdd(&out, func(f Failure) bool { return f.Error == t.Error }, Failure{Error: t.Error})
		f.Where = append(f.Where,
			fmt.Sprintf("%s, block %d, attempt %d", cell{t.Variant, t.Workload, t.Pairs, ""}, t.Block, t.Attempt))
	}
	return out
}
