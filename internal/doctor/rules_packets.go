package doctor

import (
	"fmt"
	"time"

	"slipstream.dev/api/v1alpha1"
)

func (f Facts) window() string { return f.Window.Round(100 * time.Millisecond).String() }

const lostPackets = "TCP retransmits the packet and slows down; UDP loses it. Not measured on its own: trials.jsonl has the retransmits of each trial of an experiment."

// loss judges packets lost in the window, out of all. Any machine loses fewer than 10 now and then, or fewer
// than 1 in 10,000.
func loss(lost, all uint64) (Severity, bool) {
	switch {
	case lost < 10 || lost*10_000 < all:
		return "", false
	case lost*100 < all:
		return Warning, true
	}
	return Serious, true
}

// softnet sums up what the CPUs did in the window.
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
	// A packet above the flow limit counts in both columns (enqueue_to_backlog in net/core/dev.c).
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
		Cost:     "The flow limit protects small flows from large ones on an overloaded CPU. It may take all VXLAN packets between two nodes for a few large flows.",
		Do:       "sysctl -w net.core.flow_limit_cpu_bitmap=0   # unless somebody switched it on for a reason",
	}}
}

// squeezed: a poll is cut off after netdev_budget packets, 300 by default, or netdev_budget_usecs.
func squeezed(f Facts) []Finding {
	all, _, squeezed := f.softnet()
	const full = 300
	if squeezed < 10 || squeezed*full*10 < all { // less than a tenth of what full polls would be
		return nil
	}
	s := f.Node.Sysctls
	return []Finding{{
		Severity: Note,
		What:     "CPUs often stop receiving before their queues are empty, because a poll used up its budget.",
		Evidence: []Evidence{
			evidence("/proc/net/softnet_stat, time_squeeze, in "+f.window(), "%d for %d packets", squeezed, all),
			evidence("/proc/sys/net/core/netdev_budget, netdev_budget_usecs", "%s, %s", s["net.core.netdev_budget"], s["net.core.netdev_budget_usecs"]),
		},
		Cost: "Packets wait longer while the CPU runs other softirqs and programs. Without drops, that costs latency and no packets.",
		Do:   fmt.Sprintf("sysctl -w net.core.netdev_budget=%s   # and compare two runs: slipstream compare BEFORE AFTER", quadruple(s["net.core.netdev_budget"])),
	}}
}

// deviceDrops looks at NICs and overlays. rx_dropped is left out: it also counts packets of protocols that
// nobody listens to, such as LLDP, and is not 0 on a healthy machine.
func deviceDrops(f Facts) (found []Finding) {
	for _, d := range f.Devices {
		if d.Class != v1alpha1.DeviceNIC && d.Class != v1alpha1.DeviceOverlay {
			continue
		}
		for _, c := range []struct {
			file           string
			lost, all, was uint64
			what, do       string
		}{
			{"rx_missed_errors", d.Window.Missed, d.Window.Rx, d.Boot.Missed, "%s loses packets because its receive ring is full.",
				"ethtool -g " + d.Name + "; ethtool -G " + d.Name + " rx N   # a larger ring, up to the maximum that -g shows"},
			{"rx_errors", d.Window.Damaged, d.Window.Rx, d.Boot.Damaged, "%s receives damaged packets.",
				"ethtool -S " + d.Name + "   # which errors; then the cable, the port of the switch, or the host"},
			{"tx_dropped", d.Window.TxDropped, d.Window.Tx, d.Boot.TxDropped, "%s drops packets instead of sending them.",
				"ip -s -d link show " + d.Name + "; tc -s qdisc show dev " + d.Name},
		} {
			severity, lost := loss(c.lost, c.lost+c.all)
			if !lost {
				continue
			}
			file := "/sys/class/net/" + d.Name + "/statistics/" + c.file
			found = append(found, Finding{
				Severity: severity,
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
		What:     fmt.Sprintf("The conntrack table is %d %% full.", f.Conntrack*100/f.ConntrackMax),
		Evidence: []Evidence{
			evidence("/proc/sys/net/netfilter/nf_conntrack_count", "%d", f.Conntrack),
			evidence("/proc/sys/net/netfilter/nf_conntrack_max", "%d", f.ConntrackMax),
		},
		Cost: "Once it is full, new connections are dropped; the kernel's log says \"nf_conntrack: table full, dropping packet\".",
		Do:   fmt.Sprintf("sysctl -w net.netfilter.nf_conntrack_max=%d   # kube-proxy sets it by --conntrack-max-per-core", f.ConntrackMax*2),
	}}
}

// quadruple returns a sysctl's value times 4.
func quadruple(value string) string {
	var n int
	if _, err := fmt.Sscan(value, &n); err != nil {
		return "N"
	}
	return fmt.Sprint(4 * n)
}
