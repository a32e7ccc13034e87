// Package process is about the process that this program is: what its Go runtime
// does beside it, and the memory it holds. It knows nothing of what the process is
// for; the worker and the agent, which share a machine with what they measure or
// serve, call it once when they begin.
package process

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync/atomic"
)

// collectAt is the growth, in percent, at which garbage is collected: there may
// be a hundred workers on a machine, each with little to do between trials.
const collectAt = 25

// What is worth a collection at rest, and what Go's memory may grow to without one.
const (
	restGarbage = 1 << 20
	restLimit   = 64 << 20
)

// CollectAtRest has this process collect garbage in Rest alone, as long as its memory is below
// 64 MiB. Who collects waits for threads that run Go code to take notice of it, and yields to
// others until they have. Workers that do the same collect at the same time, and where traffic
// fills the CPUs as well they may wait long: Linux 6.18 has then let 32 of them yield to nobody for
// minutes.
func CollectAtRest() {
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(restLimit)
	collected.Store(allocated())
}

// Collecting has garbage be collected as it comes, until the function that it returns is called,
// which gives back the rest of it: for what makes much of it while nothing is measured.
func Collecting() (end func()) {
	percent, before := debug.SetGCPercent(collectAt), allocated()
	return func() {
		debug.SetGCPercent(percent)
		if now := allocated(); now-before > restGarbage {
			debug.FreeOSMemory()
			collected.Store(now)
		}
	}
}

// collected is what had been allocated when garbage was last collected at rest.
var collected atomic.Uint64

func allocated() uint64 {
	s := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64()
}

// Rest gives back, where nothing is measured, what came before: garbage, if there is much,
// and the pages of the program itself. How much is much differs by 2 MiB from process to process,
// lest those that do the same collect at once.
func Rest() error {
	much := restGarbage + uint64(os.Getpid()%32)<<16
	if now := allocated(); now-collected.Load() > much {
		collected.Store(now)
		runtime.GC()
	}
	return ReleaseProgram()
}
