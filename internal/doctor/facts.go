package doctor

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"slipstream.dev/internal/record"
)

// Facts describe a machine, and the network namespace in which they were read. A field is empty if the
// machine lacks what it describes.
type Facts struct {
	Node record.Node
	// Window is the time between two readings of the counters.
	Window  time.Duration
	CPUs    []record.CPU
	Devices []Device
	// FlowLimited counts the packets that the flow limit dropped in the window.
	FlowLimited uint64
	// Lacks are the capabilities that accelerators need and this process does not have.
	Lacks []string
	// BTF reports whether the kernel has type information for eBPF programs.
	BTF bool
	// Tools are the tools that an experiment may name and that are installed, and NoTools the missing ones.
	Tools, NoTools []string
	// FastPath explains why the fast path cannot run. It is empty if the fast path can run, or was not tried.
	FastPath string
	// Flowtables are those of nftables.
	Flowtables []Flowtable
	// Conntrack is the number of conntrack entries, and ConntrackMax the largest number allowed; both are 0
	// without conntrack.
	Conntrack, ConntrackMax uint64
	// Stacks are the network stacks of doctor's own network namespace, and of the pods behind its veths whose processes
	// doctor can see.
	Stacks     []Stack
	IRQBalance bool
	// NeighbourFulls counts how often the full neighbour table refused an entry in the window, by file of
	// /proc/net/stat.
	NeighbourFulls map[string]uint64
	// Settings are the sysctls of this network namespace that rules judge. Those that the kernel does not have are
	// missing.
	Settings map[string]string
	// Chains are the base chains of netfilter that received packets pass.
	Chains []Chain
	// Unread says which rules of netfilter, and which counters, were not read, and why.
	Unread []Evidence
	// Rules counts the rules in the tables of iptables, by "legacy" and "nft".
	Rules map[string]int
	// KubeProxy names the evidence that Kubernetes translates the addresses of services here; "" if there is none.
	KubeProxy string
	// Blackholes are routes that make the kernel drop packets.
	Blackholes []netip.Prefix
	// Gone are the names of NICs that went away or were replaced in the window.
	Gone []string
	// Throttled lists the cgroups that their CPU limits throttled in the window, the worst first.
	Throttled []Throttled
}

// Throttled describes how a CPU limit throttled a cgroup.
type Throttled struct {
	Cgroup string
	Times  uint64
	// Time is the total time that its threads waited.
	Time time.Duration
}

// Flowtable is a flowtable of nftables.
type Flowtable struct {
	// Name consists of family, table and flowtable, as nft lists them.
	Name string
	// Devices are the names of the devices whose packets it forwards.
	Devices []string
}

// Chain is a base chain of netfilter.
type Chain struct {
	// Name tells which tool shows it: "iptables-legacy FORWARD", "nft ip filter FORWARD".
	Name string
	// Hook is "prerouting", "input" or "forward".
	Hook string
	// RuleDropped counts the packets that rules of the chain dropped or rejected in the window, as far as they have counters.
	RuleDropped uint64
	// Drops means that the chain drops what none of its rules accepts: by its policy, or, if ByRule, by a rule without conditions.
	Drops, ByRule bool
	// Opens means that a rule accepts new connections of pods, as far as doctor can tell.
	Opens bool
	// Dropped counts the packets that met the policy, or that rule, in the window. Counted is false if it has no counter.
	Dropped uint64
	Counted bool
}

const (
	hookInput   = "input"
	hookForward = "forward"
)

// Device is a network device.
type Device struct {
	record.Link
	Up bool
	// NoCarrier means that the link is up and the wire is not.
	NoCarrier bool
	// CarrierDowns counts how often the wire went down in the window.
	CarrierDowns uint64
	// Master is the bridge, bond or VRF that the device belongs to, and Parent the device that sends for a VLAN or macvlan.
	Master, Parent string
	MAC            string
	// Addresses are those of global scope.
	Addresses []netip.Prefix
	// Routes is the number of routes through the device to other machines or pods.
	Routes int
	// NotForwarding are the files of the settings that keep the kernel from forwarding packets that arrive here.
	NotForwarding []string
	// Pod describes the other end of a veth that leads to a pod.
	Pod *PodEnd
	// Manager is the program that manages the device, NetworkManager or systemd-networkd, and ManagerFile its file
	// about the device.
	Manager, ManagerFile string
	Qdiscs               []Qdisc
	// Emulates means that a qdisc of the kind netem delays or drops packets on purpose.
	Emulates bool
	// NoHairpin means that a bridge does not send packets back to the port that they came from.
	NoHairpin bool
	// VNI is the network identifier of a VXLAN device, FDB are its forwarding entries to other nodes, and Neighbours the
	// entries of addresses behind an overlay.
	VNI        int
	FDB        []FDBEntry
	Neighbours []Neighbour
	// Unresolved are gateways of routes through the device. The kernel did not know their MAC addresses at either end
	// of the window.
	Unresolved []netip.Addr
	// Local is the source address that a tunnel device is configured with, if any. Elsewhere is the device that the
	// routes to its remote addresses use, if none of them uses the device that it is bound to.
	Local     netip.Addr
	Elsewhere string
	// Tunnelling means that the device encapsulates, whether or not it is bound to another device.
	Tunnelling bool
	// Under is the device that sends the encapsulated packets, and Overhead the number of bytes that
	// encapsulation adds to an IP packet. They are empty and 0 for all other devices.
	Under    string
	Overhead int
	// VXLANPort is the UDP port of a VXLAN device.
	VXLANPort uint16
	// Off are the supported offloads that are switched off, by ethtool's names.
	Off []string
	// Speed is the rate of a NIC's link in bit/s; 0 if the driver does not report it.
	Speed float64
	// Ring is the size of the receive ring in packets, and RingMax its maximum; both are 0 without a ring.
	Ring, RingMax uint32
	// Caps are the driver's counters of packets that a limit of the cloud delayed or dropped in the window,
	// by ethtool's names.
	Caps map[string]uint64
	// IRQ lists the CPUs that handle the device's interrupts; it is empty if the device has none.
	IRQ string
	// RPFilter is the effective setting: the higher value of conf/all and conf/DEVICE.
	RPFilter int
	// Window counts the packets in the window, and Boot those since the device was created.
	Window, Boot Packets
	// VF describes which path the packets took in the window, if the device may have a virtual function.
	VF *record.VFUse
}

// PodEnd is a pod's end of a veth, as far as doctor can see it.
type PodEnd struct {
	// MTU is the MTU of the pod's default route or, if the route has none, of its device; 0 if it is unknown.
	MTU    int
	Device string
	// Emulates is as in Device.
	Emulates bool
	// Gateway is the pod's gateway, and GatewayMAC its MAC address according to the pod's neighbour table; "" if it has none.
	// GatewayFailed means that the gateway did not answer, at both ends of the window. GatewayAsked means that the kernel was
	// asking for it at one of them: an entry that failed may be old, as the kernel keeps it while the table is small.
	Gateway       netip.Addr
	GatewayMAC    string
	GatewayFailed bool
	GatewayAsked  bool
}

// FDBEntry is a forwarding entry of a VXLAN device: frames to MAC go to the node with the address To.
type FDBEntry struct {
	MAC string
	To  netip.Addr
}

// Neighbour is an entry of the neighbour table.
type Neighbour struct {
	IP  netip.Addr
	MAC string
}

// Qdisc is a queueing discipline with its counters of the window.
type Qdisc struct {
	Kind, Handle  string
	Sent, Dropped uint64
}

// stopQueue is hv_netvsc's counter of how often the host's ring was full.
const stopQueue = "stop_queue"

// linkLocal is ena's counter of dropped packets to the cloud's own services at link-local addresses.
const linkLocal = "linklocal_allowance_exceeded"

// Packets are the packet counters of a device.
type Packets struct {
	Rx, Tx           uint64
	RxBytes, TxBytes uint64
	// Missed packets found the receive ring full, Damaged ones arrived with errors, and TxDropped ones were
	// not sent.
	Missed, Damaged, TxDropped uint64
	// OtherHost packets had the MAC address of another machine.
	OtherHost uint64
}

func (p Packets) since(b Packets) Packets {
	return Packets{p.Rx - b.Rx, p.Tx - b.Tx, p.RxBytes - b.RxBytes, p.TxBytes - b.TxBytes, p.Missed - b.Missed, p.Damaged - b.Damaged, p.TxDropped - b.TxDropped, p.OtherHost - b.OtherHost}
}

// softirq returns the share of the window that a CPU spent in softirqs. The kernel counts in ticks, so the
// share is capped at 1.
func (f Facts) softirq(c record.CPU) float64 { return min(1, c.Softirq/f.Window.Seconds()) }

func (f Facts) device(name string) (Device, bool) {
	i := slices.IndexFunc(f.Devices, func(d Device) bool { return d.Name == name })
	if i < 0 {
		return Device{}, false
	}
	return f.Devices[i], true
}

// has reports whether the machine has an address.
func (f Facts) has(ip netip.Addr) bool {
	return slices.ContainsFunc(f.Devices, func(d Device) bool { return d.has(ip) })
}

// has reports whether the device has an address.
func (d Device) has(ip netip.Addr) bool {
	return slices.ContainsFunc(d.Addresses, func(p netip.Prefix) bool { return p.Addr() == ip })
}

// rps reports whether a queue of the device has an RPS mask, and rfs whether a queue has RFS entries.
func (d Device) rps() bool { return slices.ContainsFunc(d.RPS, isSet) }
func (d Device) rfs() bool { return slices.ContainsFunc(d.RFS, isSet) }

// isSet reports whether a mask or number is not 0.
func isSet(value string) bool { return strings.Trim(value, "0,") != "" }

// Known returns facts that no rule judges, one line each, for the reader's information.
func (f Facts) Known() []Evidence {
	s := f.Node.Sysctls
	known := []Evidence{
		evidence("kernel", "%s, %s", f.Node.Kernel, f.Node.Arch),
		evidence("CPUs", "%s", f.Node.CPUs),
		evidence("congestion control", "%s", s["net.ipv4.tcp_congestion_control"]),
		evidence("default qdisc", "%s", s["net.core.default_qdisc"]),
	}
	known = append(known, f.Unread...)
	known = append(known, evidence("tools for experiments", "%s", strings.Join(f.Tools, ", ")), evidence("not installed", "%s", strings.Join(f.NoTools, ", ")))
	if entries, ok := s[flowTable]; ok {
		known = append(known, evidence("flow table of RFS", "%s entries", entries))
	}
	if f.ConntrackMax > 0 {
		known = append(known, evidence("conntrack", "%d of %d entries", f.Conntrack, f.ConntrackMax))
	}
	for _, d := range f.Devices {
		switch {
		case d.NIC != nil:
			known = append(known, evidence(d.Name, "%s; MTU %d", d.NIC, d.MTU))
		case d.Under != "":
			known = append(known, evidence(d.Name, "%s over %s; MTU %d", d.Kind, d.Under, d.MTU))
		}
	}
	return slices.DeleteFunc(known, func(k Evidence) bool { return k.Value == "" })
}
