package report

import (
	"fmt"

	"slipstream.dev/internal/stats"
	"slipstream.dev/internal/words"
)

// Expected is one expectation with its outcome and the comparisons that decided it.
type Expected struct {
	Claim   string
	Outcome stats.Outcome
	Why     string
}

func expectations(all []stats.Expected) []Expected {
	var out []Expected
	for _, x := range all {
		out = append(out, Expected{x.Claim, x.Outcome, whyExpected(x)})
	}
	return out
}

// whyExpected explains the outcome of an expectation.
func whyExpected(x stats.Expected) string {
	switch more := len(x.Decided) - few; {
	case len(x.Rows) == 0:
		return "its comparison was not measured"
	case len(x.Decided) == 0:
		return "no comparison for " + words.And(x.Missing)
	case more > 0:
		return fmt.Sprintf("%s, and %d more", describeFew(x.Decided), more)
	}
	return describeFew(x.Decided)
}

// Text returns the outcome as a sentence: "Expected that …: met; …."
func (e Expected) Text() string {
	return fmt.Sprintf("Expected that %s: %s; %s.", e.Claim, e.Outcome, e.Why)
}
