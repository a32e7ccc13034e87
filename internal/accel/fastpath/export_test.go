//go:build linux

package fastpath

import (
	"fmt"
	"reflect"
	"time"

	"slipstream.dev/bpf"
)

// SleepAfter has every fast path sleep after so many beats without a connection, and returns
// after how many it did.
func SleepAfter(beats int) (before int) {
	before, idleAfter = idleAfter, beats
	return before
}

// ForgetAfter has every fast path forget a connection that is idle for so many beats, and
// returns after how many it did.
func ForgetAfter(beats int) (before int) {
	before, forgetAfter = forgetAfter, beats
	return before
}

// Look is the time from one look at all connections to the next.
const Look = sweepEvery * leaseRenewal

// Within is within.
var Within = within

// WatchAll has it watch all pods, as if each had a connection.
func (f *Fastpath) WatchAll() {
	f.mu.Lock()
	veths := f.node.veths
	f.mu.Unlock()
	for _, link := range veths {
		f.attach(link)
	}
}

// Sleep has it fall asleep now, whatever it carries.
func (f *Fastpath) Sleep() {
	f.pods.mu.Lock()
	clear(f.pods.used)
	f.pods.mu.Unlock()
	poke(f.rescan)
}

// Sequence are what it knows of a connection of TCP.
func (f *Fastpath) Numbers(flow bpf.Flow) (bpf.Sequence, error) { return f.sequence(flow) }

// Generation counts how often all that was seen became void.
func (f *Fastpath) Generation() int {
	f.changes.mu.Lock()
	defer f.changes.mu.Unlock()
	return int(f.changes.generation)
}

// ChangesWithin has links whose owners change too often have none for so long, and returns for how
// long they had none.
func ChangesWithin(d time.Duration) (before time.Duration) {
	before, changesWithin = changesWithin, d
	return before
}

// Look has the devices be looked at, as if something had changed.
func (f *Fastpath) Look() { poke(f.rescan) }

// Looked tells the last look at the devices from others, and how long there is to be none after it.
func (f *Fastpath) Looked() (which uintptr, pause time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return reflect.ValueOf(f.node.names).Pointer(), f.pause
}

// Describe tells all that is known, for a test that fails.
func (f *Fastpath) Describe() string {
	counts, err := f.Counts()
	flows, failed := f.programs.Flows()
	now, _ := monotonic()
	f.mu.Lock()
	veths := len(f.node.veths)
	f.mu.Unlock()
	said := fmt.Sprintf("%v %v, generation %d, problem %v, refused %q, %d veths, repaired %d, counts %v",
		err, failed, f.Generation(), f.Problem(), f.Skipped(), veths, f.Repaired(), counts)
	for flow, seen := range flows {
		n, err := f.programs.Sequence(flow, now)
		said += fmt.Sprintf("\n  %v seen %s ago at %d, numbers %v %v", flow, now-seen.Validated, seen.Link, n, err)
	}
	return said
}
