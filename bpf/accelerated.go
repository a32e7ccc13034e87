//go:build linux

package bpf

import (
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// flowTTL is how long a flow stays valid after it was validated. FLOW_TTL of fastpath.c is a little
// less.
const flowTTL = time.Second

// TablesWorn reports whether three quarters of the encapsulation templates or of the pod links are used.
// The programs never reuse an index, so the caller must load them again in time.
func (f *Fastpath) TablesWorn() (bool, error) {
	o := &f.objects
	for _, of := range []struct {
		used *ebpf.Variable
		all  *ebpf.Map
	}{{o.TemplatesUsed, o.EncapTemplates}, {o.PodLinksUsed, o.PodLinks}} {
		var used uint32
		if err := of.used.Get(&used); err != nil {
			return false, fmt.Errorf("read the use of the fast path's tables: %w", err)
		}
		if used >= of.all.MaxEntries()/4*3 {
			return true, nil
		}
	}
	return false, nil
}

// Accelerated counts the known connections, and those of them that are accelerated at a time of
// CLOCK_MONOTONIC: TCP if it is valid in both directions, UDP in either.
func (f *Fastpath) Accelerated(now time.Duration) (known, fast int, err error) {
	var generation uint32
	if err := f.objects.Generation.Get(&generation); err != nil {
		return 0, 0, fmt.Errorf("count connections of the fast path: %w", err)
	}
	valid := func(validated uint64, in uint32) bool {
		return validated != 0 && in == generation && time.Duration(validated) > now-flowTTL
	}
	err = each(f.objects.Flows, func(k fastpathKey, v fastpathFlow) error {
		known++
		out, in := valid(v.Out.Validated, v.Out.Generation), valid(v.In.Validated, v.In.Generation)
		if out && in || k.Protocol == unix.IPPROTO_UDP && (out || in) {
			fast++
		}
		return nil
	})
	if err != nil {
		return 0, 0, fmt.Errorf("count connections of the fast path: %w", err)
	}
	return known, fast, nil
}
