// Package testenv provides what tests of several packages need: skips where the machine lacks something, network
// namespaces, files, and retries. Only tests import it.
package testenv

import (
	"os"
	"path/filepath"
	"testing"
	"time"
	"unsafe"
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

// Stepped returns what time.Now would have returned instead of now if the wall clock had been stepped by whole seconds. The
// monotonic reading is the same. There is none in a bubble of testing/synctest.
func Stepped(now time.Time, by time.Duration) time.Time {
	// The first word of a time.Time with a monotonic reading has a flag, 33 bits of seconds, and 30 of nanoseconds.
	wall := (*uint64)(unsafe.Pointer(&now))
	if *wall>>63 == 0 {
		panic("a time without a monotonic reading")
	}
	*wall += uint64(by/time.Second) << 30
	return now
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
