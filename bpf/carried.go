//go:build linux

package bpf

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
)

// evidence is how long what was seen of the slow path is believed: EVIDENCE of fastpath.c.
const evidence = time.Second

// Carried counts the connections that are known, and those of them of which packets may
// take the fast path both ways at a time of CLOCK_MONOTONIC.
func (f *Fastpath) Carried(now time.Duration) (known, fast int, err error) {
	var generation uint32
	if err := f.objects.Generation.Get(&generation); err != nil {
		return 0, 0, fmt.Errorf("count connections of the fast path: %w", err)
	}
	may := func(seen uint64, in uint32) bool {
		return seen != 0 && in == generation && time.Duration(seen) > now-evidence
	}
	// In batches: one look-up each would be two system calls a connection.
	keys, values := make([]fastpathKey, 512), make([]fastpathFlow, 512)
	for cursor := new(ebpf.MapBatchCursor); ; {
		n, err := f.objects.Flows.BatchLookup(cursor, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return 0, 0, fmt.Errorf("count connections of the fast path: %w", err)
		}
		known += n
		for _, v := range values[:n] {
			if may(v.Out.Seen, v.Out.Generation) && may(v.In.Seen, v.In.Generation) {
				fast++
			}
		}
		if err != nil {
			return known, fast, nil // that was all
		}
	}
}
