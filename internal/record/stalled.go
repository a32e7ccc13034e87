package record

// StalledError says how the connections of a trial stalled. That happens on a busy machine, or if a network drops everything
// for a while, so the same trial may succeed another time.
type StalledError string

// A connection stalls at the end of the window, or all of them throughout it.
const (
	StalledAtEnd StalledError = "a connection was stalled at the end of the window"
	NoAnswer     StalledError = "no answer arrived within the window"
)

func (e StalledError) Error() string { return string(e) }
