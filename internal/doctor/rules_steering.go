package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/cpuset"
	"slipstream.dev/internal/record"
)

const proveSteering = "slipstream run kubernetes   # variants rps and rfs, between two nodes like this one"

// busy is the share of a CPU's time in softirqs at which that CPU counts as the limit.
const busy = 0.5

// perPacket bounds how often a CPU processes a packet from a NIC: on arrival, after decapsulation, and at the pod. A
// CPU that processed more got most of its packets from pods or other network namespaces of the machine.
const perPacket = 4

// oneCPUReceives finds NICs whose packets are all received by one CPU.
func oneCPUReceives(f Facts) (found []Finding) {
	for _, d := range f.Devices {
		// A port of a bridge or of Open vSwitch has no class of its own.
		if d.NIC == nil || d.Class != v1alpha1.DeviceNIC && d.Master == "" || !d.Up || d.NIC.RxQueues != 1 || d.rps() || d.rfs() {
			continue
		}
		finding := Finding{
			Severity: Note,
			What:     fmt.Sprintf("One CPU receives all packets of %s: the NIC has one receive queue, and neither RPS nor RFS is on.", d.Name),
			Evidence: []Evidence{
				evidence("/sys/class/net/"+d.Name+"/queues", "1 receive queue, rps_cpus %s", strings.Join(d.RPS, " ")),
				evidence("/proc/irq/*/effective_affinity_list", "its interrupts go to CPU %s", cmp.Or(d.IRQ, "(unknown)")),
			},
			Cost: "Only an experiment shows it. With 2 virtual CPUs steering made streams slower (docs/results/measuring.md, \"What receive steering costs on virtual CPUs\").",
			Do:   proveSteering,
		}
		if d.Class != v1alpha1.DeviceNIC { // accelerators leave it out
			finding.Do = "For a trial: echo MASK > /sys/class/net/" + d.Name + "/queues/rx-0/rps_cpus   # the mask of the CPUs that do not handle its interrupts; 0 ends it"
		}
		full, alone := f.alone()
		switch {
		case alone && (d.IRQ == "" || d.takes(full)) && d.Window.Rx*perPacket >= full.Processed:
			finding.Severity = Warning
			finding.What = fmt.Sprintf("One CPU receives all packets of %s, and is busy with them: the NIC has one receive queue, and neither RPS nor RFS is on.", d.Name)
			finding.Evidence = append(finding.Evidence,
				evidence("/proc/stat, in "+f.window(), "CPU %d spent %.0f%% of the time in softirqs, no other more than %.0f%%", full.ID, f.softirq(full)*100, idle*100))
		case len(f.CPUs) < 3:
			continue // the CPU time was measured, and steering would not help
		}
		found = append(found, finding)
	}
	return found
}

// idle is the share of a CPU's time in softirqs below which it could take over work from another.
const idle = 0.1

// alone returns the CPU that is busy with softirqs while all others are idle.
func (f Facts) alone() (record.CPU, bool) {
	var most []record.CPU
	for _, c := range f.CPUs {
		if f.softirq(c) > idle {
			most = append(most, c)
		}
	}
	if len(most) != 1 || len(f.CPUs) < 2 || f.softirq(most[0]) < busy {
		return record.CPU{}, false
	}
	return most[0], true
}

// takes reports whether a CPU handles interrupts of the device.
func (d Device) takes(c record.CPU) bool {
	irq, err := cpuset.ParseList(d.IRQ)
	return err == nil && slices.Contains(irq.CPUs(), c.ID)
}

// rpsUseless finds RPS masks that steer packets to the CPU that they are on already, or that the NIC
// would choose.
func rpsUseless(f Facts) (found []Finding) {
	for _, d := range f.Devices {
		if d.NIC == nil || !d.Up || !d.rps() {
			continue
		}
		queues := evidence("/sys/class/net/"+d.Name+"/queues", "%d receive queues, rps_cpus %s", d.NIC.RxQueues, strings.Join(d.RPS, " "))
		irq, irqErr := cpuset.ParseList(d.IRQ)
		mask, maskErr := cpuset.ParseMask(d.RPS[0])
		switch {
		case d.NIC.RxQueues == 1 && irqErr == nil && maskErr == nil && len(mask.CPUs()) == 1 && mask.Equal(irq):
			found = append(found, Finding{
				Severity: Warning,
				What:     fmt.Sprintf("RPS steers the packets of %s to CPU %s, which already handles its interrupts.", d.Name, d.IRQ),
				Evidence: []Evidence{queues, evidence("/proc/irq/*/effective_affinity_list", "CPU %s", d.IRQ)},
				Cost:     "Every packet also passes that CPU's backlog, and no other CPU receives any.",
				Do:       fmt.Sprintf("echo 0 > /sys/class/net/%s/queues/rx-0/rps_cpus   # or choose another CPU; %s", d.Name, proveSteering),
			})
		case d.NIC.RxQueues >= len(f.CPUs) && len(f.CPUs) > 1:
			found = append(found, Finding{
				Severity: Note,
				What:     fmt.Sprintf("RPS is on for %s, though it has a receive queue for each CPU.", d.Name),
				Evidence: []Evidence{queues, evidence("/sys/devices/system/cpu/online", "%s", f.Node.CPUs)},
				Cost:     "The NIC spreads flows already; RPS adds an interrupt to another CPU for each batch that it moves (docs/results/measuring.md, \"What receive steering costs on virtual CPUs\").",
				Do:       proveSteering,
			})
		}
	}
	return found
}

const flowTable = "net.core.rps_sock_flow_entries"

// rfsOff finds queues with RFS entries on a machine whose own flow table is off: RFS needs both. A table
// without such queues is no finding, because the devices that use it may be in another network namespace,
// as those of rfs+ are in pods.
func rfsOff(f Facts) []Finding {
	entries, known := f.Node.Sysctls[flowTable]
	if !known || isSet(entries) { // it can only be read in the machine's own network namespace
		return nil
	}
	var with []string
	var queues []Evidence
	for _, d := range f.Devices {
		if d.rfs() {
			with = append(with, d.Name)
			queues = append(queues, evidence("/sys/class/net/"+d.Name+"/queues/rx-*/rps_flow_cnt", "%s", strings.Join(d.RFS, " ")))
		}
	}
	if len(with) == 0 {
		return nil
	}
	return []Finding{{
		Severity: Warning,
		What:     fmt.Sprintf("RFS is configured for %s, but off: the machine's flow table has no entries.", strings.Join(with, ", ")),
		Evidence: append(queues, evidence("/proc/sys/net/core/rps_sock_flow_entries", "%s", entries)),
		Cost:     "The kernel does not steer packets to the CPU of their application. An experiment shows whether that would help here.",
		Do:       proveSteering + "; then slipstream policy",
	}}
}

func irqbalance(f Facts) (found []Finding) {
	if !f.IRQBalance {
		return nil
	}
	for _, d := range f.Devices {
		if d.NIC == nil || !d.rps() {
			continue
		}
		found = append(found, Finding{
			Severity: Note,
			What:     fmt.Sprintf("irqbalance may move the interrupts of %s to other CPUs, without changing its RPS mask.", d.Name),
			Evidence: []Evidence{
				evidence("/proc/*/comm", "irqbalance"),
				evidence("/sys/class/net/"+d.Name+"/queues/rx-*/rps_cpus", "%s", strings.Join(d.RPS, " ")),
			},
			Cost: "A mask that leaves out the CPU of the interrupts is wrong once they move, and runs before and after that differ.",
			Do:   "IRQBALANCE_BANNED_CPULIST, or --banirq with the device's interrupts, in the configuration of irqbalance",
		})
	}
	return found
}
