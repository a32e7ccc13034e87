package traffic

import "time"

// silence finds the longest time within a window during which an end moved nothing. It looks at the counters at
// intervals, so that no message pays for it, and counts only what is silent for certain: from the look that saw the
// last change.
type silence struct {
	from, to int64
	// heard is the time of the last look that saw a change, and moved the counters that it saw.
	heard   int64
	moved   Progress
	longest time.Duration
}

// interval returns the time between two looks. Windows are rarely shorter than a second, and a machine is not to be woken
// all the time.
func (s *silence) interval() time.Duration {
	return min(time.Second, max(50*time.Millisecond, time.Duration(s.to-s.from)/16))
}

// look compares the counters at the time now with those of the last look.
func (s *silence) look(now int64, moved Progress) {
	if moved != s.moved {
		s.heard, s.moved = now, moved
		return
	}
	s.longest = max(s.longest, time.Duration(min(now, s.to)-max(s.heard, s.from)))
}
