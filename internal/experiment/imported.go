package experiment

import (
	"slices"

	"slipstream.dev/internal/record"
)

// Imported fills in what a trial's pairs and hosts say together, its metrics and warnings,
// where another program has measured them. c has the workload as that program ran it.
func Imported(c Cell, t *record.Trial) error {
	if err := fill(c, t); err != nil {
		return err
	}
	// That CPUs were not sampled is no finding: the files need not say.
	t.Warnings = slices.DeleteFunc(warnings(c, t), func(w record.Warning) bool { return w.Code == record.WarnNoCPUs })
	return nil
}
