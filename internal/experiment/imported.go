package experiment

import (
	"slices"

	"slipstream.dev/internal/record"
)

// Imported computes the metrics and warnings of a trial that another program has measured,
// from its pairs and hosts. c has the workload as that program ran it.
func Imported(c Cell, t *record.Trial) error {
	if err := fillMetrics(c, t); err != nil {
		return err
	}
	// Do not warn that CPUs were not sampled: imported files need not have them.
	others := slices.DeleteFunc(warnings(c, t), func(w record.Warning) bool { return w.Code == record.WarnNoCPUs })
	t.Warnings = append(t.Warnings, others...)
	return nil
}
