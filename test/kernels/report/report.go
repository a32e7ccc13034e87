// Package report defines the report that a virtual machine of test/kernels prints on its console.
package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
)

// Mark precedes the report, to find its line among the other console output.
const Mark = "slipstream-kernels: "

// Report is the result of one boot.
type Report struct {
	// Release is the kernel's release.
	Release string `json:"release"`
	// Unsupported explains what the fast path lacks, if it does not work.
	Unsupported string `json:"unsupported,omitempty"`
	// Tests are the results of the tests, which run only if the fast path works.
	Tests []Test `json:"tests,omitempty"`
	// Error explains why there is no result.
	Error string `json:"error,omitempty"`
}

// Test is one run of a test program.
type Test struct {
	Name    string `json:"name"`
	Seconds int    `json:"seconds"`
	// Passed is the number of passed tests, including subtests.
	Passed int    `json:"passed"`
	Error  string `json:"error,omitempty"`
}

// Find returns the report in a console's output.
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
