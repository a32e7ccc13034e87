//go:build linux

package fastpath

import "slipstream.dev/bpf"

// Tracked is what conntrack knows of a connection.
type Tracked struct {
	State uint8
	// Flags are those of the original direction and of the reply, Timeout is in seconds.
	Flags   [2]uint8
	Timeout uint32
}

// Conntrack asks for a connection in the calling thread's network namespace.
func Conntrack(f bpf.Flow) (Tracked, error) {
	t, err := lookUp(f)
	if err != nil || t == nil {
		return Tracked{}, err
	}
	return Tracked{t.state, t.flags, t.timeout}, nil
}
