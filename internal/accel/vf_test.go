package accel

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/nic"
	"slipstream.dev/internal/nic/nictest"
)

// TestVFs checks the state of a NIC's VF after each of several snapshots of a machine, taken every 10 s.
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
				known, _ = known.after(m.Source().Read(), at)
				at = at.Add(10 * time.Second)
				if s := known.state(); s.Reason != l.reason || !strings.Contains(s.Message, l.want) {
					t.Fatalf("look %d: %s (%s), want %s (%s)", i, s.Reason, s.Message, l.reason, l.want)
				}
			}
		})
	}
}

// TestVFsOfTwoNICs checks that the worst state of any NIC is the state of the node.
func TestVFsOfTwoNICs(t *testing.T) {
	of := map[string]vf{
		"eth0": {reason: v1alpha1.ReasonVFUsed, message: "a"}, "eth1": {reason: v1alpha1.ReasonVFIdle, message: "b"},
		"eth2": {reason: v1alpha1.ReasonVFIdle, message: "c"}, "eth3": {reason: v1alpha1.ReasonVFPresent, message: "d"},
	}
	s := vfs{of: of}.state()
	if s.Reason != v1alpha1.ReasonVFIdle || s.Message != "b; c" || s.Status != StatusFalse || !s.Failed {
		t.Errorf("%+v", s)
	}
	var got []string
	known := &vfs{of: of}
	(&vfRunner{known: known}).Samples(known.state(), func(s Sample) {
		if s.Metric == vfState && s.Value == 1 {
			got = append(got, strings.Join(s.Values, " "))
		}
	})
	slices.Sort(got)
	if diff := cmp.Diff([]string{"eth0 used", "eth1 idle", "eth2 idle", "eth3 present"}, got); diff != "" {
		t.Error(diff)
	}
}

// TestVerifyVFsByWindows checks that calls between two verifications do not read the NICs, and that nothing does while no
// policy wants VFs verified.
func TestVerifyVFsByWindows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reads := 0
		m := nictest.Load(t, "netvsc-mlx5")
		v := vfKind{}.Open(Host{Options: Options{Verify: time.Minute, NICs: func() nic.Snapshot {
			reads++
			return m.Source().Read()
		}}})
		keep := func(after time.Duration, want *v1alpha1.PolicyAccelerator, read int) {
			t.Helper()
			time.Sleep(after)
			if err := v.Keep(t.Context(), want, nil); err != nil || reads != read || (v.State() != nil) != (want != nil) {
				t.Errorf("after %s the NICs have been read %d times, want %d: %v", after, reads, read, err)
			}
		}
		wanted := &v1alpha1.PolicyAccelerator{VF: &v1alpha1.VF{}}
		keep(0, nil, 0)
		keep(time.Hour, nil, 0)
		keep(0, wanted, 1)
		keep(29*time.Second, wanted, 1)
		keep(time.Second, wanted, 2)
		keep(time.Second, nil, 2)
		v.Verify(time.Now())
		keep(0, wanted, 3) // starts again
		time.Sleep(30 * time.Second)
		if v.Verify(time.Now()); reads != 4 {
			t.Errorf("with a part of a verification the NICs have been read %d times, want 4", reads)
		}
	})
}
