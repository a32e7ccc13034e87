//go:build linux

package fastpath

import (
	"slices"
	"testing"
	"time"
)

// TestDetector checks that sampling is on for a while when there are packets, and that the pauses
// in between grow as long as packets continue.
func TestDetector(t *testing.T) {
	var s detector
	now, sum := time.Now(), uint64(1000)
	var turns []time.Duration
	began := now
	pass := func(d time.Duration, perGlance uint64) {
		for end := now.Add(d); now.Before(end); now = now.Add(detectEvery) {
			sum += perGlance
			if s.update(now, sum) {
				turns = append(turns, now.Sub(began))
			}
		}
	}
	want := func(what string, at ...time.Duration) {
		t.Helper()
		if !slices.Equal(turns, at) {
			t.Fatalf("%s: switched at %v, want %v", what, turns, at)
		}
		turns, began = nil, now
	}
	const on, off = detectFor, detectPause
	pass(detectEvery, 0)
	want("packets before the start")
	pass(time.Minute, busyPackets-1)
	want("few packets")
	pass(34*time.Second, busyPackets)
	want("many packets", 0, on, on+off, 2*on+off, 2*on+3*off, 3*on+3*off, 3*on+7*off, 4*on+7*off,
		4*on+15*off, 5*on+15*off, 5*on+23*off, 6*on+23*off, 6*on+31*off, 7*on+31*off)
	pass(time.Minute, 0)
	want("no packets")
	pass(2*time.Second, busyPackets)
	want("many packets again", 0, on, on+off, 2*on+off)
}
