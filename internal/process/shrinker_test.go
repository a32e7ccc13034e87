//go:build linux

package process

import (
	"runtime"
	"slices"
	"testing"

	"slipstream.dev/internal/testenv"
)

// TestShrinker: unused memory is given back if there is much of it, and only then.
func TestShrinker(t *testing.T) {
	var s Shrinker
	size := func() int64 {
		t.Helper()
		if err := s.Shrink(); err != nil {
			t.Fatal(err)
		}
		n, err := resident()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	size()
	least := s.least
	const much = 64 << 20
	func() {
		garbage := slices.Repeat([]byte{1}, much)
		if n, err := resident(); err != nil || n < least+much/2 {
			t.Fatalf("%d bytes are resident with %d of garbage, %v", n, much, err)
		}
		runtime.KeepAlive(garbage)
	}()
	if n := size(); !testenv.Race && n > least+mayGrow {
		t.Errorf("%d bytes are resident, and were %d before there was garbage", n, least)
	}
	// Nothing has grown, so Shrink does nothing and least stays.
	s.least = 1 << 40
	if size(); s.least != 1<<40 {
		t.Error("memory was given back without need")
	}
}
