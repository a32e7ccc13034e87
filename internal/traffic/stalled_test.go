package traffic

import (
	"errors"
	"testing"
	"time"

	"slipstream.dev/internal/record"
)

// TestStalledAtEnd checks that a connection that moved nothing at the end of the window yields an error that a controller can
// recognise.
func TestStalledAtEnd(t *testing.T) {
	e := &End{conns: []*conn{new(conn)}}
	if _, err := e.result(); !errors.Is(err, record.StalledAtEnd) {
		t.Errorf("got %v", err)
	}
}

// TestSilence checks that a silence is the longest time within the window in which certainly nothing moved.
func TestSilence(t *testing.T) {
	for name, c := range map[string]struct {
		looks [][2]int64 // when, and what had moved
		want  time.Duration
	}{
		"always something":                       {[][2]int64{{5, 1}, {15, 2}, {25, 3}, {40, 4}}, 0},
		"an outage in the middle":                {[][2]int64{{12, 1}, {15, 1}, {20, 1}, {25, 2}, {30, 3}}, 8},
		"the window's end":                       {[][2]int64{{12, 1}, {20, 1}, {40, 1}}, 18},
		"before the window, and into it":         {[][2]int64{{2, 1}, {8, 1}, {15, 1}, {20, 2}, {30, 3}}, 5},
		"nothing at all":                         {[][2]int64{{20, 0}, {40, 0}}, 20},
		"what comes after the window is outside": {[][2]int64{{12, 1}, {29, 2}, {50, 2}}, 1},
	} {
		s := silence{from: 10, to: 30, heard: 10}
		for _, l := range c.looks {
			s.look(l[0], Progress{Messages: uint64(l[1])})
		}
		if s.longest != c.want {
			t.Errorf("%s: %d, want %d", name, s.longest, c.want)
		}
	}
}
