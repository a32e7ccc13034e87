// Package report is what a virtual machine of test/kernels reports on its console.
package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
)

// Mark stands in front of a report's line among all else on the console.
const Mark = "slipstream-kernels: "

// Report is the result of one boot.
type Report struct {
	// Release is the kernel's.
	Release string `json:"release"`
	// Unsupported says what the fast path lacks there, if it does not work.
	Unsupported string `json:"unsupported,omitempty"`
	// Tests ran if it works.
	Tests []Test `json:"tests,omitempty"`
	// Error says why there is no result.
	Error string `json:"error,omitempty"`
}

// Test is one run of a test program.
type Test struct {
	Name    string `json:"name"`
	Seconds int    `json:"seconds"`
	// Passed counts tests, subtests included.
	Passed int    `json:"passed"`
	Error  string `json:"error,omitempty"`
}

// Find returns the report on a console.
func Find(console []byte) (r Report, err error) {
	_, after, found := bytes.Cut(console, []byte(Mark))
	if !found {
		return r, errors.New("the machine ended without a report")
	}
	line, _, whole := bytes.Cut(after, []byte("\n"))
	if !whole {
		return r, errors.New("the machine ended in the midst of its report")
	}
	if err := json.Unmarshal(line, &r); err != nil {
		return r, fmt.Errorf("read a machine's report: %w", err)
	}
	return r, nil
}
