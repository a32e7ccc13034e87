package traffic

import "encoding/binary"

// A datagram of a stream begins with its number, from 1, and the time of sending on the sender's clock, in nanoseconds. The
// sender sets the bit measured in the number of each datagram that it counts as within its window. The receiver counts the same
// ones, whatever its own clock says.
const (
	datagramHeader = 16
	measured       = 1 << 63
)

func putHeader(b []byte, number uint64, inWindow bool, sent int64) {
	if inWindow {
		number |= measured
	}
	binary.LittleEndian.PutUint64(b, number)
	binary.LittleEndian.PutUint64(b[8:], uint64(sent))
}

// remembered is the size of the range below the highest number for which a receiver remembers which datagrams have arrived. It
// is a power of two, and covers 65 ms at a million datagrams per second.
const remembered = 1 << 16

// arrivals tracks the received datagrams of one connection.
type arrivals struct {
	counts
	// arrived counts the datagrams of the sender's window, whenever they arrive.
	arrived uint64
	highest uint64
	// seen holds a bit for each number in (highest-remembered, highest].
	seen [remembered / 64]uint64
	// transit is the arrival time of the last datagram minus its time of sending, in nanoseconds. It includes the offset
	// between the clocks, but differences of it do not.
	transit int64
}

// counts never decrease, so the counts of a window are the differences between its edges.
type counts struct {
	// reordered counts datagrams that arrived after one with a higher number (RFC 4737, section 3.3).
	reordered uint64
	// duplicates counts datagrams that had arrived before.
	duplicates uint64
	// moved is the sum of all changes of the transit time, in nanoseconds, and moves is their number. Their mean is the jitter
	// that RFC 3550, section 6.4.1, estimates from about the last sixteen.
	moved, moves uint64
}

// take records a datagram that arrived at now, and reports whether it is new. One whose number is no longer remembered counts
// as new.
func (a *arrivals) take(header []byte, now int64) bool {
	marked := binary.LittleEndian.Uint64(header)
	number := marked &^ measured
	first, late := a.highest == 0, number <= a.highest
	switch {
	case !late:
		a.forget(a.highest+1, number)
		a.highest = number
	case a.highest-number < remembered && a.has(number):
		a.duplicates++
		return false
	default:
		a.reordered++
	}
	if a.highest-number < remembered {
		word, bit := a.at(number)
		*word |= bit
	}
	if marked&measured != 0 {
		a.arrived++
	}
	transit := now - int64(binary.LittleEndian.Uint64(header[8:]))
	if !first {
		change := transit - a.transit
		a.moved += uint64(max(change, -change))
		a.moves++
	}
	a.transit = transit
	return true
}

func (a *arrivals) has(number uint64) bool {
	word, bit := a.at(number)
	return *word&bit != 0
}

// forget clears the bits of the numbers from low to high, which have not arrived yet.
func (a *arrivals) forget(low, high uint64) {
	if high-low >= remembered {
		a.seen = [len(a.seen)]uint64{}
		return
	}
	for number := low; number <= high; number++ {
		word, bit := a.at(number)
		*word &^= bit
	}
}

func (a *arrivals) at(number uint64) (word *uint64, bit uint64) {
	return &a.seen[number/64%uint64(len(a.seen))], 1 << (number % 64)
}
