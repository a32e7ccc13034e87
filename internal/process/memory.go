// Package process is about the process that this program is: what its Go runtime
// does beside it, and the memory it holds. It knows nothing of what the process is
// for; the worker and the agent, which share a machine with what they measure or
// serve, call it when they begin, and the worker around what it measures.
package process

import (
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"sync/atomic"
)

// collectAt is the growth, in percent, at which garbage is collected: there may
// be a hundred workers on a machine, each with little to do between trials.
const collectAt = 25

// goPercent is GOGC where nothing sets it.
const goPercent = 100

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
	stop, before := collection.request(&collection.eager), allocated()
	return func() {
		stop()
		if now := allocated(); now-before > restGarbage {
			debug.FreeOSMemory()
			collected.Store(now)
		}
	}
}

// CollectingAsUsual sets Go's defaults for garbage collection, until the function that it returns is called.
// Measured traffic uses it if ordinary Go programs would run with the defaults.
func CollectingAsUsual() (end func()) { return collection.request(&collection.usual) }

// gcSettings are GOGC, in percent, and GOMEMLIMIT, in bytes.
type gcSettings struct {
	percent int
	limit   int64
}

// set applies the settings, and returns those before.
func (s gcSettings) set() gcSettings {
	return gcSettings{debug.SetGCPercent(s.percent), debug.SetMemoryLimit(s.limit)}
}

// gcRequests are the pending requests for other settings than at rest. They may end in any order.
type gcRequests struct {
	mu           sync.Mutex
	eager, usual int // how many there are of each
	rest, now    gcSettings
}

var collection gcRequests

// request adds one of a kind, until the function that it returns is called.
func (r *gcRequests) request(kind *int) (end func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.eager+r.usual == 0 {
		r.rest = gcSettings{-1, -1}.set() // a limit below 0 leaves it as it is
		r.now = gcSettings{-1, r.rest.limit}
	}
	*kind++
	r.apply()
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		*kind--
		r.apply()
	}
}

// apply sets what the requests ask for: the usual settings before eager ones, because a measurement has asked
// for them. It sets nothing that is set already: that would stop all threads.
func (r *gcRequests) apply() {
	s := r.rest
	switch {
	case r.usual > 0:
		s = gcSettings{goPercent, math.MaxInt64}
	case r.eager > 0:
		s.percent = collectAt
	}
	if s != r.now {
		s.set()
		r.now = s
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
	return releaseProgram()
}
