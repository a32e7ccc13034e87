//go:build linux

package bpf

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
)

// flowTTL is how long what was seen of the slow path is believed: EVIDENCE of fastpath.c.
const flowTTL = time.Second

const udp = 17 // RFC 768, of IP's protocols

// TablesWorn tells whether three quarters of the places of other nodes, or of pods' links, have
// been used up. A place is not used twice, so somebody has to begin anew in time.
func (f *Fastpath) TablesWorn() (bool, error) {
	o := &f.objects
	for _, of := range []struct {
		used *ebpf.Variable
		all  *ebpf.Map
	}{{o.TemplatesUsed, o.EncapTemplates}, {o.PodLinksUsed, o.PodLinks}} {
		var used uint32
		if err := of.used.Get(&used); err != nil {
			return false, fmt.Errorf("ask how full the fast path's tables are: %w", err)
		}
		if used >= of.all.MaxEntries()/4*3 {
			return true, nil
		}
	}
	return false, nil
}

// Accelerated counts the connections that are known, and those of them of which packets may
// take the fast path at a time of CLOCK_MONOTONIC: a stream's both ways, datagrams'
// either.
func (f *Fastpath) Accelerated(now time.Duration) (known, fast int, err error) {
	var generation uint32
	if err := f.objects.Generation.Get(&generation); err != nil {
		return 0, 0, fmt.Errorf("count connections of the fast path: %w", err)
	}
	may := func(seen uint64, in uint32) bool {
		return seen != 0 && in == generation && time.Duration(seen) > now-flowTTL
	}
	// In batches: one look-up each would be two system calls a connection.
	keys, values := make([]fastpathKey, 512), make([]fastpathFlow, 512)
	for cursor := new(ebpf.MapBatchCursor); ; {
		n, err := f.objects.Flows.BatchLookup(cursor, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return 0, 0, fmt.Errorf("count connections of the fast path: %w", err)
		}
		known += n
		for i, v := range values[:n] {
			out, in := may(v.Out.Validated, v.Out.Generation), may(v.In.Validated, v.In.Generation)
			if out && in || keys[i].Protocol == udp && (out || in) {
				fast++
			}
		}
		if err != nil {
			return known, fast, nil // that was all
		}
	}
}
