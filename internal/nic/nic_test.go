package nic_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/nic"
	"slipstream.dev/internal/nic/nictest"
	"slipstream.dev/internal/record"
)

// TestFacts compares the facts of each fixture with those that it lists.
func TestFacts(t *testing.T) {
	for _, name := range nictest.Names(t) {
		t.Run(name, func(t *testing.T) {
			m := nictest.Load(t, name)
			got := map[string]string{}
			for device, n := range nic.Facts(m.Source().Read()) {
				got[device] = n.String()
			}
			if diff := cmp.Diff(m.Facts, got); diff != "" {
				t.Errorf("facts (-want +got):\n%s", diff)
			}
		})
	}
}

// TestPresent: a VF is present where packets can take it.
func TestPresent(t *testing.T) {
	for name, want := range map[string]bool{
		"netvsc-mlx5": true, "netvsc-mana": true, "virtio-failover": true,
		"netvsc": false, "netvsc-no-driver": false, "netvsc-vfio": false, "netvsc-not-bonded": false, "netvsc-vf-down": false,
	} {
		if got := nic.Facts(nictest.Load(t, name).Source().Read())["eth0"].VF.Present(); got != want {
			t.Errorf("%s: present %v, want %v", name, got, want)
		}
	}
}

// TestFactsOfTwoNICs: with two synthetic devices and one VF that is not bonded, nobody
// knows which device the VF belongs to. With a VF for each, there is nothing to choose.
func TestFactsOfTwoNICs(t *testing.T) {
	m := nictest.Load(t, "netvsc-mlx5")
	second(m)
	facts := nic.Facts(m.Source().Read())
	if a, b := facts["eth0"].VF.String(), facts["eth5"].VF.String(); a != "VF eth1 (mlx5_core) up" || b != "no VF" {
		t.Errorf("a VF that is bonded to one of two NICs: %s, %s", a, b)
	}
	m = nictest.Load(t, "netvsc-no-driver")
	second(m)
	facts = nic.Facts(m.Source().Read())
	if a, b := facts["eth0"].VF.String(), facts["eth5"].VF.String(); a != "no VF" || b != "no VF" {
		t.Errorf("one VF of two NICs: %s, %s", a, b)
	}
	m.Dirs["bus/pci/devices"] = "function0 function1"
	for _, file := range []string{"class", "uevent"} {
		m.Files["bus/pci/devices/function1/"+file] = m.Files["bus/pci/devices/function0/"+file]
	}
	facts = nic.Facts(m.Source().Read())
	const want = "VF 15b3:1018 without its driver mlx5_core"
	if a, b := facts["eth0"].VF.String(), facts["eth5"].VF.String(); a != want || b != want {
		t.Errorf("two VFs of two NICs: %s, %s", a, b)
	}
}

// second adds another synthetic device, eth5.
func second(m *nictest.Machine) {
	m.Dirs["class/net"] += " eth5"
	for _, file := range []string{"flags", "operstate", "device/uevent"} {
		m.Files["class/net/eth5/"+file] = m.Files["class/net/eth0/"+file]
	}
	m.Files["class/net/eth5/ifindex"] = "5"
	m.Dirs["class/net/eth5"] = "device"
}

// TestBetween checks which way packets took in a window, and what happened to the VF.
func TestBetween(t *testing.T) {
	all := record.VFUse{NIC: "eth0", VF: "eth1", RxPackets: 1000, TxPackets: 500, VFRxPackets: 990, VFTxPackets: 500, Up: true}
	with := func(change func(*record.VFUse)) []record.VFUse {
		u := all
		change(&u)
		return []record.VFUse{u}
	}
	for _, c := range []struct {
		name, machine string
		window        func(t *testing.T, m *nictest.Machine)
		want          []record.VFUse
		took          string
	}{
		{"all but broadcasts take the VF", "netvsc-mlx5", func(t *testing.T, m *nictest.Machine) {
			m.Packets(t, 1000, 500, 990, 500)
		}, []record.VFUse{all}, record.TookVF},
		{"the VF is up and idle", "netvsc-mana", func(t *testing.T, m *nictest.Machine) {
			m.Packets(t, 1000, 500, 0, 3)
		}, with(func(u *record.VFUse) { u.VFRxPackets, u.VFTxPackets = 0, 3 }), record.TookParavirtual},
		{"no VF", "netvsc", func(t *testing.T, m *nictest.Machine) {
			m.Packets(t, 1000, 500, 0, 0)
		}, with(func(u *record.VFUse) { u.VF, u.VFRxPackets, u.VFTxPackets, u.Up = "", 0, 0, false }), record.TookParavirtual},
		{"no packets", "netvsc-mlx5", func(*testing.T, *nictest.Machine) {},
			with(func(u *record.VFUse) { u.RxPackets, u.TxPackets, u.VFRxPackets, u.VFTxPackets = 0, 0, 0, 0 }), ""},
		{"the host withdraws the VF", "netvsc-mlx5", func(t *testing.T, m *nictest.Machine) {
			m.Packets(t, 1000, 500, 300, 200)
			m.Withdraw("eth1")
		}, with(func(u *record.VFUse) {
			u.VFRxPackets, u.VFTxPackets, u.Up, u.Change = 300, 200, false, record.VFWithdrawn
		}), record.TookBoth},
		{"the VF goes down", "netvsc-mlx5", func(t *testing.T, m *nictest.Machine) {
			m.Packets(t, 1000, 500, 300, 200)
			m.Files["class/net/eth1/operstate"] = "down"
		}, with(func(u *record.VFUse) {
			u.VFRxPackets, u.VFTxPackets, u.Up, u.Change = 300, 200, false, record.VFWithdrawn
		}), record.TookBoth},
		{"the VF is set down, and never told its carrier", "netvsc-mlx5", func(t *testing.T, m *nictest.Machine) {
			m.Packets(t, 1000, 500, 300, 200)
			m.Files["class/net/eth1/flags"], m.Files["class/net/eth1/operstate"] = "0x1802", "unknown"
		}, with(func(u *record.VFUse) {
			u.VFRxPackets, u.VFTxPackets, u.Up, u.Change = 300, 200, false, record.VFWithdrawn
		}), record.TookBoth},
		{"the host takes the VF and gives it back", "netvsc-mlx5", func(t *testing.T, m *nictest.Machine) {
			m.Packets(t, 1000, 500, 900, 400)
			m.Files["class/net/eth1/ifindex"] = "9"
		}, with(func(u *record.VFUse) { u.VFRxPackets, u.VFTxPackets, u.Change = 900, 400, record.VFInterrupted }), record.TookBoth},
		{"the VF loses its carrier for a while", "netvsc-mlx5", func(t *testing.T, m *nictest.Machine) {
			m.Packets(t, 1000, 500, 990, 500)
			m.Add(t, "class/net/eth1/carrier_down_count", 1)
		}, with(func(u *record.VFUse) { u.Change = record.VFInterrupted }), record.TookVF},
		{"a VF comes", "netvsc-vf-down", func(t *testing.T, m *nictest.Machine) {
			m.Packets(t, 1000, 500, 300, 200)
			m.Files["class/net/eth1/flags"], m.Files["class/net/eth1/operstate"] = "0x1803", "up"
		}, with(func(u *record.VFUse) { u.VFRxPackets, u.VFTxPackets, u.Up, u.Change = 300, 200, false, record.VFAdded }), record.TookBoth},
		{"the counters are reset", "netvsc-mlx5", func(t *testing.T, m *nictest.Machine) {
			m.Packets(t, 1000, 500, 0, 0)
			m.Ethtool["eth0"].Counters["vf_rx_packets"] = 7
		}, []record.VFUse{{NIC: "eth0", VF: "eth1", Up: true, Unknown: "its counters were reset"}}, ""},
		{"an old driver does not count", "netvsc-mlx5", func(t *testing.T, m *nictest.Machine) {
			delete(m.Ethtool["eth0"].Counters, "vf_rx_packets")
		}, []record.VFUse{{NIC: "eth0", VF: "eth1", Up: true, Unknown: "its driver does not count the packets of the VF"}}, ""},
		{"the NIC itself goes", "netvsc-mlx5", func(t *testing.T, m *nictest.Machine) {
			delete(m.Files, "class/net/eth0/ifindex")
		}, []record.VFUse{{NIC: "eth0", Unknown: "the NIC itself was removed"}}, ""},
		{"the VF's counts are read a moment before the others", "netvsc-mlx5", func(t *testing.T, m *nictest.Machine) {
			m.Packets(t, 1000, 500, 1001, 500)
		}, with(func(u *record.VFUse) { u.VFRxPackets = 1000 }), record.TookVF},
		{"the VF of a failover device is withdrawn", "virtio-failover", func(t *testing.T, m *nictest.Machine) {
			m.Add(t, "class/net/eth0/statistics/rx_packets", 1000)
			m.Add(t, "class/net/eth0/statistics/tx_packets", 500)
			m.Add(t, "class/net/eth1/statistics/rx_packets", 400)
			m.Add(t, "class/net/eth1/statistics/tx_packets", 100)
			m.Dirs["class/net/eth0"] = "device lower_eth1"
		}, []record.VFUse{{NIC: "eth0", VF: "eth2", RxPackets: 1000, TxPackets: 500, VFRxPackets: 600, VFTxPackets: 400, Change: record.VFWithdrawn}}, record.TookBoth},
		{"one way only", "ena", func(t *testing.T, m *nictest.Machine) {
			m.Add(t, "class/net/eth0/statistics/rx_packets", 1000)
		}, nil, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := nictest.Load(t, c.machine)
			before := m.Source().Read()
			c.window(t, m)
			got := nic.CountUse(before, m.Source().ReadAgain(before))
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if len(got) > 0 {
				if took, share := record.Took(got); took != c.took {
					t.Errorf("packets took %q (%.3f), want %q", took, share, c.took)
				}
			}
		})
	}
}
