package target

import (
	"net/netip"
	"time"

	"slipstream.dev/api/v1alpha1"
)

// Traffic is what one end of a pair is asked to make.
type Traffic struct {
	// Place is the end's own, for its record.
	Place    string
	Workload v1alpha1.Workload
	// Address to bind (a server; with port 0 one is chosen for it) or to connect to.
	Address           netip.AddrPort
	CongestionControl string
	// Secret of the trial, by which a server knows its clients.
	Secret [16]byte
}

// Steering is what accelerators are asked to do in one place.
type Steering struct {
	Place        Place
	Accelerators []v1alpha1.Accelerator
	// Owner holds the settings in the journal.
	Owner string
}

// Ready is called by a worker's method once everything is set up: a server
// listens on port, a client is connected, a sampler is armed. It waits for all
// the others, and returns when the traffic starts.
type Ready func(port uint16) (start time.Time, err error)
