package doctor

import (
	"bytes"
	"errors"
	"fmt"
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
	CPUs    []CPU
	Devices []Device
	// Lacks are the capabilities that accelerators need and this process does not have.
	Lacks []string
	// BTF tells whether the kernel has its types for eBPF programs.
	BTF bool
	// Tools are those installed that an experiment may name, and NoTools the others.
	Tools, NoTools []string
	// FastPath says why the fast path cannot run; nil if it can, or was not tried.
	FastPath error
	// Conntrack entries, and how many there may be; 0 without conntrack.
	Conntrack, ConntrackMax uint64
	// RPFiltered are the packets that rp_filter dropped in the window.
	RPFiltered uint64
	IRQBalance bool
	// Throttled are sentences, one for each CPU limit that throttled this process in the window.
	Throttled []string
}

// CPU is what one CPU did in the window.
type CPU struct {
	ID int
	// Softirq is the share of the window in softirqs, by ticks.
	Softirq float64
	Softnet Softnet
}

// Softnet is the counters of one CPU in /proc/net/softnet_stat. In the kernel they have 32 bits, and wrap.
type Softnet struct {
	Processed, Dropped, Squeezed, FlowLimited uint32
}

func (s Softnet) since(b Softnet) Softnet {
	return Softnet{s.Processed - b.Processed, s.Dropped - b.Dropped, s.Squeezed - b.Squeezed, s.FlowLimited - b.FlowLimited}
}

// Device is a network device.
type Device struct {
	record.Link
	Up bool
	// Under is the device that an encapsulation is sent by, and Overhead the bytes that it adds to an IP
	// packet; empty and 0 for all other devices.
	Under    string
	Overhead int
	// Off are the offloads that the device has, switched off, by ethtool's names.
	Off []string
	// IRQ is the CPUs that take its interrupts, as a list; empty if it has none.
	IRQ string
	// RPFilter is what applies: the higher value of conf/all and conf/DEVICE.
	RPFilter int
	// Window and Boot are packets in the window and since the device is there.
	Window, Boot Packets
	// VF is which way packets took in the window, where the device may have a virtual function.
	VF *record.VFUse
}

// Packets are counters of a device.
type Packets struct {
	Rx, Tx uint64
	// Missed had no place in the receive ring; Damaged were received with errors; TxDropped were not sent.
	Missed, Damaged, TxDropped uint64
}

func (p Packets) since(b Packets) Packets {
	return Packets{p.Rx - b.Rx, p.Tx - b.Tx, p.Missed - b.Missed, p.Damaged - b.Damaged, p.TxDropped - b.TxDropped}
}

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

// Known are the facts that are for the reader to judge, a line each.
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

// parseSoftnet reads /proc/net/softnet_stat, a line for each CPU online, of hexadecimal columns
// (softnet_seq_show in net/core/net-procfs.c): 0 processed, 1 dropped, 2 time_squeeze,
// 10 flow_limit_count and, since Linux 5.10, 12 the CPU's number.
func parseSoftnet(text []byte) (map[int]Softnet, error) {
	all := make(map[int]Softnet)
	for line := range bytes.Lines(text) {
		columns := strings.Fields(string(line))
		if len(columns) < 13 {
			return nil, fmt.Errorf("softnet_stat has %d columns, of at least 13", len(columns))
		}
		var v [13]uint32
		for i := range v {
			n, err := strconv.ParseUint(columns[i], 16, 32)
			if err != nil {
				return nil, fmt.Errorf("softnet_stat: %w", err)
			}
			v[i] = uint32(n)
		}
		all[int(v[12])] = Softnet{Processed: v[0], Dropped: v[1], Squeezed: v[2], FlowLimited: v[10]}
	}
	return all, nil
}

// parseSoftirq reads from /proc/stat the ticks of 10 ms that each CPU spent in softirqs (proc_stat(5)).
func parseSoftirq(text []byte) (map[int]uint64, error) {
	all := make(map[int]uint64)
	for line := range bytes.Lines(text) {
		columns := strings.Fields(string(line))
		if len(columns) == 0 || !strings.HasPrefix(columns[0], "cpu") || columns[0] == "cpu" {
			continue
		}
		if len(columns) < 8 {
			return nil, errors.New("stat: a CPU has fewer than 7 columns")
		}
		id, err := strconv.Atoi(columns[0][len("cpu"):])
		if err != nil {
			return nil, fmt.Errorf("stat: %w", err)
		}
		if all[id], err = strconv.ParseUint(columns[7], 10, 64); err != nil {
			return nil, fmt.Errorf("stat: %w", err)
		}
	}
	return all, nil
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
