package doctor

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/record"
)

func (f Facts) window() string { return f.Window.Round(100 * time.Millisecond).String() }

const lostPackets = "TCP retransmits the packet and slows down; UDP loses it. How much that costs was not measured; trials.jsonl has the retransmits of each trial of an experiment."

// loss judges the packets lost in the window against all packets. Any healthy machine may lose fewer than
// 10, or fewer than 1 in 10,000.
func loss(lost, all uint64) (Severity, bool) {
	switch {
	case lost < 10 || lost*10_000 < all:
		return "", false
	case lost*100 < all:
		return Warning, true
	}
	return Serious, true
}

// softnet adds up the softnet counters of all CPUs in the window.
func (f Facts) softnet() (processed, dropped, squeezed uint64) {
	for _, c := range f.CPUs {
		processed += c.Processed
		dropped += c.Dropped
		squeezed += c.Squeezed
	}
	return processed, dropped, squeezed
}

func backlogFull(f Facts) []Finding {
	all, dropped, _ := f.softnet()
	// A packet above the flow limit counts in both (enqueue_to_backlog in net/core/dev.c).
	dropped -= min(f.FlowLimited, dropped)
	severity, lost := loss(dropped, all)
	if !lost {
		return nil
	}
	limit := f.Node.Sysctls["net.core.netdev_max_backlog"]
	return []Finding{{
		Severity: severity,
		What:     "Packets are dropped because the backlog of a CPU is full.",
		Evidence: []Evidence{
			evidence("/proc/net/softnet_stat, dropped, in "+f.window(), "%d of %d packets", dropped, all),
			evidence("/proc/sys/net/core/netdev_max_backlog", "%s", limit),
		},
		Cost: lostPackets,
		Do:   fmt.Sprintf("sysctl -w net.core.netdev_max_backlog=%s   # if bursts fill it; if the CPU is busy all the time: %s", quadruple(limit), proveSteering),
	}}
}

func flowLimit(f Facts) []Finding {
	all, _, _ := f.softnet()
	severity, lost := loss(f.FlowLimited, all)
	if !lost {
		return nil
	}
	return []Finding{{
		Severity: severity,
		What:     "The flow limit drops packets of large flows.",
		Evidence: []Evidence{evidence("/proc/net/softnet_stat, flow_limit_count, in "+f.window(), "%d of %d packets", f.FlowLimited, all)},
		Cost:     "The flow limit protects small flows from large ones on an overloaded CPU. It may treat all VXLAN packets between two nodes as a few large flows.",
		Do:       "sysctl -w net.core.flow_limit_cpu_bitmap=0   # unless somebody switched it on for a reason",
	}}
}

// squeezed finds polls that were cut off. The kernel ends a poll after netdev_budget packets, 300 by
// default, or after netdev_budget_usecs.
func squeezed(f Facts) []Finding {
	all, _, squeezed := f.softnet()
	const full = 300
	if squeezed < 10 || squeezed*full*10 < all { // less than a tenth of the packets arrived in full polls
		return nil
	}
	s := f.Node.Sysctls
	do := "sysctl -w net.core.netdev_budget=" + quadruple(s["net.core.netdev_budget"])
	if usecs := s["net.core.netdev_budget_usecs"]; usecs != "" { // time_squeeze counts both limits (net_rx_action)
		do += " net.core.netdev_budget_usecs=" + quadruple(usecs)
	}
	return []Finding{{
		Severity: Note,
		What:     "CPUs often stop receiving before their queues are empty, because NAPI polls used up their budget of packets or of time.",
		Evidence: []Evidence{
			evidence("/proc/net/softnet_stat, time_squeeze, in "+f.window(), "%d for %d packets", squeezed, all),
			evidence("/proc/sys/net/core/netdev_budget, netdev_budget_usecs", "%s, %s", s["net.core.netdev_budget"], s["net.core.netdev_budget_usecs"]),
		},
		Cost: "Packets wait while the CPU runs other softirqs and programs. That costs latency; packets are lost only if a queue overflows.",
		Do:   do + "   # and compare two runs: slipstream compare BEFORE AFTER",
	}}
}

// The counters of a device, by their names in sysfs.
const (
	missed    = "rx_missed_errors"
	damaged   = "rx_errors"
	txDropped = "tx_dropped"
)

// smallRing reports whether the receive ring could be larger.
func (d Device) smallRing() bool { return d.Ring > 0 && d.Ring < d.RingMax }

func ringSmall(f Facts) (found []Finding) {
	for _, d := range f.Devices {
		severity, lost := loss(d.Window.Missed, d.Window.Missed+d.Window.Rx)
		if !lost || !d.smallRing() {
			continue
		}
		found = append(found, Finding{
			Severity: severity,
			What:     fmt.Sprintf("%s loses packets because its receive ring is full, and the ring could be larger.", d.Name),
			Evidence: []Evidence{
				evidence("/sys/class/net/"+d.Name+"/statistics/"+missed+", in "+f.window(), "%d, beside %d packets", d.Window.Missed, d.Window.Rx),
				evidence("ethtool -g "+d.Name, "%d receive descriptors of at most %d", d.Ring, d.RingMax),
			},
			Cost: lostPackets,
			Do:   fmt.Sprintf("ethtool -G %s rx %d   # some NICs reset their link, and a larger ring uses more cache", d.Name, d.RingMax),
		})
	}
	return found
}

// full is the share of its link's speed at which a NIC counts as the limit.
const full = 0.95

// frame is the number of bytes on the wire that the counters leave out for each frame: preamble, checksum
// and gap (IEEE 802.3, clauses 3 and 4.4.2).
const frame = 24

// nicCap finds NICs whose link is full, or that the cloud limits.
func nicCap(f Facts) (found []Finding) {
	for _, d := range f.Devices {
		if d.NIC == nil {
			continue
		}
		rx := float64(d.Window.RxBytes+frame*d.Window.Rx) * 8 / f.Window.Seconds()
		tx := float64(d.Window.TxBytes+frame*d.Window.Tx) * 8 / f.Window.Seconds()
		if d.Speed > 0 && max(rx, tx) >= full*d.Speed {
			found = append(found, Finding{
				Severity: Warning,
				Fault:    "link",
				What:     fmt.Sprintf("%s sends or receives at the speed of its link.", d.Name),
				Evidence: []Evidence{
					evidence("/sys/class/net/"+d.Name+"/statistics, in "+f.window(), "%.2f Gbit/s received, %.2f Gbit/s sent, with preamble, checksum and gap", rx/1e9, tx/1e9),
					evidence("/sys/class/net/"+d.Name+"/speed", "%.0f Mbit/s", d.Speed/1e6),
				},
				Cost: "The link is the limit: accelerators save CPU time, but none makes it faster.",
				Do:   "Use a faster NIC, or more of them. To see how much CPU time an accelerator saves: slipstream report RESULT, metric cpu_per_gb",
			})
		}
		for _, name := range slices.Sorted(maps.Keys(d.Caps)) {
			if finding, ok := capped(f, d, name); ok {
				found = append(found, finding)
			}
		}
	}
	return found
}

// capped judges a driver's counter of packets that met a limit of the cloud.
func capped(f Facts, d Device, name string) (Finding, bool) {
	const few = 10
	n := d.Caps[name]
	finding := Finding{
		Severity: Warning,
		Fault:    name,
		What:     fmt.Sprintf("The cloud's limit for %s delayed or dropped packets.", d.Name),
		Evidence: []Evidence{evidence("ethtool -S "+d.Name+", "+name+", in "+f.window(), "%d", n)},
		Cost:     "The instance type limits bandwidth, packets per second or connections: no accelerator changes that.",
		Do:       "slipstream run instances   # instance types by price",
	}
	switch name {
	case linkLocal:
		finding.What = fmt.Sprintf("%s sends more packets to the cloud's DNS, instance metadata and time than it may, and the rest is dropped.", d.Name)
		finding.Cost = "DNS queries of the node and its pods wait for their timeout, often 5 s. The limit is one of each network interface, for these services together (AWS: 1,024 packets per second): a larger instance has the same."
		finding.Do = "A DNS cache on each node (NodeLocal DNSCache), CoreDNS pods spread over more nodes, a lower ndots in the pods' dnsConfig; and programs that ask for instance metadata less often"
	case stopQueue:
		finding.Severity = Note
		finding.What = fmt.Sprintf("%s stopped sending because the host's ring was full.", d.Name)
		finding.Cost = "Packets wait until the host takes them, because it is busy or the virtual machine is at its limit."
		finding.Do = "slipstream run an-vms   # Accelerated Networking on and off; or a larger machine"
	}
	return finding, n >= few
}

// sumsMembers reports whether the counters of a device include those of its members.
func (d Device) sumsMembers() bool {
	return d.Kind == "bond" || d.NIC != nil && d.NIC.Type == record.NICFailover
}

// ofMembers returns the packets that the members of a device did not send.
func (f Facts) ofMembers(d Device) (dropped uint64) {
	for _, m := range f.Devices {
		if m.Master == d.Name {
			dropped += m.Window.TxDropped
		}
	}
	return dropped
}

// deviceDrops finds packets that NICs and overlays drop. It ignores rx_dropped, which also counts packets of
// protocols that nobody listens to, such as LLDP, and is not 0 on a healthy machine. A NIC is judged by its hardware: it has no
// class of its own below a bridge or Open vSwitch.
func deviceDrops(f Facts) (found []Finding) {
	for _, d := range f.Devices {
		overlay := d.Class == v1alpha1.DeviceOverlay || d.Tunnelling
		if d.NIC == nil && d.Class != v1alpha1.DeviceNIC && !overlay {
			continue
		}
		if d.sumsMembers() {
			d.Window.TxDropped -= min(d.Window.TxDropped, f.ofMembers(d))
		}
		for _, c := range []struct {
			file           string
			lost, all, was uint64
			what, do       string
		}{
			{missed, d.Window.Missed, d.Window.Rx, d.Boot.Missed, "%s loses packets because its receive ring is full.",
				"ethtool -g " + d.Name + "; ethtool -G " + d.Name + " rx N   # a larger ring, up to the maximum that -g shows"},
			{damaged, d.Window.Damaged, d.Window.Rx, d.Boot.Damaged, "%s receives damaged packets.",
				"ethtool -S " + d.Name + "   # which errors; then the cable, the port of the switch, or the host"},
			{txDropped, d.Window.TxDropped, d.Window.Tx, d.Boot.TxDropped, "%s drops packets instead of sending them.",
				"ip -s -d link show " + d.Name + "; tc -s qdisc show dev " + d.Name},
		} {
			severity, lost := loss(c.lost, c.lost+c.all)
			if !lost || c.file == missed && d.smallRing() { // ringSmall reports these
				continue
			}
			if c.file != txDropped && !overlay && (d.NIC == nil || d.sumsMembers()) { // the devices below have these counters
				continue
			}
			if c.file == damaged && d.NIC == nil {
				c.what = "%s refuses packets that it receives."
				c.do = "ip -s -s link show dev " + d.Name + "   # which errors: damaged headers, or with WireGuard addresses that are not among the allowed ones of the peer"
			}
			if c.file == txDropped && d.Under != "" {
				c.do += fmt.Sprintf("; bridge fdb show dev %s; ip neigh show dev %[1]s   # an address without an entry gets no packets", d.Name)
			}
			file := "/sys/class/net/" + d.Name + "/statistics/" + c.file
			found = append(found, Finding{
				Severity: severity,
				Fault:    c.file,
				What:     fmt.Sprintf(c.what, d.Name),
				Evidence: []Evidence{evidence(file+", in "+f.window(), "%d, beside %d packets", c.lost, c.all), evidence(file, "%d since the device was created", c.was)},
				Cost:     lostPackets,
				Do:       c.do,
			})
		}
	}
	return found
}

func conntrackFull(f Facts) []Finding {
	severity := Serious
	switch {
	case f.ConntrackMax == 0 || f.Conntrack*100 < f.ConntrackMax*80:
		return nil
	case f.Conntrack*100 < f.ConntrackMax*95:
		severity = Warning
	}
	return []Finding{{
		Severity: severity,
		What:     fmt.Sprintf("The conntrack table is %d%% full.", f.Conntrack*100/f.ConntrackMax),
		Evidence: []Evidence{
			evidence("/proc/sys/net/netfilter/nf_conntrack_count", "%d", f.Conntrack),
			evidence("/proc/sys/net/netfilter/nf_conntrack_max", "%d", f.ConntrackMax),
		},
		// Source: gc_worker in net/netfilter/nf_conntrack_core.c, and TestFullConntrackTable of the fast path.
		Cost: "If it is full, the kernel drops new connections, and logs \"nf_conntrack: table full, dropping packet\". It then also deletes " +
			"entries that are not marked ASSURED. Those of VXLAN packets never are, so connections between pods on different nodes may stop, too.",
		Do: fmt.Sprintf("sysctl -w net.netfilter.nf_conntrack_max=%d   # kube-proxy sets it by --conntrack-max-per-core", f.ConntrackMax*2),
	}}
}

// quadruple returns four times a sysctl's value.
func quadruple(value string) string {
	var n int
	if _, err := fmt.Sscan(value, &n); err != nil {
		return "N"
	}
	return fmt.Sprint(4 * n)
}
