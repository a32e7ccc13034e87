// Package testenv provides what tests of several packages need: skips where the machine lacks something, network
// namespaces, files, and retries. Only tests import it.
package testenv

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// WriteFile writes a file, and makes its folder.
func WriteFile(t testing.TB, file, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// Eventually waits until lacking returns "". If that takes longer than within, the test fails with the text that lacking
// returned last. It calls lacking every 1/300 of within: every 200 ms for a minute.
func Eventually(t testing.TB, within time.Duration, what string, lacking func() string) {
	t.Helper()
	for deadline := time.Now().Add(within); ; time.Sleep(within / 300) {
		last := lacking()
		if last == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s: %s", what, within, last)
		}
	}
}

// Await is Eventually for a condition without a text.
func Await(t testing.TB, within time.Duration, what string, holds func() bool) {
	t.Helper()
	Eventually(t, within, what, func() string {
		if holds() {
			return ""
		}
		return "it does not hold"
	})
}

// Retry makes up to the given number of attempts, and fails with the error of the last. On a busy machine a thread may
// wait for a CPU at an edge of a window, or all through it.
func Retry(t testing.TB, attempts int, try func() error) {
	t.Helper()
	for n := 1; ; n++ {
		err := try()
		if err == nil {
			return
		}
		if n == attempts {
			t.Fatalf("attempt %d: %v", n, err)
		}
		t.Logf("attempt %d: %v", n, err)
	}
}
