package nic_test

import (
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"slipstream.dev/internal/nic"
	"slipstream.dev/internal/nic/nictest"
)

// secrets would identify a machine. Each is in the content or the name of a file of the
// machine that identifying returns.
var secrets = []string{
	"60:45:bd:01:02:03", "6045bd010203", "60-45-BD", // MAC addresses
	"10.11.12.13", "fe80::6245",
	"5a5a1234", "f8615163-df3e-46c5-913f-f2d2f965ed0e", // serial number, instance of the VMBus
	"be5e:00:02.0", "be5e", // PCI domain: bytes of the VMBus instance
	"enP48734s1", "enx6045bd010203", "customer", "vethcafe", "br-payments",
}

// identifying returns a machine that has all secrets.
func identifying() nic.Source {
	sys := fstest.MapFS{}
	file := func(path, text string) { sys[path] = &fstest.MapFile{Data: []byte(text + "\n")} }
	for name, of := range map[string]struct{ index, uevent string }{
		"customer0":       {"2", "DRIVER=hv_netvsc\nMODALIAS=vmbus:f8615163-df3e-46c5-913f-f2d2f965ed0e"},
		"enP48734s1":      {"3", "DRIVER=mlx5_core\nPCI_CLASS=20000\nPCI_ID=15B3:1016\nPCI_SUBSYS_ID=15B3:0190\nPCI_SLOT_NAME=be5e:00:02.0\nMODALIAS=pci:v000015B3"},
		"enx6045bd010203": {"4", "DRIVER=cdc_ether\nPRODUCT=5a5a1234"},
		"vethcafe":        {"5", ""},
		"br-payments":     {"6", ""},
	} {
		dir := "class/net/" + name + "/"
		for path, text := range map[string]string{
			"ifindex": of.index, "flags": "0x1003", "operstate": "up", "carrier_down_count": "0", "address": "60:45:bd:01:02:03",
			"ifalias": "customer", "phys_port_id": "6045bd010203", "phys_switch_id": "5a5a1234", "uevent": "INTERFACE=" + name,
			"statistics/rx_packets": "100", "statistics/tx_packets": "50", "queues/rx-0/rps_cpus": "0", "queues/tx-0/xps_cpus": "0",
		} {
			file(dir+path, text)
		}
		if of.uevent != "" {
			file(dir+"device/uevent", of.uevent)
			file(dir+"device/serial", "5a5a1234")
		}
	}
	file("class/net/customer0/lower_enP48734s1/ifindex", "3")
	file("class/net/enP48734s1/upper_customer0/ifindex", "2")
	file("class/net/customer0/upper_br-payments/ifindex", "6")
	file("bus/pci/devices/be5e:00:02.0/class", "0x020000")
	file("bus/pci/devices/be5e:00:02.0/uevent", "DRIVER=mlx5_core\nPCI_ID=15B3:1016\nPCI_SLOT_NAME=be5e:00:02.0")
	file("bus/pci/devices/be5e:00:02.0/net/enP48734s1/ifindex", "3")
	file("bus/pci/devices/be5e:00:02.0/vpd", "5a5a1234")
	file("bus/pci/devices/0000:00:01.0/class", "0x010802")
	file("bus/pci/devices/0000:00:01.0/uevent", "DRIVER=nvme\nSERIAL=5a5a1234")
	return nic.Source{Sys: sys, Tool: tool{}}
}

// tool answers for any device.
type tool struct{}

func (tool) Driver(device string) (driver, firmware string, err error) {
	if strings.HasPrefix(device, "enP") {
		return "mlx5_core", "14.30.1284 (MSF0010110035)", nil
	}
	return "", "N/A", nil
}

func (tool) Counters(string) (map[string]uint64, error) {
	return map[string]uint64{"vf_rx_packets": 90, "vf_tx_packets": 45, "tx_busy": 0, "cpu0_vf_rx_packets": 90, "rx_queue_0_packets": 10}, nil
}

// TestCaptureIsAnonymous: a fixture has nothing that identifies the machine, and gives the
// same facts as the machine itself.
func TestCaptureIsAnonymous(t *testing.T) {
	f := nic.Capture(identifying())
	text, err := f.YAML()
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range secrets {
		if strings.Contains(strings.ToLower(string(text)), strings.ToLower(secret)) {
			t.Errorf("the fixture has %q", secret)
		}
	}
	if t.Failed() {
		t.Logf("%s", text)
	}
	if strings.Contains(string(text), "cpu0_") || strings.Contains(string(text), "rx_queue_0") {
		t.Error("the fixture has counters of single CPUs and queues")
	}
	if n := strings.Count(string(text), "\n"); n > 60 {
		t.Errorf("the fixture has %d lines", n)
	}
	want := map[string]string{
		"eth0": "hv_netvsc (synthetic), 1 receive and 1 transmit queues; VF eth1 (mlx5_core) up",
		"eth1": "mlx5_core (vf), 1 receive and 1 transmit queues, firmware 14.30.1284 (MSF0010110035)",
		"eth2": "cdc_ether (device), 1 receive and 1 transmit queues",
	}
	if diff := cmp.Diff(want, f.Facts); diff != "" {
		t.Errorf("facts in it (-want +got):\n%s", diff)
	}
	m, err := nictest.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	before := m.Source().Read()
	for device, n := range nic.Facts(before) {
		got[device] = n.String()
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("facts read from it (-want +got):\n%s", diff)
	}
	m.Packets(t, 100, 50, 90, 45)
	if u := nic.CountUse(before, m.Source().ReadAgain(before)); len(u) != 1 || u[0].VFRxPackets != 90 || u[0].VFTxPackets != 45 {
		t.Errorf("packets between two snapshots of it: %+v", u)
	}
}

// TestCaptureOfFixtures: capturing a fixture gives the same fixture again.
func TestCaptureOfFixtures(t *testing.T) {
	for _, name := range nictest.Names(t) {
		m := nictest.Load(t, name)
		if diff := cmp.Diff(m.Fixture, nic.Capture(m.Source())); diff != "" {
			t.Errorf("%s (-was +captured):\n%s", name, diff)
		}
	}
}
