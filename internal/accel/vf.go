package accel

import (
	"context"
	"strings"
	"sync"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
)

// vfKind verifies that packets take the virtual functions (VFs) of the node's NICs. It changes nothing.
type vfKind struct{}

// Plan is Kind's.
func (vfKind) Plan(p *Plan, a v1alpha1.PolicyAccelerator) error {
	p.Run(a)
	return nil
}

// Probe is Kind's: that no NIC may have a VF is for the state to tell.
func (vfKind) Probe(context.Context) error { return nil }

// Open is Kind's.
func (vfKind) Open(h Host) Runner { return &vfRunner{options: h.Options} }

// vfRunner looks at the NICs from time to time.
type vfRunner struct {
	options Options

	// mu guards what metrics read too. known is nil while nobody wants it verified.
	mu    sync.Mutex
	known *vfs
	lost  int
}

// Plan is Runner's.
func (*vfRunner) Plan(v1alpha1.PolicyAccelerator) ([]record.Setting, error) { return nil, nil }

// Start is Runner's.
func (*vfRunner) Start(v1alpha1.PolicyAccelerator) error { return nil }

// Keep is Runner's.
func (v *vfRunner) Keep(_ context.Context, want *v1alpha1.PolicyAccelerator, _ *Kept) error {
	if want == nil {
		return v.Stop()
	}
	v.look(time.Now())
	return nil
}

// Verify is Runner's.
func (v *vfRunner) Verify(at time.Time) {
	if v.now() != nil {
		v.look(at)
	}
}

// Stop is Runner's.
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

// look looks at the NICs. Calls between two verifications do not cut a window short.
func (v *vfRunner) look(at time.Time) {
	known := v.now()
	if known == nil {
		known = new(vfs)
	} else if at.Sub(known.at) < v.options.Verify/2 {
		return
	}
	now, uses := known.look(v.options.NICs(), at)
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
		if u.Change == record.VFInterrupted { // it is back, so that no state tells
			v.options.Notify(Event{true, v1alpha1.ReasonVFWithdrawn, u.NIC + " lost its virtual function " + u.VF + ", and has it again"})
		}
	}
}

// State is Runner's.
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

// Metrics is Kind's.
func (vfKind) Metrics() []*Metric { return []*Metric{vfWithdrawn, vfState} }

// Samples is Runner's.
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
			emit(Sample{Metric: vfState, Value: number(r == vf.reason), Values: []string{name, strings.ToLower(strings.TrimPrefix(r, "VF"))}})
		}
	}
}

// Counts is Runner's: a trial counts packets of virtual functions, whatever the policy.
func (*vfRunner) Counts() (map[string]uint64, error) { return nil, nil }
