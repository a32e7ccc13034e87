//go:build linux

package collect

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/nic"
	"slipstream.dev/internal/nic/nictest"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
)

// TestVFs checks that the machine is read at both edges of a window, because it may change in between.
func TestVFs(t *testing.T) {
	m := nictest.Load(t, "netvsc-mlx5")
	c, err := New(Options{Proc: "testdata/4cpu/before"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.at = m.Source()
	c.nics = c.at.Read()
	before := snapshot(t, c)
	m.Files["class/net/eth0/statistics/rx_packets"] = "90710"
	m.Files["class/net/eth1/operstate"] = "down"
	m.Ethtool["eth0"].Counters["vf_rx_packets"] += 100
	c.at = m.Source()
	want := []record.VFUse{{NIC: "eth0", VF: "eth1", RxPackets: 500, VFRxPackets: 100, Change: record.VFWithdrawn}}
	if diff := cmp.Diff(want, c.VFs(before, snapshot(t, c))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestVethHasNoVF checks that a veth, which is the NIC of a lab's node, does not count as a NIC that may have a virtual
// function.
func TestVethHasNoVF(t *testing.T) {
	testenv.EnterNamespace(t)
	testenv.PrivateMounts(t)
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "wire"}); err != nil {
		t.Fatal(err)
	}
	sys := os.DirFS(mountSys(t))
	node, err := Describe(t.Context(), os.DirFS("testdata/place/proc"), sys)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range node.Links {
		if l.NIC != nil {
			t.Errorf("%s is a NIC: %s", l.Name, l.NIC)
		}
	}
	if len(node.Links) < 3 {
		t.Errorf("found %d devices", len(node.Links))
	}
	c, err := New(Options{Proc: threadProc(t), Sys: sys})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got := c.VFs(snapshot(t, c), snapshot(t, c)); len(got) > 0 {
		t.Errorf("its packets took %v", got)
	}
}

// BenchmarkVFs measures how much longer a snapshot takes for a NIC with a VF, apart from the
// driver.
func BenchmarkVFs(b *testing.B) {
	source := nictest.Load(b, "netvsc-mlx5").Source()
	nics := source.Read()
	for b.Loop() {
		if u := nic.CountUse(nics, source.ReadAgain(nics)); len(u) != 1 {
			b.Fatal(u)
		}
	}
}
