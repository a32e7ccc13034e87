package report

import (
	"slices"

	"slipstream.dev/internal/report/draw"
	"slipstream.dev/internal/stats"
)

// Beside has two results in one page: the findings of each, the changes between them, and
// the differences of their setups.
type Beside struct {
	Changes
	Sides [2]*Model
	// Index is as in Model.
	Index string
}

// NewBeside shows two results. comparison compares the first with the second.
func NewBeside(before, after *Model, comparison *stats.Comparison) Beside {
	changes := Changes{Comparison: comparison, Setups: differences([2]*Model{before, after})}
	b := Beside{Changes: changes, Sides: [2]*Model{before.side(changes.Before.Name, "before-"), after.side(changes.After.Name, "after-")}}
	b.alignScales()
	return b
}

// alignScales gives bars that stand side by side the same scale.
func (b Beside) alignScales() {
	for _, p := range b.Pairs() {
		var all []draw.Ratio
		for side, t := range p.Sides {
			if t != nil {
				all = append(all, t.ratios(b.Sides[side])...)
			}
		}
		for _, t := range p.Sides {
			if t != nil {
				t.draw(draw.ScaleOf(all))
			}
		}
	}
	var all []draw.Ratio
	for _, m := range b.Sides {
		if m.Forest != nil {
			all = append(all, m.Forest.gains()...)
		}
	}
	for _, m := range b.Sides {
		if m.Forest != nil {
			m.Forest.draw(draw.ScaleOf(all))
		}
	}
}

// side returns a copy of the model for a page that shows two results: its tables say which
// result they belong to, its anchors have a prefix, and its bars can be drawn again.
func (m *Model) side(name, prefix string) *Model {
	own := *m
	own.Tables, own.Warnings, own.Forest = slices.Clone(m.Tables), slices.Clone(m.Warnings), m.forest()
	for i := range own.Tables {
		t := &own.Tables[i]
		t.ID, t.Of, t.Prefix = prefix+t.ID, name, prefix
		t.Rows = slices.Clone(t.Rows)
		for j := range t.Rows {
			t.Rows[j].Cells = slices.Clone(t.Rows[j].Cells)
		}
	}
	for i := range own.Warnings {
		own.Warnings[i].ID = prefix + own.Warnings[i].ID
	}
	return &own
}

// TablePair is the same table in both results. If only one of them has it, the other is nil.
type TablePair struct {
	Title string
	Sides [2]*Table
}

// Pairs returns the judged tables of both results, in the order of the first.
func (b Beside) Pairs() []TablePair {
	var out []TablePair
	for side, m := range b.Sides {
		for i := range m.Tables {
			t := &m.Tables[i]
			if !t.Judged {
				continue
			}
			pair := findOrAdd(&out, func(p TablePair) bool { return p.Title == t.Title }, TablePair{Title: t.Title})
			pair.Sides[side] = t
		}
	}
	return out
}

// Difference is a fact of the setup that differs between the two results.
type Difference struct {
	Name  string
	Sides [2]string
}

// differences returns how the setups of two runs differ.
func differences(sides [2]*Model) []Difference {
	var out []Difference
	for side, m := range sides {
		for _, fact := range m.facts() {
			both := findOrAdd(&out, func(d Difference) bool { return d.Name == fact.Name }, Difference{Name: fact.Name})
			both.Sides[side] = fact.Text
		}
	}
	return slices.DeleteFunc(out, func(d Difference) bool { return d.Sides[0] == d.Sides[1] })
}

// Facts that differ between any two runs.
const startedFact, commandFact = "Started", "Command"

// facts returns everything that a report says about its setup.
func (m *Model) facts() []Definition {
	out := []Definition{
		{"slipstream", m.Environment.Version}, {startedFact, date(m.Environment.Started)},
		{commandFact, m.Environment.Command}, {"Placement", m.Environment.Placement},
	}
	if lab := m.exp.Spec.Target.Lab; lab != nil {
		out = append(out, Definition{"Lab", lab.NIC.String()})
	}
	for _, v := range m.Variants {
		out = append(out, Definition{"Variant " + v.Name, v.Text})
	}
	for _, w := range m.Workloads {
		out = append(out, Definition{"Workload " + w.Name, w.Text})
	}
	for _, machine := range m.Machines {
		for _, f := range machine.Facts {
			out = append(out, Definition{machine.Nodes + ": " + f.Name, f.Text})
		}
	}
	return out
}
