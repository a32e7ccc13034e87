// Package process is about the process that this program is: what its Go runtime
// does beside it, and the memory it holds. It knows nothing of what the process is
// for; the worker and the agent, which share a machine with what they measure or
// serve, call it when they begin, and the worker for what it does then.
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

// goPercent is what Go has where nothing is set.
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
	stop, before := paces.want(&paces.eager), allocated()
	return func() {
		stop()
		if now := allocated(); now-before > restGarbage {
			debug.FreeOSMemory()
			collected.Store(now)
		}
	}
}

// CollectingAsUsual has garbage be collected as in a program that sets nothing, until the function that
// it returns is called: for what is measured and stands for such programs.
func CollectingAsUsual() (end func()) { return paces.want(&paces.usual) }

// pace is when garbage is collected: at so many percent of growth, and at a limit of memory before that.
type pace struct {
	percent int
	limit   int64
}

// set has garbage be collected at this pace, and returns the one before.
func (p pace) set() pace { return pace{debug.SetGCPercent(p.percent), debug.SetMemoryLimit(p.limit)} }

// wishes are those for another pace than at rest. They need not end in the order in which they began.
type wishes struct {
	mu           sync.Mutex
	eager, usual int // how many there are of each
	rest, now    pace
}

var paces wishes

// want adds one of a kind of wishes, until the function that it returns is called.
func (w *wishes) want(kind *int) (end func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.eager+w.usual == 0 {
		w.rest = pace{-1, -1}.set() // a limit below 0 leaves it as it is
		w.now = pace{-1, w.rest.limit}
	}
	*kind++
	w.settle()
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		*kind--
		w.settle()
	}
}

// settle has the usual pace where anyone wishes for it, as what is measured does. What stays is not set
// again: that would stop all threads.
func (w *wishes) settle() {
	p := w.rest
	switch {
	case w.usual > 0:
		p = pace{goPercent, math.MaxInt64}
	case w.eager > 0:
		p.percent = collectAt
	}
	if p != w.now {
		p.set()
		w.now = p
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
