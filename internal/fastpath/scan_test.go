//go:build linux

package fastpath_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/fastpath"
	"slipstream.dev/internal/spec"
)

// TestFailedScan makes scans of the devices fail. Each must be repeated, although nothing announces another change. Meanwhile the
// programs must not forward, unless a change interrupted one scan.
func TestFailedScan(t *testing.T) { // not parallel: it replaces the scan of all fast paths
	noMemory, interrupted := errors.New("no memory"), fmt.Errorf("list links: %w", netlink.ErrDumpInterrupted)
	want := []struct {
		fails   error
		problem bool
	}{{noMemory, true}, {nil, false}, {interrupted, false}, {interrupted, true}, {nil, false}, {interrupted, false}, {nil, false}}
	var mu sync.Mutex
	var path *fastpath.Fastpath
	var problems []bool // after the last scan of each step
	t.Cleanup(fastpath.ScanBy(func(f *fastpath.Fastpath, scan func() error) error {
		mu.Lock()
		defer mu.Unlock()
		if f != path || len(problems) > len(want) {
			return scan()
		}
		problems = append(problems, f.Problem() != nil)
		if len(problems) <= len(want) && want[len(problems)-1].fails != nil {
			return want[len(problems)-1].fails
		}
		return scan()
	}))
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	w.start()
	e := w.connect().back()
	w.accelerate(e)
	begin := func() {
		mu.Lock()
		defer mu.Unlock()
		path = w.paths[0]
	}
	begin()
	steps := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(problems)
	}
	began := time.Now()
	for i := range want {
		if i == 0 || want[i-1].fails == nil {
			w.paths[0].Rescan()
		}
		w.eventually(fmt.Sprintf("scan %d", i), nil, func() bool { return steps() > i })
	}
	w.eventually("another scan", w.paths[0].Rescan, func() bool { return steps() > len(want) })
	if took := time.Since(began); took > 2*fastpath.SweepInterval { // something else causes a scan after some time
		t.Errorf("the scans took %s", took)
	}
	for i, step := range want {
		if problems[i+1] != step.problem {
			t.Errorf("after scan %d, which failed with %v, there is a problem: %v", i, step.fails, problems[i+1])
		}
	}
	w.accelerate(e)
}
