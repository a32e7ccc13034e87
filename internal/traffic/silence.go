package traffic

import "time"

// silence finds the longest time within a window in which an end moved nothing. It looks at the counters at intervals, so
// that no message pays for it, and counts only what is silent for certain: from the look that saw the last change.
type silence struct {
	from, to int64
	// heard is when a look last saw that something had moved, and moved what had until then.
	heard   int64
	moved   Progress
	longest time.Duration
}

// interval returns the time between two looks. Windows are rarely shorter than a second, and a machine is not to be woken
// all the time.
func (s *silence) interval() time.Duration {
	return min(time.Second, max(50*time.Millisecond, time.Duration(s.to-s.from)/16))
}

// look takes what has moved by now.
func (s *silence) look(now int64, moved Progress) {
	if moved != s.moved {
		s.heard, s.moved = now, moved
		return
	}
	s.longest = max(s.longest, time.Duration(min(now, s.to)-max(s.heard, s.from)))
}
