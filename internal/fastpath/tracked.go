//go:build linux

package fastpath

import "slipstream.dev/internal/fastpath/datapath"

// Tracked is the conntrack entry of a connection.
type Tracked struct {
	State uint8
	// Flags has the flags of the original and of the reply direction. Timeout is in seconds.
	Flags   [2]uint8
	Timeout uint32
}

// Conntrack returns the conntrack entry of a connection in the calling thread's network namespace, or
// zero if there is none.
func Conntrack(f datapath.Flow) (Tracked, error) {
	t, err := lookUp(f)
	if err != nil || t == nil {
		return Tracked{}, err
	}
	return Tracked{t.state, t.flags, t.timeout}, nil
}
