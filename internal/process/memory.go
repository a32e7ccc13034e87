// Package process manages the process of this program: the activity of its Go runtime, its memory, and its right to load eBPF programs.
// It does not know the purpose of the process. The worker and the agent call it when they begin, because they
// share a machine with what they measure or serve. The worker also calls it around each measurement.
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

// collectAt is the heap growth, in percent, that starts a garbage collection. It is low because a machine may
// have a hundred workers, each with little to do between trials.
const collectAt = 25

// goPercent is GOGC if nothing sets it, in percent.
const goPercent = 100

// Bytes of garbage that justify a collection at rest, and the memory limit of Go without such collections.
const (
	restGarbage = 1 << 20
	restLimit   = 64 << 20
)

// CollectAtRest makes this process collect garbage only in Rest, as long as its memory is below 64 MiB. A
// collection waits until all threads that run Go code notice it, and yields the CPU meanwhile. Workers that
// do the same work collect at the same time. If traffic fills the CPUs as well, they may wait long: on Linux
// 6.18, 32 of them yielded without any progress for minutes.
func CollectAtRest() {
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(restLimit)
	collected.Store(allocated())
}

// Collecting turns garbage collection on, at the growth collectAt, until the returned function is called, which
// frees the remaining garbage. It is for work that makes much garbage while nothing is measured.
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

// CollectingAsUsual sets Go's defaults for garbage collection until the returned function is called. Measured
// traffic uses it if ordinary Go programs would run with the defaults.
func CollectingAsUsual() (end func()) { return collection.request(&collection.usual) }

// gcSettings are GOGC, in percent, and GOMEMLIMIT, in bytes.
type gcSettings struct {
	percent int
	limit   int64
}

// set applies the settings, and returns the previous ones.
func (s gcSettings) set() gcSettings {
	return gcSettings{debug.SetGCPercent(s.percent), debug.SetMemoryLimit(s.limit)}
}

// gcRequests counts the pending requests for settings other than those at rest. They may end in any order.
type gcRequests struct {
	mu           sync.Mutex
	eager, usual int // number of pending requests of each kind
	rest, now    gcSettings
}

var collection gcRequests

// request adds a request of a kind, until the returned function is called.
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

// apply sets what the requests ask for. The usual settings take precedence over eager ones, because a
// measurement has asked for them. It does not set what is set already, because that would stop all threads.
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

// collected is the total of allocated bytes when garbage was last collected at rest.
var collected atomic.Uint64

func allocated() uint64 {
	s := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64()
}

// Rest gives back memory while nothing is measured: garbage, if there is much, and the pages of the program
// itself. The threshold differs by up to 2 MiB between processes, so that those that do the same work do not
// collect at once.
func Rest() error {
	much := restGarbage + uint64(os.Getpid()%32)<<16
	if now := allocated(); now-collected.Load() > much {
		collected.Store(now)
		runtime.GC()
	}
	return releaseProgram()
}
