package record

// StalledError says how the connections of a trial stalled. That happens on a busy machine, or if a network drops
// everything for a while, so the trial may succeed if it is repeated.
type StalledError string

// Either a connection was stalled when the window ended, or all connections were stalled throughout it.
const (
	StalledAtEnd StalledError = "a connection was stalled at the end of the window"
	NoAnswer     StalledError = "no answer arrived within the window"
)

func (e StalledError) Error() string { return string(e) }
