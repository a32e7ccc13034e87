package doctor

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/nic"
	"slipstream.dev/internal/nic/nictest"
	"slipstream.dev/internal/record"
)

// server returns a healthy machine with 4 CPUs, a NIC with a queue for each, and VXLAN over it.
func server() Facts {
	nic := Device{
		Link: record.Link{Name: "eth0", Kind: "device", Class: v1alpha1.DeviceNIC, MTU: 1500, RPS: []string{"0", "0", "0", "0"}, RFS: []string{"0", "0", "0", "0"},
			NIC: &record.NIC{Type: record.NICDevice, Driver: "ixgbe", RxQueues: 4, TxQueues: 4}},
		Up: true, IRQ: "0-3", Off: []string{"rx-all", "rx-gro-list", "tx-nocache-copy"},
		Window: Packets{Rx: 100_000, Tx: 100_000}, Boot: Packets{Rx: 1e9, Tx: 1e9, Missed: 4000, TxDropped: 8},
	}
	overlay := Device{
		Link: record.Link{Name: "flannel.1", Kind: "vxlan", Class: v1alpha1.DeviceOverlay, MTU: 1450, RPS: []string{"0"}, RFS: []string{"0"}},
		Up:   true, Under: "eth0", Overhead: 50, Window: Packets{Rx: 90_000, Tx: 90_000, TxDropped: 3},
	}
	f := Facts{
		Node:   record.Node{Kernel: "6.12.0", CPUs: "0-3", Sysctls: map[string]string{flowTable: "0", "net.core.netdev_max_backlog": "1000", "net.core.netdev_budget": "300"}},
		Window: time.Second, Devices: []Device{{Link: record.Link{Name: "lo", MTU: 65536}, Up: true}, nic, overlay},
		BTF: true, Conntrack: 100, ConntrackMax: 262144,
	}
	for id := range 4 {
		f.CPUs = append(f.CPUs, record.CPU{ID: id, Softirq: 0.3, Processed: 50_000, Dropped: 1, Squeezed: 5})
	}
	return f
}

// vm returns a healthy virtual machine with 2 CPUs, whose NIC has one queue.
func vm() Facts {
	f := server()
	f.Node.CPUs, f.CPUs = "0-1", f.CPUs[:2]
	d := &f.Devices[1]
	d.NIC, d.IRQ, d.RPS, d.RFS = &record.NIC{Type: record.NICParavirtual, Driver: "virtio_net", RxQueues: 1, TxQueues: 1}, "1", []string{"0"}, []string{"0"}
	return f
}

// summary returns one line for each finding.
func summary(found []Finding) (lines []string) {
	for _, f := range found {
		lines = append(lines, fmt.Sprintf("%s %s: %s", f.Severity, f.Rule, f.What))
	}
	return lines
}

// TestHealthyMachines checks that a healthy machine has no findings.
func TestHealthyMachines(t *testing.T) {
	firewall := server() // without pods
	firewall.Devices, firewall.Flowtables = firewall.Devices[:2], []Flowtable{{"inet ft f", []string{"eth0"}}}
	jumbo := server()
	jumbo.Devices[1].MTU, jumbo.Devices[2].MTU = 9000, 8950
	steered := vm()
	steered.Node.Sysctls[flowTable] = "32768"
	steered.Devices[1].RPS, steered.Devices[1].RFS = []string{"1"}, []string{"32768"} // CPU 0; CPU 1 handles the interrupts
	external := server()                                                              // as Cilium's VXLAN device, whose MTU limits nothing
	external.Devices[2].MTU, external.Devices[2].Under, external.Devices[2].Overhead = 1500, "", 0
	elsewhere := server() // the table is used in other network namespaces
	elsewhere.Node.Sysctls[flowTable] = "32768"
	quiet := server()
	for i := range quiet.CPUs {
		quiet.CPUs[i] = record.CPU{ID: i}
	}
	for i := range quiet.Devices {
		quiet.Devices[i].Window = Packets{}
	}
	hardly := quiet
	hardly.Stacks = []Stack{{Counts: map[string]uint64{rpFiltered: 9}}}
	hardly.CPUs = []record.CPU{{Processed: 20, Dropped: 9, Squeezed: 9}}
	strict := server()
	strict.Stacks = []Stack{{Counts: map[string]uint64{rpFiltered: 3}}}
	for i := range strict.Devices {
		strict.Devices[i].RPFilter = 1
	}
	generic := server()
	generic.Devices[1].Off, generic.Devices[1].Offloads = []string{"tx-checksum-ipv4"}, []string{"tx-checksum-ip-generic"}
	limited := server()
	limited.Throttled = []Throttled{{"/a", 1, 9 * time.Millisecond}}
	fast := server()
	fast.Devices[1].Speed, fast.Devices[1].Window.TxBytes, fast.Devices[1].Window.RxBytes = 1e9, 110_000_000, 90_000_000
	fast.Devices[1].Ring, fast.Devices[1].RingMax = 512, 4096
	noIPv6 := server()
	noIPv6.Stacks = []Stack{{Counts: map[string]uint64{"Ip6InReceives": 500, "Ip6InDiscards": 500, "Ip.OutDiscards": 1}}}
	accepting, raced := server(), server() // counters that contain each other, and an insert race without a loss
	accepting.Stacks = []Stack{{Counts: map[string]uint64{"Tcp.PassiveOpens": 1e5, "TcpExt.ListenDrops": 9, "TcpExt.ListenOverflows": 9}}}
	raced.Stacks = []Stack{{Counts: map[string]uint64{"nf_conntrack.insert_failed": 50}}}
	local := vm() // packets between its pods keep a CPU busy, not those of its NIC
	local.CPUs[0], local.CPUs[1] = record.CPU{ID: 0, Softirq: 0.05}, record.CPU{ID: 1, Softirq: 0.6, Processed: 900_000}
	dockerHost := server() // without an overlay, and with Docker's policy
	dockerHost.Devices = dockerHost.Devices[:2]
	bridged(&dockerHost, 1500)
	dockerHost.Devices[2].Master, dockerHost.Devices[3].Name = "br-0123456789ab", "br-0123456789ab"
	dockerHost.Chains = []Chain{{Name: "nft ip filter FORWARD", Hook: hookForward, Drops: true, Counted: true}}
	lan := server() // containers of Proxmox, whose bridge has the NIC as a port
	bridged(&lan, 1500)
	lan.Devices[1].Master, lan.Devices[3].Master, lan.Devices[4].Name = "vmbr0", "vmbr0", "vmbr0"
	lan.Devices[4].NotForwarding, lan.Settings["net.ipv4.ip_forward"] = []string{"/proc/sys/net/ipv4/conf/vmbr0/forwarding"}, "0"
	sixOnly := server() // programs in its pods try IPv4 first
	sixOnly.Stacks = []Stack{{Pod: "v0 (nginx)", Counts: map[string]uint64{"Ip6InReceives": 1000, "Ip.OutNoRoutes": 500}}}
	eks := server() // the same, by Calico beside Amazon's plugin
	eks.Devices = append(eks.Devices, Device{Link: record.Link{Name: "eni0123456789a", Kind: "veth", Class: v1alpha1.DeviceHostVeth}, Up: true, RPFilter: 1, Pod: &PodEnd{}})
	counted(rpFiltered, 4000, "")(&eks)
	calico := server() // drops packets of pods with addresses of others
	calico.Devices = append(calico.Devices, Device{Link: record.Link{Name: "cali123", Kind: "veth"}, Up: true, RPFilter: 1})
	counted(rpFiltered, 4000, "")(&calico)
	router := server() // behind a VXLAN device that no network plugin made
	router.Devices[2].Name = "vxlan100"
	router.Devices[2].FDB = []FDBEntry{{"02:00:00:00:02:01", netip.MustParseAddr("10.77.0.2")}}
	router.Devices[2].Neighbours = []Neighbour{{netip.MustParseAddr("10.0.0.1"), "02:00:00:00:02:01"}, {netip.MustParseAddr("10.0.0.2"), "02:00:00:00:02:01"}}
	changed := func(change func(*Facts)) Facts {
		f := server()
		change(&f)
		return f
	}
	for name, f := range map[string]Facts{
		"pods at Open vSwitch, whose gateway is another port": changed(func(f *Facts) {
			bridged(f, 1450)
			f.Devices[3].Master, f.Devices[3].MAC = "ovs-system", "02:00:00:00:00:01"
			f.Devices[3].Pod = &PodEnd{MTU: 1450, Gateway: netip.MustParseAddr("10.244.1.1"), GatewayMAC: "02:00:00:00:00:03"}
			f.Devices[4].Name, f.Devices[4].Kind, f.Devices[4].Master, f.Devices[4].MAC = "antrea-gw0", "openvswitch", "ovs-system", "02:00:00:00:00:03"
			f.Devices = append(f.Devices, Device{Link: record.Link{Name: "ovs-system", Kind: "openvswitch"}, MAC: "02:00:00:00:00:02"})
		}),
		"Cilium with WireGuard, without root": changed(func(f *Facts) {
			wg := wireguard(1420)
			wg.Name = "cilium_wg0"
			f.Devices = append(f.Devices[:2], wg, Device{Link: record.Link{Name: "lxc0123456789ab", Kind: "veth", Class: v1alpha1.DeviceHostVeth, MTU: 1500}, Up: true, Pod: &PodEnd{}},
				Device{Link: record.Link{Name: "nk1", Kind: "netkit", MTU: 1500}, Up: true, Pod: &PodEnd{}})
		}),
		"WireGuard over a NIC that does not segment VXLAN": changed(func(f *Facts) {
			f.Devices[1].Off, f.Devices[2] = []string{udpTunnels}, wireguard(1420)
		}),
		"a management NIC with one queue": changed(func(f *Facts) {
			f.Devices = append(f.Devices, Device{Link: record.Link{Name: "eth1", Kind: "device", NIC: &record.NIC{RxQueues: 1}}, Up: true})
		}),
		"a router with two addresses":              router,
		"packets between pods":                     local,
		"strict devices of pods":                   calico,
		"strict devices of pods of a cloud":        eks,
		"a pod without IPv4":                       sixOnly,
		"a bridge to the LAN":                      lan,
		"Docker alone":                             dockerHost,
		"a few connections that were not accepted": accepting, "insert races": raced,
		"a device without IPv6": noIPv6, "a flowtable without pods": firewall, "a limit that hardly shows": limited, "a link that is not full, a ring that is not either": fast, "server": server(), "VM": vm(), "jumbo frames": jumbo, "steered": steered, "external VXLAN": external,
		"flow table used elsewhere": elsewhere, "no traffic": quiet, "hardly any": hardly, "strict rp_filter": strict, "the other checksums": generic, "no conntrack": {BTF: true, Window: time.Second},
	} {
		if found := Examine(f); len(found) > 0 || found == nil {
			t.Errorf("%s: %q", name, summary(found))
		}
	}
}

// TestRules checks that each fault is found, alone, with its severity.
func TestRules(t *testing.T) {
	one := func(f *Facts) *Device { // a NIC with one queue on a machine with 4 CPUs
		d := &f.Devices[1]
		d.NIC.RxQueues, d.IRQ, d.RPS, d.RFS = 1, "2", []string{"0"}, []string{"0"}
		return d
	}
	for _, c := range []struct {
		name   string
		inject func(*Facts)
		want   string
	}{
		{"rights", func(f *Facts) { f.Lacks = []string{"CAP_NET_ADMIN"} }, "note not-permitted: This process lacks capabilities: it cannot apply"},
		{"BTF", func(f *Facts) { f.BTF = false }, "warning no-btf: The kernel has no BTF"},
		{"flowtable", func(f *Facts) { f.Flowtables = []Flowtable{{"inet ft f", []string{"eth0", "flannel.1"}}} },
			"note flowtable: The flowtable inet ft f of nftables forwards packets at flannel.1, where the fast path therefore does not run."},
		{"flowtable at the NIC", func(f *Facts) { f.Flowtables = []Flowtable{{"inet ft f", []string{"eth0"}}} },
			"note flowtable: The flowtable inet ft f of nftables has no device of pods, but Linux before 7.2 takes connections of pods into it if a rule adds them."},
		{"probe", func(f *Facts) { f.FastPath = "lacks tcx" }, "warning fast-path: The fast path cannot run"},
		{"netem", func(f *Facts) { f.Devices[1].Emulates = true }, "warning netem: A qdisc of the kind netem delays, drops or damages packets of eth0"},
		{"netem in a pod", func(f *Facts) {
			f.Devices = append(f.Devices, Device{Link: record.Link{Name: "v0", Kind: "veth", Class: v1alpha1.DeviceHostVeth, MTU: 1450, RPS: []string{"0"}, RFS: []string{"0"}}, Up: true, Pod: &PodEnd{MTU: 1450, Device: "eth0", Emulates: true}})
		}, "warning netem: A qdisc of the kind netem delays, drops or damages packets of eth0 of the pod behind v0"},
		{"memory of TCP", counted("TcpExt.TCPAbortOnMemory", 20, "Ip.InReceives"), "warning tcp-memory: "},
		{"MTU", func(f *Facts) { f.Devices[2].MTU = 1500 }, "serious mtu-too-large: The MTU of flannel.1 is 50 bytes too large for eth0"},
		{"MTU by 1", func(f *Facts) { f.Devices[2].MTU = 1451 }, "serious mtu-too-large: The MTU of flannel.1 is 1 byte too large for eth0"},
		{"MTU of WireGuard", func(f *Facts) { f.Devices = append(f.Devices, wireguard(1500)) }, "serious mtu-too-large: The MTU of wg0 is 60 bytes too large for eth0"},
		{"MTU of WireGuard by 1", func(f *Facts) { f.Devices = append(f.Devices, wireguard(1441)) }, "serious mtu-too-large: The MTU of wg0 is 1 byte too large for eth0"},
		{"WireGuard down", func(f *Facts) {
			f.Devices = append(f.Devices, wireguard(1420))
			f.Devices[3].Name, f.Devices[3].Up = "flannel-wg", false
		}, "serious overlay-down: The overlay device flannel-wg is down."},
		{"WireGuard with smaller MTU than pods", func(f *Facts) {
			f.Devices[2] = wireguard(1420)
			f.Devices[2].Name = "flannel-wg"
			bridged(f, 1450)
		}, "warning pod-mtu: Pods send packets that are too large for flannel-wg"},
		{"WireGuard with smaller MTU than pods of Cilium", func(f *Facts) {
			f.Devices[2] = wireguard(1420)
			f.Devices[2].Name = "cilium_wg0"
			f.Devices = append(f.Devices, Device{Link: record.Link{Name: "lxc0123456789ab", Kind: "veth", Class: v1alpha1.DeviceHostVeth, MTU: 1500}, Up: true, Pod: &PodEnd{MTU: 1500, Device: "eth0"}})
		}, "warning pod-mtu: Pods send packets that are too large for cilium_wg0"},
		{"WireGuard gone", func(f *Facts) { f.Devices = f.Devices[:2]; bridged(f, 1440) }, "note overlay-gone: cni0 has the MTU for an overlay"},
		{"no br_netfilter", func(f *Facts) { bridged(f, 1450); f.KubeProxy = "nft ip nat KUBE-SERVICES" }, "warning bridge-nf: Packets between pods of one bridge bypass iptables: cni0."},
		{"a gateway that does not answer", func(f *Facts) {
			bridged(f, 1450)
			f.Devices[3].Pod = &PodEnd{Gateway: netip.MustParseAddr("10.244.1.1"), GatewayFailed: true, GatewayAsked: true}
		}, "serious pod-gateway: Nobody answers for the gateway of the pod behind v0."},
		{"a gateway that once did not answer", func(f *Facts) {
			bridged(f, 1450)
			f.Devices[3].Pod = &PodEnd{Gateway: netip.MustParseAddr("10.244.1.1"), GatewayFailed: true}
		}, "note pod-gateway: Nobody answers for the gateway of the pod behind v0."},
		{"a gateway with the MAC address of another device", func(f *Facts) {
			bridged(f, 1450)
			f.Devices[2].MAC, f.Devices[3].MAC, f.Devices[4].MAC = "02:00:00:00:00:02", "02:00:00:00:00:01", "02:00:00:00:00:03"
			f.Devices[3].Pod = &PodEnd{Gateway: netip.MustParseAddr("10.244.1.1"), GatewayMAC: "02:00:00:00:00:02"}
		}, "serious pod-gateway: The pod behind v0 has a wrong MAC address of its gateway."},
		{"two nodes with one MAC address", func(f *Facts) {
			f.Devices[2].FDB = []FDBEntry{{"02:00:00:00:02:01", netip.MustParseAddr("10.77.0.2")}}
			f.Devices[2].Neighbours = []Neighbour{{netip.MustParseAddr("10.244.2.0"), "02:00:00:00:02:01"}, {netip.MustParseAddr("10.244.3.0"), "02:00:00:00:02:01"}}
		}, "serious vtep: Nodes share a VTEP address"},
		{"small MTU", func(f *Facts) { f.Devices[1].MTU = 9000 }, "note mtu-small: The MTU of flannel.1 could be 7500 larger"},
		{"NIC with room for the tunnel's headers", func(f *Facts) { f.Devices[1].MTU = 1550 }, "note mtu-small: The MTU of flannel.1 could be 50 larger"},
		{"few drops", func(f *Facts) { f.CPUs[3].Dropped = 100 }, "warning backlog-full: "},
		{"many drops", func(f *Facts) { f.CPUs[3].Dropped = 10_000 }, "serious backlog-full: "},
		{"flow limit", func(f *Facts) { f.CPUs[3].Dropped, f.FlowLimited = 100, 100 }, "warning flow-limit: "},
		{"squeezes", func(f *Facts) { f.CPUs[0].Squeezed = 100 }, "note squeezed: "},
		{"full ring", func(f *Facts) { f.Devices[1].Window.Missed = 5000 }, "serious device-drops: eth0 loses packets because its receive ring is full"},
		{"damage", func(f *Facts) { f.Devices[1].Window.Damaged = 20 }, "warning device-drops: eth0 receives damaged packets"},
		{"full ring of a member of a bond", func(f *Facts) {
			f.Devices[1].Window.Missed = 5000
			bonded(f)
		}, "serious device-drops: eth0 loses packets because its receive ring is full"},
		{"damage at a member of a bond", func(f *Facts) {
			f.Devices[1].Window.Damaged = 20
			bonded(f)
		}, "warning device-drops: eth0 receives damaged packets"},
		{"sending by a member of a bond", func(f *Facts) {
			f.Devices[1].Window.TxDropped = 50
			bonded(f)
		}, "warning device-drops: eth0 drops packets"},
		{"sending by a bond", func(f *Facts) {
			bonded(f)
			f.Devices[3].Window.TxDropped = 50
		}, "warning device-drops: bond0 drops packets"},
		{"full ring below Open vSwitch", func(f *Facts) {
			f.Devices[1].Window.Missed, f.Devices[1].Master, f.Devices[1].Class = 5000, "ovs-system", ""
		}, "serious device-drops: eth0 loses packets because its receive ring is full"},
		{"one queue below a bridge", func(f *Facts) {
			d := one(f)
			d.Master, d.Class = "br0", ""
		}, "note one-cpu-receives: One CPU receives all packets of eth0: the NIC has"},
		{"sending by IPIP", func(f *Facts) {
			f.Devices = append(f.Devices, Device{Link: record.Link{Name: "tunl0", Kind: "ipip", MTU: 1480}, Up: true, Tunnelling: true, Under: "eth0", Overhead: 20, Window: Packets{TxDropped: 50}})
		}, "serious device-drops: tunl0 drops packets"},
		{"addresses of others by WireGuard", func(f *Facts) {
			f.Devices = append(f.Devices, wireguard(1420))
			f.Devices[3].Window = Packets{Rx: 1000, Damaged: 50}
		}, "serious device-drops: wg0 refuses packets that it receives"},
		{"sending", func(f *Facts) { f.Devices[2].Window.TxDropped = 50 }, "warning device-drops: flannel.1 drops packets"},
		{"one queue", func(f *Facts) { one(f) }, "note one-cpu-receives: One CPU receives all packets of eth0: the NIC has"},
		{"one busy CPU", func(f *Facts) {
			one(f)
			for i := range f.CPUs {
				f.CPUs[i].Softirq = 0.02
			}
			f.CPUs[2].Softirq = 0.8
		}, "warning one-cpu-receives: One CPU receives all packets of eth0, and is busy"},
		{"another busy CPU", func(f *Facts) {
			one(f)
			for i := range f.CPUs {
				f.CPUs[i].Softirq = 0.02
			}
			f.CPUs[1].Softirq = 0.8
		}, "note one-cpu-receives: One CPU receives all packets of eth0: the NIC has"},
		{"RPS to itself", func(f *Facts) { one(f).RPS = []string{"4"} }, "warning rps-useless: RPS steers the packets of eth0 to CPU 2"},
		{"RPS and queues", func(f *Facts) { f.Devices[1].RPS[0] = "f" }, "note rps-useless: RPS is on for eth0, though"},
		{"RFS", func(f *Facts) { f.Devices[2].RFS[0] = "4096" }, "warning rfs-off: RFS is configured for flannel.1, but off"},
		{"irqbalance", func(f *Facts) { one(f).RPS = []string{"b"}; f.IRQBalance = true }, "note irqbalance: irqbalance may move the interrupts of eth0"},
		{"conntrack", func(f *Facts) { f.Conntrack = f.ConntrackMax * 81 / 100 }, "warning conntrack-full: The conntrack table is 80% full"},
		{"conntrack full", func(f *Facts) { f.Conntrack = f.ConntrackMax }, "serious conntrack-full: The conntrack table is 100% full"},
		{"GRO", func(f *Facts) { f.Devices[1].Off = []string{"rx-gro"} }, "warning offload-off: The offload rx-gro of eth0 is off"},
		{"checksums", func(f *Facts) { f.Devices[1].Off = []string{"tx-checksum-ipv4"} }, "note offload-off: The offload tx-checksum-ipv4 of eth0 is off"},
		{"GRO below two overlays", func(f *Facts) {
			f.Devices[1].Off = []string{"rx-gro"}
			second := f.Devices[2]
			second.Name = "vxlan.calico"
			f.Devices = append(f.Devices, second)
		}, "warning offload-off: The offload rx-gro of eth0 is off"},
		{"GRO of a member of a bond", func(f *Facts) {
			bonded(f)
			f.Devices[1].Off = []string{"rx-gro"}
		}, "warning offload-off: The offload rx-gro of eth0 is off"},
		{"GRO below a VLAN of a bond, which is a port of a bridge", func(f *Facts) {
			bonded(f)
			f.Devices[1].Off, f.Devices[2].Under = []string{"rx-gro"}, "br0"
			f.Devices = append(f.Devices, Device{Link: record.Link{Name: "bond0.5", Kind: "vlan", MTU: 1500}, Up: true, Parent: "bond0", Master: "br0"},
				Device{Link: record.Link{Name: "br0", Kind: "bridge", MTU: 1500}, Up: true})
		}, "warning offload-off: The offload rx-gro of eth0 is off"},
		{"GRO of VXLAN", func(f *Facts) { f.Devices[2].Off = []string{"rx-gro"} }, "note offload-off: The offload rx-gro of flannel.1 is off"},
		{"segmentation", func(f *Facts) { f.Devices[1].Off = []string{udpTunnels} }, "note offload-off: The offload tx-udp_tnl-segmentation of eth0"},
		{"segmentation of Geneve", func(f *Facts) { f.Devices[1].Off, f.Devices[2].Kind = []string{udpTunnels}, "geneve" }, "note offload-off: The offload tx-udp_tnl-segmentation of eth0"},
		{"checksums of VXLAN", func(f *Facts) { f.Devices[2].Off = []string{"tx-checksum-ip-generic"} }, "note offload-off: The offload tx-checksum-ip-generic of flannel.1"},
		{"rp_filter", func(f *Facts) {
			f.Devices[2].RPFilter, f.Stacks = 1, []Stack{{Counts: map[string]uint64{rpFiltered: 50}}}
		}, "warning rp-filter: "},
		{"limit", func(f *Facts) {
			f.Throttled = []Throttled{{"/a", 3, 90 * time.Millisecond}, {"/b", 1, time.Millisecond}}
		}, "warning throttled: Cgroups throttled by CPU limits: 1."},
		{"ring", func(f *Facts) {
			f.Devices[1].Window.Missed, f.Devices[1].Ring, f.Devices[1].RingMax = 5000, 512, 4096
		}, "serious ring-small: eth0 loses packets because its receive ring is full, and"},
		{"largest ring", func(f *Facts) {
			f.Devices[1].Window.Missed, f.Devices[1].Ring, f.Devices[1].RingMax = 5000, 4096, 4096
		}, "serious device-drops: eth0 loses packets because its receive ring is full"},
		{"full link", func(f *Facts) {
			f.Devices[1].Speed, f.Devices[1].Window.TxBytes = 1e9, 118_000_000
		}, "warning nic-cap: eth0 sends or receives at the speed of its link"},
		{"allowance", func(f *Facts) {
			f.Devices[1].Caps = map[string]uint64{"pps_allowance_exceeded": 40, "bw_in_allowance_exceeded": 9}
		}, "warning nic-cap: The cloud's limit for eth0"},
		{"limit of DNS", func(f *Facts) { f.Devices[1].Caps = map[string]uint64{linkLocal: 40} }, "warning nic-cap: eth0 sends more packets to the cloud's DNS"},
		{"conntrack race", counted("nf_conntrack.drop", 12, ""), "warning conntrack-drops: "},
		{"conntrack drops", counted("nf_conntrack.drop", 2000, ""), "serious conntrack-drops: "},
		{"conntrack, invalid", counted("nf_conntrack.invalid", 2000, ""), "note conntrack-invalid: "},
		{"TCP checksums", counted("Tcp.InCsumErrors", 20, ""), "warning tcp-checksums: "},
		{"UDP memory", counted("Udp.MemErrors", 4000, ""), "serious udp-memory: "},
		{"UDP send buffers", counted("Udp.SndbufErrors", 4000, ""), "warning udp-send-full: "},
		{"TCP queues", counted("TcpExt.TCPBacklogDrop", 50, ""), "warning tcp-queue-full: "},
		{"accept queue of a pod", counted("TcpExt.ListenDrops", 30, "v0 (nginx)"), "serious accept-queue-full: "},
		{"too large", counted("Ip.FragFails", 4000, ""), "serious fragmented: "},
		{"not for us", counted("Ip.InAddrErrors", 4000, ""), "serious not-for-us: "},
		{"discards", counted("Ip.OutDiscards", 50, ""), "warning ip-discards: "},
		{"discards of a pod, beside messages about large packets here", func(f *Facts) {
			counted("Ip.OutDiscards", 50, "v0 (nginx)")(f)
			f.Stacks = append(f.Stacks, Stack{Counts: map[string]uint64{"Ip.OutDiscards": 4, "Ip.FragFails": 4}})
		}, "warning ip-discards: "},
		{"IPsec", counted("XfrmInNoStates", 4000, ""), "serious ipsec: "},
		{"IPv6 reassembly", counted("Ip6ReasmFails", 100, ""), "serious reassembly: "},
		{"neighbours", func(f *Facts) { f.NeighbourFulls = map[string]uint64{"arp_cache": 3} }, "serious neighbour-full: "},
		{"netem", func(f *Facts) {
			f.Devices[1].Qdiscs = []Qdisc{{Kind: "netem", Handle: "1:0", Sent: 900, Dropped: 100}}
		}, "serious qdisc-drops: The queue of eth0 (qdisc netem)"},
		{"managed queue", func(f *Facts) {
			f.Devices[1].Qdiscs = []Qdisc{{Kind: "fq_codel", Handle: "1:0", Sent: 900, Dropped: 100}}
		}, "note qdisc-drops: "},
		{"flap", func(f *Facts) { f.Devices[1].CarrierDowns = 1 }, "serious link-flaps: The link of eth0 went down"},
		{"VF gone", func(f *Facts) { f.Gone = []string{"eth1"} }, "warning link-flaps: A NIC went away"},
		{"NetworkManager", func(f *Facts) {
			f.Devices[2].Manager, f.Devices[2].ManagerFile = "NetworkManager", "/run/NetworkManager/devices/3"
		}, "warning link-managed: NetworkManager manages devices of the network plugin: flannel.1"},
		{"host's ring", func(f *Facts) { f.Devices[1].Caps = map[string]uint64{stopQueue: 10} }, "note nic-cap: eth0 stopped sending because the host's ring"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := server()
			c.inject(&f)
			found := Examine(f)
			if len(found) != 1 || !strings.HasPrefix(summary(found)[0], c.want) {
				t.Fatalf("found %q, want %q", summary(found), c.want)
			}
			if x := found[0]; len(x.Evidence) == 0 || x.Cost == "" || x.Do == "" {
				t.Errorf("incomplete: %+v", x)
			}
		})
	}
}

// TestLittleRoomAtTheNIC checks that a NIC that carries a few bytes more than pods need is no finding.
func TestLittleRoomAtTheNIC(t *testing.T) {
	f := server()
	f.Devices[1].MTU = 1540
	if found := Examine(f); len(found) > 0 {
		t.Errorf("found %q", summary(found))
	}
}

// bonded makes eth0 a member of a bond, which counts all that eth0 counts, too.
func bonded(f *Facts) {
	f.Devices[1].Master, f.Devices[2].Under = "bond0", "bond0"
	f.Devices = append(f.Devices, Device{Link: record.Link{Name: "bond0", Kind: "bond", Class: v1alpha1.DeviceNIC, MTU: 1500}, Up: true, Window: f.Devices[1].Window})
}

// wireguard returns a WireGuard device over eth0.
func wireguard(mtu int) Device {
	return Device{Link: record.Link{Name: "wg0", Kind: "wireguard", Class: v1alpha1.DeviceOverlay, MTU: mtu}, Up: true, Tunnelling: true, Under: "eth0", Overhead: 60}
}

// bridged adds a pod behind cni0, on a node whose settings have no net.bridge.
func bridged(f *Facts, mtu int) {
	f.Settings = map[string]string{"net.ipv4.ip_forward": "1"}
	f.Devices = append(f.Devices,
		Device{Link: record.Link{Name: "v0", Kind: "veth", Class: v1alpha1.DeviceHostVeth, MTU: mtu}, Up: true, Master: "cni0", Pod: &PodEnd{}},
		Device{Link: record.Link{Name: "cni0", Kind: "bridge", MTU: mtu}, Up: true, Addresses: []netip.Prefix{netip.MustParsePrefix("10.244.1.1/24")}})
}

// TestNoBridgeNetfilter checks what doctor says without the module br_netfilter, and that this is no fault without kube-proxy or
// without a bridge of pods.
func TestNoBridgeNetfilter(t *testing.T) {
	f := server()
	bridged(&f, 1450)
	if found := Examine(f); len(found) > 0 {
		t.Errorf("without kube-proxy: %q", summary(found))
	}
	f.KubeProxy = "nft ip nat KUBE-SERVICES"
	found := Examine(f)
	if len(found) != 1 || !strings.Contains(fmt.Sprint(found[0].Evidence), "br_netfilter is not loaded") || !strings.HasPrefix(found[0].Do, "modprobe br_netfilter; sysctl -w") {
		t.Errorf("%+v", found)
	}
	f.Devices[4].Name, f.Devices[3].Master = "docker0", "docker0"
	if found := Examine(f); len(found) > 0 {
		t.Errorf("a bridge of Docker: %q", summary(found))
	}
}

// TestNoForwardingOfIPv6 checks that the remedy is about IPv6 in a cluster without IPv4.
func TestNoForwardingOfIPv6(t *testing.T) {
	f := server()
	bridged(&f, 1450)
	f.Settings["net.ipv4.ip_forward"] = "0"
	f.Devices[4].NotForwarding = []string{"/proc/sys/net/ipv6/conf/cni0/forwarding"}
	if found := Examine(f); len(found) != 1 || !strings.HasPrefix(found[0].Do, "sysctl -w net/ipv6/conf/cni0/forwarding=1 ") {
		t.Errorf("%+v", found)
	}
}

// counted returns a fault that shows in one counter, beside healthy traffic.
func counted(counter string, n uint64, pod string) func(*Facts) {
	return func(f *Facts) {
		f.Stacks = []Stack{{Pod: pod, Counts: map[string]uint64{
			"Ip.InReceives": 100_000, "Ip.OutRequests": 90_000, "Ip.ForwDatagrams": 80_000, "Tcp.InSegs": 50_000, "Tcp.PassiveOpens": 900, "Udp.InDatagrams": 40_000, "Udp.OutDatagrams": 40_000,
			counter: n,
		}}}
	}
}

// TestWorkarounds checks that doctor does not advise to undo a common workaround, and names the bugs that it may be for.
func TestWorkarounds(t *testing.T) {
	for _, off := range []string{"tx-checksum-ip-generic", "tx-udp_tnl-segmentation", "tx-checksum-ipv4"} {
		f := server()
		f.Devices[1].Off, f.Devices[1].NIC.Driver = []string{off}, "vmxnet3"
		found := Examine(f)
		if len(found) != 1 || found[0].Severity != Note || strings.HasPrefix(found[0].Do, "ethtool") || !strings.Contains(found[0].Cost, "vmxnet3") {
			t.Errorf("%s: %+v", off, found)
		}
	}
	for _, o := range offloads { // whatever is off, no remedy just switches it on
		f := server()
		f.Devices[1].Off, f.Devices[2].Off = []string{o.name}, []string{o.name}
		for _, found := range Examine(f) {
			if found.Rule == "offload-off" && !strings.HasPrefix(found.Do, "slipstream ") {
				t.Errorf("%s: %q", o.name, found.Do)
			}
		}
	}
	f := server()
	f.Devices[1].Off, f.Devices[1].NIC.Driver = []string{"rx-gro"}, "e1000e"
	if found := Examine(f); len(found) != 1 || found[0].Severity != Note || !strings.Contains(found[0].Cost, "Hardware Unit Hang") {
		t.Errorf("%+v", found)
	}
	f = server()
	f.Devices[2].Off = []string{"tx-checksum-ip-generic"}
	if found := Examine(f); len(found) != 1 || !strings.Contains(found[0].Cost, "before 5.7") || strings.Contains(found[0].Cost, "vmxnet3") {
		t.Errorf("%+v", found)
	}
	for _, pod := range []string{"cali123", "eni0123456789a", "azv0123456789a"} {
		f = server()
		f.Devices[1].RPFilter, f.Devices[1].Kind = 1, "device"
		f.Devices = append(f.Devices, Device{Link: record.Link{Name: pod, Kind: "veth", MTU: 1450}, Up: true, RPFilter: 1, Pod: &PodEnd{}})
		counted(rpFiltered, 4000, "")(&f)
		if found := Examine(f); len(found) != 1 || !strings.HasPrefix(found[0].Do, "sysctl -w net/ipv4/conf/eth0/rp_filter=2   #") || !strings.Contains(found[0].Do, "Felix") {
			t.Errorf("%s: %+v", pod, found)
		}
	}
}

// TestSqueezed checks that the remedy raises both limits of a poll, as the counter does not say which one ended it.
func TestSqueezed(t *testing.T) {
	for usecs, want := range map[string]string{
		"2000": "sysctl -w net.core.netdev_budget=1200 net.core.netdev_budget_usecs=8000   # ",
		"":     "sysctl -w net.core.netdev_budget=1200   # ", // before Linux 4.12
	} {
		f := server()
		f.CPUs[0].Squeezed, f.Node.Sysctls["net.core.netdev_budget_usecs"] = 100, usecs
		if found := squeezed(f); len(found) != 1 || !strings.HasPrefix(found[0].Do, want) {
			t.Errorf("%q: %+v", usecs, found)
		}
	}
}

// TestUnmanaged checks that the remedy for devices that another program manages names all of them, and pods by one pattern.
func TestUnmanaged(t *testing.T) {
	for manager, want := range map[string]string{
		"NetworkManager":   "unmanaged-devices=interface-name:antrea-gw0;interface-name:cni0;interface-name:flannel.1;interface-name:lxc*;interface-name:veth*   # then systemctl reload NetworkManager",
		"systemd-networkd": "Name=antrea-gw0 cni0 flannel.1 lxc* veth* [Link]",
	} {
		f := server()
		for _, name := range []string{"veth01234567", "lxc0123456789ab", "antrea-gw0", "lxc_health", "cni0", "veth89abcdef"} {
			d := Device{Link: record.Link{Name: name, MTU: 1450}, Up: true}
			if name[0] == 'v' {
				d.Kind, d.Pod = "veth", &PodEnd{MTU: 1450}
			}
			f.Devices = append(f.Devices, d)
		}
		for i := 2; i < len(f.Devices); i++ { // from flannel.1 on
			f.Devices[i].Manager, f.Devices[i].ManagerFile = manager, "/run/FILE"
		}
		if found := linkManaged(f); len(found) != 1 || !strings.Contains(found[0].Do, want) {
			t.Errorf("%s: %+v", manager, found)
		}
	}
}

// TestStrictDevicesOfCilium checks that strict devices of Cilium's pods are a fault, and that the remedy does not grow with them.
func TestStrictDevicesOfCilium(t *testing.T) {
	f := server()
	f.Settings = map[string]string{"net.ipv4.ip_forward": "1", "net.ipv4.conf.all.rp_filter": "0"}
	for i := range 100 {
		f.Devices = append(f.Devices, Device{Link: record.Link{Name: fmt.Sprintf("lxc%012x", i), Kind: "veth", MTU: 1450}, Up: true, RPFilter: 1, Pod: &PodEnd{}})
	}
	counted(rpFiltered, 4000, "")(&f)
	if found := Examine(f); len(found) != 1 || !strings.HasPrefix(found[0].Do, "for f in /proc/sys/net/ipv4/conf/lxc*/rp_filter; do echo 2 > $f; done   #") || !strings.HasSuffix(found[0].Evidence[1].Value, "for lxc*") {
		t.Errorf("%+v", found)
	}
}

// TestManyHealthyMachines examines machines that differ in what differs between healthy machines: traffic, a few losses,
// kinds of pods and overlays, settings that are right.
func TestManyHealthyMachines(t *testing.T) {
	for seed := range uint64(1000) {
		r := rand.New(rand.NewPCG(seed, 1))
		f := server()
		if r.IntN(2) == 0 {
			f = vm()
		}
		few := func() uint64 { return uint64(r.IntN(10)) }
		host := map[string]uint64{
			"Ip.InReceives": r.Uint64N(1e6), "Ip.OutRequests": r.Uint64N(1e6), "Ip.ForwDatagrams": r.Uint64N(1e6), "Tcp.InSegs": r.Uint64N(1e6), "Udp.InDatagrams": r.Uint64N(1e6),
			"Ip6OutNoRoutes": r.Uint64N(100), "Icmp.InDestUnreachs": r.Uint64N(1000), "Udp.NoPorts": r.Uint64N(1000), "Tcp.RetransSegs": r.Uint64N(1000),
		}
		for _, l := range stackLosses { // as after a scan, an impatient client, a reboot of another node
			if host[l.lost[0]] == 0 {
				host[l.lost[0]] = few()
			}
		}
		f.Stacks = []Stack{{Counts: host}, {Pod: "v0 (nginx)", Counts: map[string]uint64{"Tcp.InSegs": 1000, "TcpExt.ListenDrops": few(), "Udp.NoPorts": r.Uint64N(100)}}}
		f.Settings = map[string]string{"net.ipv4.ip_forward": "1", "net.bridge.bridge-nf-call-iptables": "1", "net.ipv4.neigh.default.gc_thresh3": "1024"}
		f.NeighbourFulls = map[string]uint64{"arp_cache": 0}
		f.KubeProxy = []string{"", "nft ip nat KUBE-SERVICES"}[r.IntN(2)]
		f.Rules = []map[string]int{nil, {"legacy": 20}, {"nft": 20}}[r.IntN(3)]
		overlay := &f.Devices[2]
		overlay.Tunnelling, overlay.VNI, overlay.VXLANPort, overlay.MAC = true, 1, 8472, "02:00:00:00:01:01"
		overlay.Addresses = []netip.Prefix{netip.MustParsePrefix("10.244.1.0/32")}
		overlay.FDB = []FDBEntry{{"02:00:00:00:02:01", netip.MustParseAddr("10.77.0.2")}, {"00:00:00:00:00:00", netip.MustParseAddr("10.77.0.3")}, {"00:00:00:00:00:00", netip.MustParseAddr("10.77.0.4")}}
		overlay.Neighbours = []Neighbour{{netip.MustParseAddr("10.244.2.0"), "02:00:00:00:02:01"}, {netip.MustParseAddr("fd00::2"), "02:00:00:00:02:01"}}
		pod := Device{Link: record.Link{Name: "v0", Kind: "veth", Class: v1alpha1.DeviceHostVeth, MTU: 1450, RPS: []string{"0"}, RFS: []string{"0"}}, Up: true, Pod: &PodEnd{}}
		lan := []netip.Prefix{netip.MustParsePrefix("192.168.1.5/24")}
		switch r.IntN(8) {
		case 0: // Flannel
			pod.Master = "cni0"
			f.Devices = append(f.Devices, pod, Device{Link: record.Link{Name: "cni0", Kind: "bridge", MTU: 1450}, Up: true, Addresses: []netip.Prefix{netip.MustParsePrefix("10.244.1.1/24")}})
		case 1: // Calico
			overlay.Name, pod.Name, pod.Pod = "vxlan.calico", "cali0123456789a", &PodEnd{MTU: 1450, Device: "eth0"}
			f.Devices = append(f.Devices, pod)
			if r.IntN(2) == 0 {
				six := *overlay
				six.Name, six.MTU, six.Overhead, six.VNI, six.Neighbours, six.FDB = "vxlan-v6.calico", 1430, 70, 4097, nil, nil
				six.Addresses = []netip.Prefix{netip.MustParsePrefix("fd00:10:244::1/128")}
				f.Devices = append(f.Devices, six)
			}
		case 2: // Cilium: pods have the NIC's MTU, and their route a smaller one
			overlay.Name, overlay.Under, overlay.Overhead = "cilium_vxlan", "", 0
			pod.Name, pod.MTU, pod.Pod = "lxc0123456789ab", 1500, &PodEnd{MTU: 1450, Device: "eth0"}
			f.Devices = append(f.Devices, pod)
		case 3: // containers of Docker, which translates their addresses, beside Flannel
			pod.Master, pod.MTU = "docker0", 1500
			f.Devices = append(f.Devices, pod, Device{Link: record.Link{Name: "docker0", Kind: "bridge", MTU: 1500}, Up: r.IntN(2) == 0, Addresses: []netip.Prefix{netip.MustParsePrefix("172.17.0.1/16")}})
			f.Devices[4].Up = true
		case 4: // a container on two networks
			second := pod
			pod.Master, pod.Pod = "cni0", &PodEnd{MTU: 1450, Device: "eth0", Gateway: netip.MustParseAddr("10.244.1.1"), GatewayMAC: "02:00:00:00:0c:01"}
			second.Name, second.MTU, second.Master = "v1", 1500, "br-0123456789ab"
			f.Devices = append(f.Devices, pod, second, Device{Link: record.Link{Name: "cni0", Kind: "bridge", MTU: 1450}, Up: true, MAC: "02:00:00:00:0c:01", Addresses: []netip.Prefix{netip.MustParsePrefix("10.244.1.1/24")}},
				Device{Link: record.Link{Name: "br-0123456789ab", Kind: "bridge", MTU: 1500}, Up: true, MAC: "02:00:00:00:0d:01", Addresses: []netip.Prefix{netip.MustParsePrefix("172.18.0.1/16")}})
		case 5: // containers on a bridge to the LAN, whose gateway is another machine
			pod.Master, pod.MTU, pod.Pod = "vmbr0", 1500, &PodEnd{MTU: 1500, Device: "eth0", Gateway: netip.MustParseAddr("192.168.1.1"), GatewayMAC: "02:00:00:00:fe:01"}
			f.Devices = append(f.Devices[:2], pod, Device{Link: record.Link{Name: "vmbr0", Kind: "bridge", MTU: 1500}, Up: true, MAC: "02:00:00:00:0e:01", Addresses: lan, NotForwarding: []string{"/proc/sys/net/ipv4/conf/vmbr0/forwarding"}})
			f.Devices[1].Master, f.Settings["net.ipv4.ip_forward"] = "vmbr0", "0"
		case 6: // Docker alone, with its policy
			pod.Master, pod.MTU = "br-0123456789ab", 1500
			f.Devices = append(f.Devices[:2], pod, Device{Link: record.Link{Name: "br-0123456789ab", Kind: "bridge", MTU: 1500}, Up: true, Addresses: []netip.Prefix{netip.MustParsePrefix("172.18.0.1/16")}})
		case 7: // pods without IPv4, whose programs try it
			pod.Master = "cni0"
			overlay.Addresses, overlay.Neighbours = []netip.Prefix{netip.MustParsePrefix("fd00:10:244:1::/128")}, nil
			f.Devices = append(f.Devices, pod, Device{Link: record.Link{Name: "cni0", Kind: "bridge", MTU: 1450}, Up: true, Addresses: []netip.Prefix{netip.MustParsePrefix("fd00:10:244:1::1/64")}})
			f.Settings["net.ipv4.ip_forward"] = "0"
			f.Stacks[1].Counts["Ip.OutNoRoutes"], host["Ip.OutNoRoutes"], host["Ip6InDiscards"] = r.Uint64N(1000), r.Uint64N(1000), r.Uint64N(1000)
		}
		docker := slices.ContainsFunc(f.Devices, func(d Device) bool { return d.Name == "br-0123456789ab" }) && len(f.Devices) == 4
		if r.IntN(2) == 0 { // Docker's policy, with rules that accept pods, some counted packets that nobody asked for
			f.Chains = []Chain{{Name: "nft ip filter FORWARD", Hook: hookForward, Drops: true, Opens: !docker, Counted: true, Dropped: few(), RuleDropped: few()},
				{Name: "nft inet f in", Hook: hookInput, Drops: true, Counted: true, Dropped: r.Uint64N(1000), RuleDropped: r.Uint64N(1000)}}
		}
		if r.IntN(2) == 0 {
			f.Devices = append(f.Devices, Device{Link: record.Link{Name: "eth1", Kind: "device", NIC: &record.NIC{Type: record.NICDevice, RxQueues: 4}}, NoCarrier: true}, Device{Link: record.Link{Name: "wg0", Kind: "wireguard", MTU: 1420}, Up: true, Tunnelling: true, Under: "eth0", Overhead: 60},
				Device{Link: record.Link{Name: "tunl0", Kind: "ipip", MTU: 1480}})
		}
		f.Devices[1].Qdiscs = []Qdisc{{Kind: "fq", Handle: "1:0", Sent: 1e6, Dropped: few()}, {Kind: "clsact", Handle: "ffff:0", Sent: 100, Dropped: r.Uint64N(1000)}}
		if r.IntN(2) == 0 { // the queues below mq
			for range 4 {
				f.Devices[1].Qdiscs = append(f.Devices[1].Qdiscs, Qdisc{Kind: "fq_codel", Handle: "none", Sent: 1000, Dropped: few()})
			}
		}
		if found := Examine(f); len(found) > 0 {
			t.Fatalf("seed %d: %q", seed, summary(found))
		}
	}
}

// TestEveryRuleIsDescribed checks that the how-to has a section with the name of each rule.
func TestEveryRuleIsDescribed(t *testing.T) {
	page, err := os.ReadFile("../../docs/how-to/doctor.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range ruleNames() {
		if !strings.Contains(string(page), "| `"+name+"` |") {
			t.Errorf("docs/how-to/doctor.md does not describe the rule %s", name)
		}
	}
}

// TestVirtualFunctions checks the rule for virtual functions against recorded machines.
func TestVirtualFunctions(t *testing.T) {
	want := map[string]string{
		"netvsc":            "note: The host provides no virtual function",
		"netvsc-no-driver":  "warning: eth0 has a virtual function without a driver",
		"netvsc-not-bonded": "warning: eth0 has a virtual function that is not bonded",
		"netvsc-vf-down":    "warning: The virtual function of eth0 is down",
		"netvsc-vfio":       "warning: eth0 has a virtual function, and its driver vfio-pci creates",
	}
	for _, name := range nictest.Names(t) {
		var f Facts
		for device, n := range nic.Facts(nictest.Load(t, name).Source().Read()) {
			f.Devices = append(f.Devices, Device{Link: record.Link{Name: device, NIC: &n}, Up: true})
		}
		got := ""
		for _, found := range vf(f) {
			got += fmt.Sprintf("%s: %s\n", found.Severity, found.What)
		}
		if want := want[name]; !strings.HasPrefix(got, want) || (want == "") != (got == "") || strings.Count(got, "\n") > 1 {
			t.Errorf("%s: found %q, want %q", name, got, want)
		}
	}
}

// TestIdleVirtualFunction checks that the packets decide whether a virtual function that is up counts as idle.
func TestIdleVirtualFunction(t *testing.T) {
	for _, c := range []struct {
		viaVF, all uint64
		found      bool
	}{{0, 1000, true}, {990, 1000, false}, {0, 50, false}} {
		f := Facts{Devices: []Device{{
			Link:   record.Link{Name: "eth0", NIC: &record.NIC{VF: &record.VF{Function: "15b3:1016", Driver: "mlx5_core", Device: "eth1", Bonded: true, Up: true}}},
			Window: Packets{Rx: c.all}, VF: &record.VFUse{RxPackets: c.all, VFRxPackets: c.viaVF},
		}}}
		if found := vf(f); (len(found) == 1) != c.found {
			t.Errorf("%d of %d packets: %q", c.viaVF, c.all, summary(found))
		}
	}
}

// ruleNames returns the names of all rules.
func ruleNames() (names []string) {
	for _, r := range rules {
		names = append(names, r.name)
	}
	for _, r := range pathRules {
		names = append(names, r.name)
	}
	for _, r := range clusterRules {
		names = append(names, r.name)
	}
	names = slices.AppendSeq(names, maps.Keys(stackLosses))
	return append(names, hostUnfit, RuleNodeUnfit, labLacks, overlayDiffers)
}
