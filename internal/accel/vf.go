package accel

import (
	"context"
	"strings"
	"sync"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
)

// vfKind verifies that packets take the virtual functions (VFs) of the node's NICs. It changes no settings.
type vfKind struct{}

// Plan implements Kind.
func (vfKind) Plan(p *Plan, a v1alpha1.PolicyAccelerator) error {
	p.Run(a)
	return nil
}

// Probe implements Kind. Every machine can do it: if no NIC can have a VF, State reports that.
func (vfKind) Probe(context.Context) error { return nil }

// Open implements Kind.
func (vfKind) Open(h Host) Runner { return &vfRunner{options: h.Options} }

// vfRunner reads the counters of the NICs from time to time.
type vfRunner struct {
	options Options

	// mu guards the fields that Samples reads. known is nil while no policy wants VFs verified.
	mu    sync.Mutex
	known *vfs
	lost  int
}

// Plan implements Runner.
func (*vfRunner) Plan(v1alpha1.PolicyAccelerator) ([]record.Setting, error) { return nil, nil }

// Start implements Runner.
func (*vfRunner) Start(v1alpha1.PolicyAccelerator) error { return nil }

// Keep implements Runner.
func (v *vfRunner) Keep(_ context.Context, want *v1alpha1.PolicyAccelerator, _ *Kept) error {
	if want == nil {
		return v.Stop()
	}
	v.read(time.Now())
	return nil
}

// Verify implements Runner.
func (v *vfRunner) Verify(at time.Time) {
	if v.now() != nil {
		v.read(at)
	}
}

// Stop implements Runner.
func (v *vfRunner) Stop() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.known = nil
	return nil
}

func (v *vfRunner) now() *vfs {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.known
}

// read reads the NICs, unless the last time was less than half a verification interval ago: a shorter window would show too few
// packets.
func (v *vfRunner) read(at time.Time) {
	known := v.now()
	if known == nil {
		known = new(vfs)
	} else if at.Sub(known.at) < v.options.Verify/2 {
		return
	}
	now, uses := known.after(v.options.NICs(), at)
	lost := 0
	for _, u := range uses {
		if u.Change == record.VFWithdrawn || u.Change == record.VFInterrupted {
			lost++
		}
	}
	v.mu.Lock()
	v.known = &now
	v.lost += lost
	v.mu.Unlock()
	for _, u := range uses {
		if u.Change == record.VFInterrupted { // the VF is back, so the state does not show the loss
			v.options.Notify(Event{true, v1alpha1.ReasonVFWithdrawn, u.NIC + " lost its virtual function " + u.VF + ", and has it again"})
		}
	}
}

// State implements Runner.
func (v *vfRunner) State() *State {
	if known := v.now(); known != nil {
		return known.state()
	}
	return nil
}

// Metrics of virtual functions.
var (
	vfWithdrawn = &Metric{Name: "slipstream_vf_withdrawals_total", Help: "Times that a NIC lost a virtual function that was up, also if it came back. Counted while a policy has vf."}
	vfState     = &Metric{"slipstream_vf_state", "1 for the current state of a NIC's virtual function, 0 for the others: used, present, idle, absent or withdrawn. Present while a policy has vf.", []string{"nic", "state"}}
)

// Metrics implements Kind.
func (vfKind) Metrics() []*Metric { return []*Metric{vfWithdrawn, vfState} }

// Samples implements Runner.
func (v *vfRunner) Samples(s *State, emit func(Sample)) {
	v.mu.Lock()
	lost, known := v.lost, v.known
	v.mu.Unlock()
	emit(Sample{Metric: vfWithdrawn, Value: float64(lost)})
	if s == nil || known == nil {
		return
	}
	for name, vf := range known.of {
		for _, r := range vfReasons {
			emit(Sample{Metric: vfState, Value: Flag(r == vf.reason), Values: []string{name, strings.ToLower(strings.TrimPrefix(r, "VF"))}})
		}
	}
}

// Counts implements Runner. It has no counters: a trial counts the packets of virtual functions in any case.
func (*vfRunner) Counts() (map[string]uint64, error) { return nil, nil }
