package agent

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel"
	"slipstream.dev/internal/nic"
	"slipstream.dev/internal/nic/nictest"
)

// vm is a machine whose NIC counts 100,000 packets between two snapshots. The fraction share of them takes the VF.
type vm struct {
	t testing.TB
	*nictest.Machine
	mu    sync.Mutex
	share float64
}

func (v *vm) read() nic.Snapshot {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.Packets(v.t, 50_000, 50_000, int(50_000*v.share), int(50_000*v.share))
	return v.Source().Read()
}

func (v *vm) change(fn func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	fn()
}

func withVF(name string, all ...v1alpha1.Accelerator) Policy {
	return Policy{Name: name, Generation: 1, Accelerate: append(v1alpha1.ForPolicy(all...), v1alpha1.PolicyAccelerator{VF: &v1alpha1.VF{}})}
}

// state returns the state of an accelerator; zero if no policy wants it.
func (s Status) state(kind string) accel.State {
	for _, is := range s.Accelerators {
		if is.Kind == kind {
			return is
		}
	}
	return accel.State{}
}

// vfState returns the states of the VF of eth0 for which the metric is 1.
func (r *running) vfState() (states []string) {
	for _, state := range []string{"used", "present", "idle", "absent", "withdrawn"} {
		if r.metric(fmt.Sprintf(`slipstream_vf_state{nic="eth0",state="%s"}`, state)) == 1 {
			states = append(states, state)
		}
	}
	return states
}

// TestAgentVerifiesVFs checks that a policy with vf alone fails if the VF is not used, and changes
// nothing.
func TestAgentVerifiesVFs(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	p.nic()
	before := p.snapshot()
	v := &vm{t: t, Machine: nictest.Load(t, "netvsc-mlx5"), share: 1}
	o := p.options()
	o.NICs, o.Verify = v.read, 50*time.Millisecond
	a := p.start(o)
	a.Set(one(withVF("vf")))
	wants := func(state v1alpha1.State, reason, vfReason, metric string) {
		t.Helper()
		eventually(t, "VF is "+vfReason, func() string {
			if s := a.Status(); s.state("vf").Reason != vfReason {
				return fmt.Sprintf("%+v", s)
			}
			return ""
		})
		a.wantState("vf", state, reason)
		if got := a.vfState(); !slices.Equal(got, []string{metric}) {
			t.Errorf("metric: %s, want %s", got, metric)
		}
	}
	wants(v1alpha1.StateApplied, v1alpha1.ReasonApplied, v1alpha1.ReasonVFUsed, "used")
	v.change(func() { v.share = 0 })
	wants(v1alpha1.StateFailed, v1alpha1.ReasonVFIdle, v1alpha1.ReasonVFIdle, "idle")
	if s := a.Status(); s.Ready || s.Reason != v1alpha1.ReasonVFIdle {
		t.Errorf("%+v, want not ready", s)
	}
	v.change(func() { v.Withdraw("eth1") })
	wants(v1alpha1.StateFailed, v1alpha1.ReasonVFWithdrawn, v1alpha1.ReasonVFWithdrawn, "withdrawn")
	v.change(func() { v.Fixture, v.share = nictest.Load(t, "netvsc-mlx5").Fixture, 1 })
	wants(v1alpha1.StateApplied, v1alpha1.ReasonApplied, v1alpha1.ReasonVFUsed, "used")

	// Between two snapshots, the VF disappears and returns as another device.
	v.change(func() { v.Files["class/net/eth1/ifindex"] = "9" })
	eventually(t, "the interruption is counted", func() string {
		if n := a.metric("slipstream_vf_withdrawals_total"); n != 2 {
			return fmt.Sprintf("%g, want 2", n)
		}
		return ""
	})
	var events []string
	for len(a.events) > 0 {
		e := <-a.events
		events = append(events, e.Reason+": "+e.Message)
	}
	want := []string{
		"VFIdle: policy vf: the virtual function eth1 of eth0 is up, and packets do not take it",
		"VFWithdrawn: policy vf: eth0 has lost its virtual function eth1: no VF",
		"VFWithdrawn: eth0 lost its virtual function eth1, and has it again",
	}
	if diff := cmp.Diff(want, events); diff != "" {
		t.Errorf("events: %s", diff)
	}

	// Another policy is applied beside it, and neither affects the other.
	a.Set(one(withVF("vf"), plus))
	a.wantState("vf", v1alpha1.StateApplied, v1alpha1.ReasonApplied)
	a.wantState("plus", v1alpha1.StateApplied, v1alpha1.ReasonApplied)
	a.Set(one())
	eventually(t, "nobody verifies", func() string {
		if s := a.Status(); s.state("vf").Kind != "" || a.vfState() != nil {
			return fmt.Sprintf("%+v", s)
		}
		return ""
	})
	p.wantMasks("nothing is changed", map[string]string{})
	if d := cmp.Diff(before, p.snapshot()); d != "" {
		t.Errorf("not as before: %s", d)
	}
}

// TestAgentWithoutVF checks that a policy with vf does not fail on a node whose NICs cannot have a
// VF.
func TestAgentWithoutVF(t *testing.T) {
	t.Parallel()
	p := newTestNode(t)
	p.nic()
	a := p.start(p.options())
	a.Set(one(withVF("vf"),
		withVF("both", rps("0", "nic")),
		withVF("nothing", rps("0", "overlay"))))
	if o := a.wantState("vf", v1alpha1.StatePending, v1alpha1.ReasonNoDevice); !strings.Contains(o.Message, "no NIC of the node can have") {
		t.Errorf("%+v", o)
	}
	if o := a.wantState("both", v1alpha1.StateApplied, v1alpha1.ReasonApplied); o.Message != "1 setting read back; no NIC of the node can have a virtual function" {
		t.Errorf("%+v", o)
	}
	if o := a.wantState("nothing", v1alpha1.StatePending, v1alpha1.ReasonNoDevice); !strings.Contains(o.Message, "no device of the policy's classes") {
		t.Errorf("%+v", o)
	}
}
