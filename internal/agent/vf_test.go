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
	"slipstream.dev/internal/nic"
	"slipstream.dev/internal/nic/nictest"
)

// TestVFs: what looks at a machine tell of the VF of its NIC. The window of each look but the first has 10 s.
func TestVFs(t *testing.T) {
	type look struct {
		do     func(m *nictest.Machine) // before it
		reason string
		want   string // in the message
	}
	still := func(*nictest.Machine) {}
	// A busy window has 1,000 packets or more.
	packets := func(rx, tx, vfRx, vfTx int) func(*nictest.Machine) {
		return func(m *nictest.Machine) { m.Packets(t, rx, tx, vfRx, vfTx) }
	}
	present := look{still, v1alpha1.ReasonVFPresent, "eth1 of eth0 is up; too few packets have come"}
	used := look{packets(600, 400, 590, 400), v1alpha1.ReasonVFUsed, "packets of eth0 take the VF (eth1)"}
	idle := look{packets(600, 400, 30, 20), v1alpha1.ReasonVFIdle, "eth1 of eth0 is up, and packets do not take it"}
	withdrawn := look{func(m *nictest.Machine) { m.Withdraw("eth1") }, v1alpha1.ReasonVFWithdrawn, "eth0 has lost its virtual function eth1: no VF"}
	back := func(m *nictest.Machine) {
		healthy := nictest.Load(t, "netvsc-mlx5")
		healthy.Files["class/net/eth1/ifindex"] = "9"
		m.Fixture = healthy.Fixture
	}
	for _, c := range []struct {
		name, machine string
		looks         []look
	}{
		{"healthy", "netvsc-mlx5", []look{present, used, used}},
		{"healthy mana", "netvsc-mana", []look{present, used}},
		{"both ways", "netvsc-mlx5", []look{present, {packets(600, 400, 100, 100), v1alpha1.ReasonVFUsed, "packets of eth0 take both ways (eth1)"}}},
		{"idle", "netvsc-mlx5", []look{present, idle, used, idle}},
		{"just not idle", "netvsc-mlx5", []look{present, {packets(600, 400, 31, 20), v1alpha1.ReasonVFUsed, "both ways"}}},
		{"too quiet to tell", "netvsc-mlx5", []look{present, {packets(600, 399, 0, 0), v1alpha1.ReasonVFPresent, "too few packets"}}},
		{"quiet after it was used", "netvsc-mlx5", []look{present, used, {packets(100, 100, 0, 0), v1alpha1.ReasonVFUsed, "take the VF"}}},
		{"quiet after it was idle", "netvsc-mlx5", []look{present, idle, {packets(100, 100, 100, 100), v1alpha1.ReasonVFIdle, ""}}},
		{"absent", "netvsc", []look{
			{still, v1alpha1.ReasonVFAbsent, "eth0 has no virtual function that packets can take: no VF"},
			{packets(600, 400, 0, 0), v1alpha1.ReasonVFAbsent, "no VF"}}},
		{"driver missing", "netvsc-no-driver", []look{{still, v1alpha1.ReasonVFAbsent, "VF 15b3:1018 without its driver mlx5_core"}}},
		{"not bonded", "netvsc-not-bonded", []look{{still, v1alpha1.ReasonVFAbsent, "not bonded"}}},
		{"never up", "netvsc-vf-down", []look{{still, v1alpha1.ReasonVFAbsent, "down"}}},
		{"withdrawn", "netvsc-mlx5", []look{present, used, withdrawn, {packets(600, 400, 0, 0), v1alpha1.ReasonVFWithdrawn, "eth1"}}},
		{"withdrawn and given back", "netvsc-mlx5", []look{present, used, withdrawn, {back, v1alpha1.ReasonVFPresent, "eth1 of eth0 is up"}, used}},
		{"set down", "netvsc-mlx5", []look{present, {func(m *nictest.Machine) { m.Files["class/net/eth1/operstate"] = "down" }, v1alpha1.ReasonVFWithdrawn, "VF eth1 (mlx5_core) down"}}},
		{"comes in a busy window", "netvsc-vf-down", []look{
			{still, v1alpha1.ReasonVFAbsent, ""},
			{func(m *nictest.Machine) {
				m.Packets(t, 600, 400, 0, 0)
				m.Files["class/net/eth1/flags"], m.Files["class/net/eth1/operstate"] = "0x1803", "up"
			}, v1alpha1.ReasonVFPresent, "too few"}}},
		{"gone and back in a busy window", "netvsc-mlx5", []look{present, used, {func(m *nictest.Machine) {
			m.Packets(t, 600, 400, 0, 0)
			m.Files["class/net/eth1/ifindex"] = "9"
		}, v1alpha1.ReasonVFUsed, "eth1"}, idle}},
		{"a driver that does not count", "netvsc-mlx5", []look{present, {func(m *nictest.Machine) {
			delete(m.Ethtool["eth0"].Counters, "vf_rx_packets")
		}, v1alpha1.ReasonVFPresent, "whether packets take it is not known, as its driver does not count the packets of the VF"}}},
		{"failover", "virtio-failover", []look{{still, v1alpha1.ReasonVFPresent, "eth2 of eth0"}, {func(m *nictest.Machine) {
			m.Add(t, "class/net/eth0/statistics/rx_packets", 1000)
			m.Add(t, "class/net/eth1/statistics/rx_packets", 990)
		}, v1alpha1.ReasonVFIdle, "eth2 of eth0 is up"}}},
		{"a VF alone", "mlx5", []look{{still, v1alpha1.ReasonNoDevice, "no NIC of the node can have a virtual function"}}},
		{"no NIC", "software", []look{{still, v1alpha1.ReasonNoDevice, ""}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := nictest.Load(t, c.machine)
			var known vfs
			at := time.Unix(1000, 0)
			for i, l := range c.looks {
				l.do(m)
				known, _ = known.look(m.Source().Read(), at)
				at = at.Add(10 * time.Second)
				if s := known.status(); s.Reason != l.reason || !strings.Contains(s.Message, l.want) {
					t.Fatalf("look %d: %s (%s), want %s (%s)", i, s.Reason, s.Message, l.reason, l.want)
				}
			}
		})
	}
}

// TestVFsOfTwoNICs: the NIC that is worst off decides.
func TestVFsOfTwoNICs(t *testing.T) {
	of := map[string]vf{
		"eth0": {reason: v1alpha1.ReasonVFUsed, message: "a"}, "eth1": {reason: v1alpha1.ReasonVFIdle, message: "b"},
		"eth2": {reason: v1alpha1.ReasonVFIdle, message: "c"}, "eth3": {reason: v1alpha1.ReasonVFPresent, message: "d"},
	}
	want := &VFStatus{Reason: v1alpha1.ReasonVFIdle, Message: "b; c", NICs: map[string]string{
		"eth0": v1alpha1.ReasonVFUsed, "eth1": v1alpha1.ReasonVFIdle, "eth2": v1alpha1.ReasonVFIdle, "eth3": v1alpha1.ReasonVFPresent}}
	if diff := cmp.Diff(want, vfs{of: of}.status()); diff != "" {
		t.Error(diff)
	}
}

// TestVerifyVFsByWindows: passes between two verifications read no NIC, and nobody reads one without a policy.
func TestVerifyVFsByWindows(t *testing.T) {
	reads := 0
	m := nictest.Load(t, "netvsc-mlx5")
	a := &Agent{metrics: newMetrics(), options: Options{Verify: time.Minute, NICs: func() nic.Snapshot {
		reads++
		return m.Source().Read()
	}}.withDefaults()}
	at := time.Unix(1000, 0)
	look := func(after time.Duration, want int, policies ...policy) {
		t.Helper()
		a.policies = policies
		at = at.Add(after)
		if a.verifyVFs(at); reads != want {
			t.Errorf("after %s the NICs have been read %d times, want %d", after, reads, want)
		}
	}
	vf := policy{Policy: Policy{VF: true}}
	waiting := policy{Policy: Policy{VF: true}, reason: v1alpha1.ReasonWaiting}
	look(0, 0)
	look(time.Hour, 0, waiting, policy{})
	look(0, 1, waiting, vf)
	look(29*time.Second, 1, vf)
	look(time.Second, 2, vf)
	look(time.Second, 2)
	look(0, 3, vf) // anew
	if a.verifyPart(t.Context(), 0); reads != 4 {
		t.Errorf("with a part of a verification the NICs have been read %d times, want 4", reads)
	}
}

// vm is a machine whose NIC has 100,000 packets between two snapshots; share of them take the VF.
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

// vfState returns what the metric says of the VF of eth0.
func (r *running) vfState() (states []string) {
	for _, state := range []string{"used", "present", "idle", "absent", "withdrawn"} {
		if r.metric(fmt.Sprintf(`slipstream_vf_state{nic="eth0",state="%s"}`, state)) == 1 {
			states = append(states, state)
		}
	}
	return states
}

// TestAgentVerifiesVFs: a policy with vf alone fails where the VF is not used, and changes nothing.
func TestAgentVerifiesVFs(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	p.nic()
	before := p.snapshot()
	v := &vm{t: t, Machine: nictest.Load(t, "netvsc-mlx5"), share: 1}
	o := p.options()
	o.NICs, o.Verify = v.read, 50*time.Millisecond
	a := p.start(o)
	a.Set(one(Policy{Name: "vf", Generation: 1, VF: true}))
	wants := func(state v1alpha1.State, reason, vfReason, metric string) {
		t.Helper()
		eventually(t, "VF is "+vfReason, func() string {
			if s := a.Status(); s.VF == nil || s.VF.Reason != vfReason {
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

	// Gone and back between two looks, as another device.
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

	// Beside another policy, which it neither hinders nor takes part in.
	a.Set(one(Policy{Name: "vf", Generation: 1, VF: true}, plus))
	a.wantState("vf", v1alpha1.StateApplied, v1alpha1.ReasonApplied)
	a.wantState("plus", v1alpha1.StateApplied, v1alpha1.ReasonApplied)
	a.Set(one())
	eventually(t, "nobody verifies", func() string {
		if s := a.Status(); s.VF != nil || a.vfState() != nil {
			return fmt.Sprintf("%+v", s)
		}
		return ""
	})
	p.wantMasks("nothing is changed", map[string]string{})
	if d := cmp.Diff(before, p.snapshot()); d != "" {
		t.Errorf("not as before: %s", d)
	}
}

// TestAgentWithoutVF: that no NIC of a node may have a VF is no failure.
func TestAgentWithoutVF(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	p.nic()
	a := p.start(p.options())
	a.Set(one(Policy{Name: "vf", Generation: 1, VF: true},
		Policy{Name: "both", Generation: 1, VF: true, Accelerate: []v1alpha1.Accelerator{rps("0", "nic")}},
		Policy{Name: "nothing", Generation: 1, VF: true, Accelerate: []v1alpha1.Accelerator{rps("0", "overlay")}}))
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
