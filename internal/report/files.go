package report

import "io"

// File is a file of a results folder that is computed from its trials.
type File struct {
	// Name has slashes: "figures/cpu.svg".
	Name  string
	Write func(io.Writer) error
}

// Files returns what a results folder has besides what was measured.
func (m *Model) Files() []File {
	var all []File
	for _, f := range []Format[*Model]{{Name: "summary.json", Write: JSON}, {Name: "summary.csv", Write: CSV}, {Name: "report.html", Write: HTML}} {
		all = append(all, File{f.Name, func(w io.Writer) error { return f.Write(w, m) }})
	}
	for _, f := range m.Figures {
		all = append(all, File{"figures/" + f.Name + ".svg", func(w io.Writer) error { return f.Write(w, "svg") }})
	}
	return all
}
