package record

import "strings"

// Errors of a trial whose connections stalled.
const (
	StalledAtEnd = "a connection was stalled at the end of the window"
	NoAnswer     = "no answer arrived within the window"
)

// Stalled reports whether the error of a trial, or the output of a run that ends with it, says that connections stalled: one at the
// end of the window, or all of them throughout it. That happens on a busy machine, and a run repeats the trial.
func Stalled(text string) bool {
	return strings.Contains(text, StalledAtEnd) || strings.Contains(text, NoAnswer)
}
