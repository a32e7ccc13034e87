package traffic

import "time"

// silence finds the longest time within a window during which an end moved nothing. It samples the counters at intervals,
// which adds no cost to a message. It counts only the time that was certainly silent: from the sample that showed the last
// change.
type silence struct {
	from, to int64
	// heard is the time of the last sample that showed a change, and moved holds its counters.
	heard   int64
	moved   Progress
	longest time.Duration
}

// interval returns the time between two samples. A shorter interval would wake the machine too often, and windows are
// rarely shorter than a second.
func (s *silence) interval() time.Duration {
	return min(time.Second, max(50*time.Millisecond, time.Duration(s.to-s.from)/16))
}

// look compares the counters at the time now with those of the last sample.
func (s *silence) look(now int64, moved Progress) {
	if moved != s.moved {
		s.heard, s.moved = now, moved
		return
	}
	s.longest = max(s.longest, time.Duration(min(now, s.to)-max(s.heard, s.from)))
}
