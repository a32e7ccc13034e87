package doctor

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"slipstream.dev/internal/record"
)

// Facts are what was read of a machine, and of the network namespace that the reader was in. What the
// machine lacks is empty.
type Facts struct {
	Node record.Node
	// Window is the time between two readings of the counters.
	Window  time.Duration
	CPUs    []record.CPU
	Devices []Device
	// FlowLimited are the packets that the flow limit dropped in the window.
	FlowLimited uint64
	// Lacks are the capabilities that accelerators need and this process does not have.
	Lacks []string
	// BTF tells whether the kernel has its types for eBPF programs.
	BTF bool
	// Tools are those installed that an experiment may name, and NoTools the others.
	Tools, NoTools []string
	// FastPath says why the fast path cannot run; empty if it can, or was not tried.
	FastPath string
	// Flowtables of nftables.
	Flowtables []Flowtable
	// Conntrack entries, and how many there may be; 0 without conntrack.
	Conntrack, ConntrackMax uint64
	// RPFiltered are the packets that rp_filter dropped in the window.
	RPFiltered uint64
	IRQBalance bool
	// Throttled are the cgroups that their CPU limits throttled in the window, the worst first.
	Throttled []Throttled
}

// Throttled is what a CPU limit did to a cgroup.
type Throttled struct {
	Cgroup string
	Times  uint64
	// Time that its threads waited, in total.
	Time time.Duration
}

// Flowtable is a flowtable of nftables.
type Flowtable struct {
	// Name is family, table and flowtable, as nft lists them.
	Name string
	// Devices are the names of those at which it forwards packets.
	Devices []string
}

// Device is a network device.
type Device struct {
	record.Link
	Up bool
	// Under is the device that an encapsulation is sent by, and Overhead the bytes that it adds to an IP
	// packet; empty and 0 for all other devices.
	Under    string
	Overhead int
	// VXLANPort is the UDP port of a VXLAN device.
	VXLANPort uint16
	// Off are the offloads that the device has, switched off, by ethtool's names.
	Off []string
	// Speed of a NIC's link in bit/s; 0 if the driver does not tell.
	Speed float64
	// Ring is the size of the receive ring, in packets, and RingMax what it could be; 0 if there is none.
	Ring, RingMax uint32
	// Caps are the driver's counters of packets that a cloud's limit held up or dropped in the window, by
	// ethtool's names.
	Caps map[string]uint64
	// IRQ is the CPUs that take its interrupts, as a list; empty if it has none.
	IRQ string
	// RPFilter is what applies: the higher value of conf/all and conf/DEVICE.
	RPFilter int
	// Window and Boot are packets in the window and since the device was created.
	Window, Boot Packets
	// VF is which way packets took in the window, where the device may have a virtual function.
	VF *record.VFUse
}

// stopQueue is hv_netvsc's counter of the times that the host's ring was full.
const stopQueue = "stop_queue"

// Packets are counters of a device.
type Packets struct {
	Rx, Tx           uint64
	RxBytes, TxBytes uint64
	// Missed found the receive ring full; Damaged arrived with errors; TxDropped were not sent.
	Missed, Damaged, TxDropped uint64
}

func (p Packets) since(b Packets) Packets {
	return Packets{p.Rx - b.Rx, p.Tx - b.Tx, p.RxBytes - b.RxBytes, p.TxBytes - b.TxBytes, p.Missed - b.Missed, p.Damaged - b.Damaged, p.TxDropped - b.TxDropped}
}

// softirq returns the share of the window that a CPU spent in softirqs. By ticks, it may come out above 1.
func (f Facts) softirq(c record.CPU) float64 { return min(1, c.Softirq/f.Window.Seconds()) }

func (f Facts) device(name string) (Device, bool) {
	i := slices.IndexFunc(f.Devices, func(d Device) bool { return d.Name == name })
	if i < 0 {
		return Device{}, false
	}
	return f.Devices[i], true
}

// rps tells whether a queue of the device has an RPS mask, and rfs whether one has RFS entries.
func (d Device) rps() bool { return slices.ContainsFunc(d.RPS, isSet) }
func (d Device) rfs() bool { return slices.ContainsFunc(d.RFS, isSet) }

// isSet tells whether a mask or number is not 0.
func isSet(value string) bool { return strings.Trim(value, "0,") != "" }

// Known are the facts that no rule judges, for the reader, a line each.
func (f Facts) Known() []Evidence {
	s := f.Node.Sysctls
	known := []Evidence{
		evidence("kernel", "%s, %s", f.Node.Kernel, f.Node.Arch),
		evidence("CPUs", "%s", f.Node.CPUs),
		evidence("congestion control", "%s", s["net.ipv4.tcp_congestion_control"]),
		evidence("default qdisc", "%s", s["net.core.default_qdisc"]),
	}
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

// parseCounter reads one counter of /proc/net/netstat: a line of names for each group, then one of values;
// 0 if it is not there.
func parseCounter(text, group, name string) uint64 {
	var names []string
	for line := range strings.Lines(text) {
		columns := strings.Fields(line)
		if len(columns) == 0 || columns[0] != group+":" {
			continue
		}
		if names == nil {
			names = columns
			continue
		}
		if i := slices.Index(names, name); i >= 0 && i < len(columns) {
			n, _ := strconv.ParseUint(columns[i], 10, 64)
			return n
		}
		return 0
	}
	return 0
}
