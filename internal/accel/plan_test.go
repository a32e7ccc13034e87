package accel

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"slipstream.dev/internal/accel/cpuset"
	"slipstream.dev/internal/accel/kernel"
	"slipstream.dev/internal/testenv"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/kernel/kerneltest"
)

// fakeSys makes a sysfs tree for a machine with this number of CPUs. hardware
// maps devices to their paths below devices ("virtual",
// "pci0000:00/0000:00:03.0/virtio2").
func fakeSys(t *testing.T, cpus int, devices []Device, hardware map[string]string) string {
	t.Helper()
	root := t.TempDir()
	testenv.WriteFile(t, filepath.Join(root, "devices/system/cpu/online"), first(cpus).String()+"\n")
	noCPUs := cpuset.Set{}.MaskLike(first(cpus).Mask()) + "\n"
	for _, d := range devices {
		at := hardware[d.Name]
		if at == "" {
			at = "virtual"
		}
		dir := filepath.Join("devices", at, "net", d.Name)
		testenv.WriteFile(t, filepath.Join(root, dir, "ifindex"), strconv.Itoa(d.Index)+"\n")
		for i := range d.RxQueues {
			queue := filepath.Join(root, dir, "queues", "rx-"+strconv.Itoa(i))
			testenv.WriteFile(t, filepath.Join(queue, "rps_cpus"), noCPUs)
			testenv.WriteFile(t, filepath.Join(queue, "rps_flow_cnt"), "0\n")
		}
		if err := os.MkdirAll(filepath.Join(root, "class/net"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(filepath.Join("../..", dir), filepath.Join(root, "class/net", d.Name)); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func rps(cpus string, classes ...string) v1alpha1.Accelerator {
	return v1alpha1.Accelerator{RPS: &v1alpha1.RPS{Devices: classes, CPUs: cpus}}
}

func rfs(entries int, cpus string, classes ...string) v1alpha1.Accelerator {
	return v1alpha1.Accelerator{RFS: &v1alpha1.RFS{Devices: classes, CPUs: cpus, Entries: entries}}
}

func TestPlanChanges(t *testing.T) {
	devices := []Device{
		{Name: "eth0", Index: 2, Class: v1alpha1.DeviceNIC, RxQueues: 3},
		{Name: "flannel.1", Index: 3, Class: v1alpha1.DeviceOverlay, RxQueues: 1},
		{Name: "cni0", Index: 4, RxQueues: 1},
		{Name: "veth1", Index: 5, Class: v1alpha1.DeviceHostVeth, RxQueues: 1},
	}
	for _, tt := range []struct {
		name string
		cpus int
		in   []v1alpha1.Accelerator
		want []string
		err  string
	}{
		{"rps on two classes", 2, []v1alpha1.Accelerator{rps("all", "nic", "overlay")}, []string{
			"eth0/0 rps_cpus 0 3", "eth0/1 rps_cpus 0 3", "eth0/2 rps_cpus 0 3", "flannel.1/0 rps_cpus 0 3",
		}, ""},
		{"one CPU", 1, []v1alpha1.Accelerator{rps("all", "overlay")}, []string{"flannel.1/0 rps_cpus 0 1"}, ""},
		{"one CPU and the irq", 1, []v1alpha1.Accelerator{rps("all-but-irq", "overlay")}, nil, "no CPU of"},
		{"7 CPUs", 7, []v1alpha1.Accelerator{rps("all-but-irq", "overlay")}, []string{"flannel.1/0 rps_cpus 00 3f"}, ""},
		{"33 CPUs", 33, []v1alpha1.Accelerator{rps("all", "overlay")}, []string{"flannel.1/0 rps_cpus 0,00000000 1,ffffffff"}, ""},
		{"64 CPUs", 64, []v1alpha1.Accelerator{rps("8-15", "overlay")}, []string{"flannel.1/0 rps_cpus 00000000,00000000 00000000,0000ff00"}, ""},
		{"130 CPUs", 130, []v1alpha1.Accelerator{rps("129", "overlay")}, []string{
			"flannel.1/0 rps_cpus 0,00000000,00000000,00000000,00000000 2,00000000,00000000,00000000,00000000",
		}, ""},
		{"rfs alone sets no mask", 2, []v1alpha1.Accelerator{rfs(32768, "", "nic", "host-veth")}, []string{
			"table 0 32768",
			"eth0/0 rps_flow_cnt 0 8192", "eth0/1 rps_flow_cnt 0 8192", "eth0/2 rps_flow_cnt 0 8192", "veth1/0 rps_flow_cnt 0 32768",
		}, ""},
		{"rfs with a mask", 2, []v1alpha1.Accelerator{rfs(1024, "all", "overlay")}, []string{
			"table 0 1024", "flannel.1/0 rps_cpus 0 3", "flannel.1/0 rps_flow_cnt 0 1024",
		}, ""},
		{"both, in agreement", 2, []v1alpha1.Accelerator{rps("0-1", "overlay"), rfs(1024, "all", "overlay")}, []string{
			"table 0 1024", "flannel.1/0 rps_cpus 0 3", "flannel.1/0 rps_flow_cnt 0 1024",
		}, ""},
		{"no such device here", 2, []v1alpha1.Accelerator{rps("all", "pod")}, nil, ""},
		{"masks that differ", 2, []v1alpha1.Accelerator{rps("0", "overlay"), rfs(1024, "all", "overlay")}, nil,
			"accelerator 2: wants the RPS mask of class overlay on CPUs 0-1, another accelerator on 0"},
		{"tables that differ", 2, []v1alpha1.Accelerator{rfs(2048, "", "nic"), rfs(1024, "", "overlay")}, nil,
			"accelerator 2: wants 1024 entries of the machine's flow table, another accelerator 2048"},
		{"fewer entries than queues", 2, []v1alpha1.Accelerator{rfs(2, "", "nic")}, nil, "rfs entries 2 are fewer than the 3 receive queues of eth0"},
		{"entries no power of two", 2, []v1alpha1.Accelerator{rfs(1000, "", "nic")}, nil, "want a power of two"},
		{"no entries", 2, []v1alpha1.Accelerator{rfs(0, "", "nic")}, nil, "want a power of two"},
		{"neither", 2, []v1alpha1.Accelerator{{}}, nil, "want exactly one of rps, rfs and fastpath"},
		{"fast paths that differ", 2, []v1alpha1.Accelerator{
			{Fastpath: &v1alpha1.Fastpath{UnseenBy: []string{"tcx", "queue"}}}, {Fastpath: &v1alpha1.Fastpath{UnseenBy: []string{"queue", "tcx"}}},
			{Fastpath: &v1alpha1.Fastpath{UnseenBy: []string{"queue"}}},
		}, nil, `accelerator 3: wants the fast path unseenBy ["queue"], another accelerator ["queue" "tcx"]`},
		{"both in one", 2, []v1alpha1.Accelerator{{RPS: &v1alpha1.RPS{}, RFS: &v1alpha1.RFS{}}}, nil, "want exactly one of rps, rfs and fastpath"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sys := openSys(t, fakeSys(t, tt.cpus, devices, nil))
			machine := &kerneltest.Memory{Values: map[string]string{kernel.FlowTable: "0"}}
			got, err := planned(tt.in, sys, machine, devices)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Fatalf("error %v, want one with %q", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

// planned formats the planned changes as "DEVICE/QUEUE SETTING WAS WANT".
func planned(in []v1alpha1.Accelerator, sys kernel.Sysfs, machine kernel.Store, devices []Device) (lines []string, err error) {
	cpus, err := cpuset.Machine(sys.Root)
	if err != nil {
		return nil, err
	}
	p, err := makePlan(Kinds(), v1alpha1.ForPolicy(in...), func(spec string) (cpuset.Set, error) { return cpuset.Resolve(spec, cpus, cpuset.Set{}, cpuset.Set{}) })
	if err != nil {
		return nil, err
	}
	table, queues, err := p.changes(machine, sys, devices, nil)
	for _, c := range table {
		lines = append(lines, fmt.Sprintf("table %s %s", c.Was, c.Want))
	}
	for _, c := range queues {
		f := strings.Split(c.Path, "/")
		lines = append(lines, fmt.Sprintf("%s/%s %s %s %s", f[2], strings.TrimPrefix(f[4], "rx-"), f[5], c.Was, c.Want))
	}
	return lines, err
}

func TestPlanWithoutRPS(t *testing.T) {
	devices := []Device{{Name: "eth0", Index: 2, Class: v1alpha1.DeviceNIC, RxQueues: 1}}
	dir := fakeSys(t, 2, devices, nil)
	queue := filepath.Join(dir, "class/net/eth0/queues/rx-0")
	if err := os.Remove(filepath.Join(queue, "rps_cpus")); err != nil {
		t.Fatal(err)
	}
	in := []v1alpha1.Accelerator{rps("all", "nic")}
	if _, err := planned(in, openSys(t, dir), nil, devices); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "CONFIG_RPS") {
		t.Errorf("device without rps_cpus: %v, want it to name CONFIG_RPS", err)
	}
	link := filepath.Join(dir, "class/net/eth0")
	device, err := filepath.EvalSymlinks(link)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(link), os.RemoveAll(device)); err != nil {
		t.Fatal(err)
	}
	if got, err := planned(in, openSys(t, dir), nil, devices); err != nil || got != nil {
		t.Errorf("device that went away: %v, %v, want nothing", got, err)
	}
}

func TestClassify(t *testing.T) {
	attrs := func(index, netnsid int) netlink.LinkAttrs { return netlink.LinkAttrs{Index: index, NetNsID: netnsid} }
	lo := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 1, NetNsID: -1, Flags: net.FlagLoopback}}
	eth := &netlink.Device{LinkAttrs: attrs(2, -1)}
	ethVeth := &netlink.Veth{LinkAttrs: attrs(2, 0)}
	eth1 := &netlink.Device{LinkAttrs: attrs(3, -1)}
	podVeth := &netlink.Veth{LinkAttrs: attrs(4, 1)}
	pairHere := &netlink.Veth{LinkAttrs: attrs(5, -1)}
	vxlan := func(parent int) netlink.Link {
		return &netlink.Vxlan{LinkAttrs: attrs(6, -1), VtepDevIndex: parent}
	}
	bridge := &netlink.Bridge{LinkAttrs: attrs(7, -1)}
	bond := &netlink.Bond{LinkAttrs: attrs(8, -1)}
	netvsc := &netlink.Device{LinkAttrs: attrs(8, -1)}
	member := func(index int) netlink.Link {
		return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index, NetNsID: -1, MasterIndex: 8}}
	}
	eth4 := &netlink.Device{LinkAttrs: attrs(4, -1)}
	vlan := &netlink.Vlan{LinkAttrs: netlink.LinkAttrs{Index: 9, NetNsID: -1, ParentIndex: 8}}
	foreign := &netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{Index: 9, NetNsID: 0, ParentIndex: 2}}
	const nic, overlay, host, pod = v1alpha1.DeviceNIC, v1alpha1.DeviceOverlay, v1alpha1.DeviceHostVeth, v1alpha1.DevicePod
	for _, tt := range []struct {
		name                string
		links               []netlink.Link
		gateways, addressed []int
		pod                 bool
		want                map[int]string
	}{
		{"the overlay says", []netlink.Link{lo, eth, eth1, podVeth, vxlan(3), bridge}, []int{2}, []int{2, 7}, false,
			map[int]string{3: nic, 4: host, 6: overlay}},
		{"the default route says", []netlink.Link{lo, eth, eth1, podVeth, vxlan(0), bridge}, []int{2}, []int{3, 7}, false,
			map[int]string{2: nic, 4: host, 6: overlay}},
		{"an address says", []netlink.Link{lo, ethVeth, podVeth, bridge}, nil, []int{1, 2, 7}, false,
			map[int]string{2: nic, 4: host}},
		{"the NIC is a veth", []netlink.Link{lo, ethVeth, podVeth, vxlan(2)}, nil, nil, false,
			map[int]string{2: nic, 4: host, 6: overlay}},
		{"default route through the overlay", []netlink.Link{lo, eth, vxlan(0)}, []int{6}, []int{2}, false,
			map[int]string{2: nic, 6: overlay}},
		{"a pair within the node", []netlink.Link{lo, eth, pairHere}, []int{2}, nil, false, map[int]string{2: nic}},
		{"a bond", []netlink.Link{lo, bond, member(2), member(3), eth4}, []int{8}, []int{4, 8}, false, map[int]string{2: nic, 3: nic, 8: nic}},
		{"a VLAN of a bond", []netlink.Link{lo, vlan, bond, member(2), member(3), vxlan(9)}, nil, nil, false, map[int]string{2: nic, 3: nic, 6: overlay, 8: nic, 9: nic}},
		{"a virtual function", []netlink.Link{lo, netvsc, member(2), podVeth}, []int{8}, []int{8}, false, map[int]string{2: nic, 4: host, 8: nic}},
		{"a macvlan of another namespace's NIC", []netlink.Link{lo, foreign, eth}, []int{9}, nil, false, map[int]string{9: nic}},
		{"a pod", []netlink.Link{lo, ethVeth}, []int{2}, []int{2}, true, map[int]string{2: pod}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if d := cmp.Diff(tt.want, classify(tt.links, tt.gateways, tt.addressed, tt.pod)); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestIRQCPUs(t *testing.T) {
	devices := []Device{{Name: "ens5", Index: 2}, {Name: "eth0", Index: 3}, {Name: "veth0", Index: 4}}
	sys := fakeSys(t, 4, devices, map[string]string{"ens5": "pci0000:00/0000:00:05.0", "eth0": "pci0000:00/0000:00:03.0/virtio2"})
	proc := t.TempDir()
	for irq, cpus := range map[string]string{"30": "1\n", "31": "3\n", "40": "0-1\n"} {
		testenv.WriteFile(t, filepath.Join(proc, "irq", irq, "effective_affinity_list"), cpus)
	}
	for _, file := range []string{"0000:00:05.0/msi_irqs/30", "0000:00:05.0/msi_irqs/31", "0000:00:03.0/msi_irqs/40", "0000:00:03.0/msi_irqs/41"} {
		testenv.WriteFile(t, filepath.Join(sys, "devices/pci0000:00", file), "msix\n")
	}
	for name, want := range map[string]string{"ens5": "1,3", "eth0": "0-1", "veth0": ""} {
		got, err := IRQCPUs(openSys(t, sys).Root, proc, name)
		if err != nil || got.String() != want {
			t.Errorf("%s: %q, %v, want %q", name, got, err, want)
		}
	}
}
