package netns

import (
	"errors"
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"
)

// TestDump: Dump repeats an interrupted list, but not for ever, and does not try again after any other error.
func TestDump(t *testing.T) {
	interrupted, other := fmt.Errorf("links: %w", netlink.ErrDumpInterrupted), errors.New("no permission")
	for _, c := range []struct {
		failures int
		err      error
		calls    int
	}{
		{0, nil, 1}, {3, interrupted, 4}, {9, interrupted, 10}, {10, interrupted, 10}, {1, other, 1},
	} {
		calls := 0
		all, err := Dump("links", func() ([]int, error) {
			if calls++; calls <= c.failures {
				return []int{calls}, c.err // an incomplete list
			}
			return []int{7, 8}, nil
		})
		switch fails := c.calls == c.failures; {
		case calls != c.calls:
			t.Errorf("%d times %v: %d calls, want %d", c.failures, c.err, calls, c.calls)
		case fails && (!errors.Is(err, c.err) || err.Error() != "list links: "+c.err.Error() || all != nil):
			t.Errorf("%d times %v: %v, %v", c.failures, c.err, all, err)
		case !fails && (err != nil || len(all) != 2):
			t.Errorf("%d times %v: %v, %v, want the whole list", c.failures, c.err, all, err)
		}
	}
}
