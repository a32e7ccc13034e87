package place

import (
	"net/netip"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/spec"
)

// Traffic is the traffic of one end of a pair.
type Traffic struct {
	// Place of this end, for its record.
	Place    string
	Workload spec.Workload
	// Address to bind (a server; port 0 lets the kernel choose one) or to connect to.
	Address netip.AddrPort
	// Ports is how many ports a server listens at, from that of its address on; 0 is one.
	Ports             int
	CongestionControl string
	// Secret of the trial, by which a server recognises its clients.
	Secret [16]byte
}

// Steering has the accelerators to apply in one place.
type Steering struct {
	Place        Place
	Accelerators []v1alpha1.Accelerator
	// Owner of the settings in the journal.
	Owner string
}

// Ready is called by a worker once it is set up: a server listens on port, a client is connected, a sampler
// is armed. It waits for all others, and returns the start time.
type Ready func(port uint16) (start time.Time, err error)
