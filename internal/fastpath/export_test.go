//go:build linux

package fastpath

import (
	"context"
	"fmt"
	"reflect"
	"time"

	"slipstream.dev/internal/fastpath/datapath"
	"slipstream.dev/internal/netns"
)

// IdleAfter sets the number of lease renewals without a connection after which a fast path goes
// idle.
func IdleAfter(renewals int) { idleAfter = renewals }

// ForgetAfter sets the number of lease renewals after which an idle flow is deleted.
func ForgetAfter(renewals int) { forgetAfter = renewals }

// SweepInterval is the interval between two sweeps over all flows.
const SweepInterval = sweepEvery * leaseRenewal

// Within runs a function in a network namespace.
var Within = netns.Do

// AttachAll attaches the programs to the links of all pods, as if each had a connection.
func (f *Fastpath) AttachAll() {
	f.mu.Lock()
	veths := f.node.veths
	f.mu.Unlock()
	for _, link := range veths {
		f.attach(link)
	}
}

// ProbeRouted is Probe as on a kernel without VXLAN devices.
func ProbeRouted(ctx context.Context) error { return probe(ctx, false) }

// Requested returns for how many addresses programs have been requested.
func (f *Fastpath) Requested() int { return len(f.pods.wanted()) }

// Detecting reports whether the detector has its programs attached.
func (f *Fastpath) Detecting() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.detector.on && !f.detector.since.IsZero()
}

// DropsForged reports whether drop_forged is attached.
func (f *Fastpath) DropsForged() bool {
	f.dropForged.mu.Lock()
	defer f.dropForged.mu.Unlock()
	return f.dropForged.attached != nil
}

// VerifyAfter makes a change, and verifies the attachments before the fast path has noticed it.
func (f *Fastpath) VerifyAfter(change func()) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
	return netns.Do(f.ns, func() error { return f.attachPrograms(true) })
}

// GoIdle makes the fast path go idle now, whatever connections it accelerates.
func (f *Fastpath) GoIdle() {
	f.pods.mu.Lock()
	clear(f.pods.links)
	f.pods.mu.Unlock()
	poke(f.rescan)
}

// SequenceNumbers returns the sequence numbers of a TCP flow.
func (f *Fastpath) SequenceNumbers(flow datapath.Flow) (datapath.Sequence, error) {
	now, err := datapath.Now()
	if err != nil {
		return datapath.Sequence{}, err
	}
	return f.programs.Sequence(flow, now)
}

// ResyncAccelerated resynchronises conntrack with a connection that stays accelerated.
func (f *Fastpath) ResyncAccelerated(flow datapath.Flow, n datapath.Sequence) error {
	return netns.Do(f.ns, func() error { return f.entries.Resync(flow, n, true) })
}

// Handle handles an event that asks for an update of the conntrack entry of a connection.
func (f *Fastpath) Handle(kind datapath.EventKind, flow datapath.Flow) error {
	return netns.Do(f.ns, func() error { return f.handle(datapath.Event{Kind: kind, Flow: flow}) })
}

// Generation returns the generation, which counts how often all flows have been invalidated.
func (f *Fastpath) Generation() int {
	f.changes.mu.Lock()
	defer f.changes.mu.Unlock()
	return int(f.changes.generation)
}

// ChangesWithin sets how long a link whose owners change too often stays throttled, and returns the
// previous value.
func ChangesWithin(d time.Duration) (before time.Duration) {
	before, changesWithin = changesWithin, d
	return before
}

// Rescan makes the fast path scan the devices, as after a change.
func (f *Fastpath) Rescan() { poke(f.rescan) }

// ScanBy makes fast paths that start later scan the devices by do, which gets their own scan, until restore.
func ScanBy(do func(f *Fastpath, scan func() error) error) (restore func()) {
	scan = func(f *Fastpath) error { return do(f, f.sync) }
	return func() { scan = (*Fastpath).sync }
}

// SourcePorts returns the range of source ports for which the programs are configured.
func (f *Fastpath) SourcePorts() [2]uint16 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.node.ports
}

// LastScan returns a value that identifies the last scan, and the minimum pause after that scan.
func (f *Fastpath) LastScan() (which uintptr, pause time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return reflect.ValueOf(f.node.names).Pointer(), f.pause
}

// Describe returns the whole state, for the log of a failed test.
func (f *Fastpath) Describe() string {
	counts, err := f.Counts()
	flows, failed := f.programs.Flows()
	now, _ := datapath.Now()
	f.mu.Lock()
	veths := len(f.node.veths)
	f.mu.Unlock()
	s := fmt.Sprintf("%v %v, generation %d, problem %v, skipped %q, %d veths, repaired %d, counts %v",
		err, failed, f.Generation(), f.Problem(), f.Skipped(), veths, f.Repaired(), counts)
	for flow, seen := range flows {
		n, err := f.programs.Sequence(flow, now)
		s += fmt.Sprintf("\n  %v validated %s ago at link %d, sequence numbers %v %v", flow, now-seen.Validated, seen.Link, n, err)
	}
	return s
}
