// Package report is what a virtual machine of test/kernels tells the one that boots it.
package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
)

// Mark stands in front of a report's line among all else on the console.
const Mark = "slipstream-kernels: "

// Report is what came of one boot.
type Report struct {
	// Release is the kernel's.
	Release string `json:"release"`
	// Refused is why the fast path does not work there, if it does not.
	Refused string `json:"refused,omitempty"`
	// Tests were run where it does.
	Tests []Test `json:"tests,omitempty"`
	// Error is why the machine could not find out.
	Error string `json:"error,omitempty"`
}

// Test is one test program's run.
type Test struct {
	Name    string `json:"name"`
	Seconds int    `json:"seconds"`
	Error   string `json:"error,omitempty"`
}

// Find takes the report out of what a console said.
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
