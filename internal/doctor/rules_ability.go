package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"slipstream.dev/api/v1alpha1"
)

// notPermitted finds missing capabilities, which accelerators and some of the facts need.
func notPermitted(f Facts) []Finding {
	if len(f.Lacks) == 0 {
		return nil
	}
	return []Finding{{
		Severity: Note,
		What:     "This process lacks capabilities: it cannot apply accelerators, and some facts may be missing.",
		Evidence: []Evidence{evidence("/proc/self/status, CapEff", "lacks %s", strings.Join(f.Lacks, ", "))},
		Cost:     "Runs in a lab, slipstream accel and the agent fail. Runs in a cluster do not need the capabilities here.",
		Do:       "sudo slipstream doctor   # for a host, allow its user sudo without a password (NOPASSWD), or log in as root",
	}}
}

const hostUnfit = "host-unfit"

// HostUnfit is the finding for a host on which neither a run nor doctor can work.
func HostUnfit(host string, why error) Finding {
	return Finding{
		Rule: hostUnfit, Severity: Serious, Where: host,
		What:     "slipstream cannot start a worker on this host.",
		Evidence: []Evidence{evidence("a login by SSH", "%v", why)},
		Cost:     "A run on this host fails before its first block. Nothing else was checked here.",
		Do:       "Correct what the evidence names; then slipstream doctor hosts:" + host,
	}
}

// RuleNodeUnfit is the rule for nodes that could not be examined.
const RuleNodeUnfit = "node-unfit"

// NodeUnfit is the finding for a node of a cluster that could not be examined.
func NodeUnfit(node string, why error) Finding {
	return Finding{
		Rule: RuleNodeUnfit, Severity: Serious, Where: node,
		What:     "This node could not be examined.",
		Evidence: []Evidence{evidence("the privileged pod on the node", "%v", why)},
		Cost:     "Nothing was checked here. A run on this node fails.",
		Do:       "kubectl describe node " + node + "   # then slipstream doctor on the node itself",
	}
}

func noBTF(f Facts) []Finding {
	if f.BTF {
		return nil
	}
	return []Finding{{
		Severity: Warning,
		What:     "The kernel has no BTF (its types), which the eBPF programs need.",
		Evidence: []Evidence{evidence("/sys/kernel/btf/vmlinux", "missing"), evidence("/proc/sys/kernel/osrelease", "%s", f.Node.Kernel)},
		Cost:     "The fast path cannot run, and softirq time is measured by clock ticks, which miss most of it on idle CPUs. RPS and RFS work.",
		Do:       "Boot a kernel with CONFIG_DEBUG_INFO_BTF, such as a distribution's.",
	}}
}

// fastPath has a finding only with --probe.
func fastPath(f Facts) []Finding {
	if f.FastPath == "" {
		return nil
	}
	return []Finding{{
		Severity: Warning,
		What:     "The fast path cannot run here.",
		Evidence: []Evidence{evidence("the probe, in network namespaces of its own", "%s", f.FastPath)},
		Cost:     "Runs leave out variants with fastpath. What it would gain: docs/results/fastpath.md.",
		Do:       "See docs/explanation/fastpath.md, \"What it needs\".",
	}}
}

// flowtable finds flowtables on a node with pods: connections in them bypass the fast path.
func flowtable(f Facts) (found []Finding) {
	ofPods := func(d Device) bool {
		return d.Class != v1alpha1.DeviceNIC && slices.Contains([]string{"vxlan", "bridge", "veth"}, d.Kind)
	}
	if !slices.ContainsFunc(f.Devices, ofPods) {
		return nil
	}
	for _, t := range f.Flowtables {
		taken := slices.DeleteFunc(slices.Clone(t.Devices), func(name string) bool { d, _ := f.device(name); return !ofPods(d) })
		what, cost := "forwards packets at "+some(taken)+", where the fast path therefore does not run", "Connections through these devices are not accelerated by the fast path."
		if len(taken) == 0 {
			what = "has no device of pods, but Linux before 7.2 takes connections of pods into it if a rule adds them"
			cost = "The fast path does not accelerate connections of pods that are in it. slipstream accel status counts their packets as flowtable; if there are none, nothing is lost."
		}
		found = append(found, Finding{
			Severity: Note,
			What:     fmt.Sprintf("The flowtable %s of nftables %s.", t.Name, what),
			Evidence: []Evidence{evidence("nft list flowtable "+t.Name, "devices %s", cmp.Or(some(slices.Clone(t.Devices)), "none"))},
			Cost:     cost + ` A flowtable bypasses less (docs/explanation/fastpath.md, "Compared with other ways").`,
			Do:       "Keep one of the two. To compare them: slipstream run kubernetes with and without the rules that name the flowtable, then slipstream compare BEFORE AFTER; " + removes(t.Name),
		})
	}
	return found
}

// removes tells what removes a flowtable. Calico's nftables data plane makes one by default (projectcalico/calico#9458).
func removes(flowtable string) string {
	if strings.HasPrefix(flowtable, "ip calico ") || strings.HasPrefix(flowtable, "ip6 calico ") {
		return "Calico makes it unless its FelixConfiguration has nftablesFlowTableOffload: Disabled"
	}
	return fmt.Sprintf("nft delete flowtable %s removes it once no rule names it", flowtable)
}

// throttled finds cgroups with throttled threads. If threads wait for less than a hundredth of the window, no
// measured figure shows it.
func throttled(f Facts) []Finding {
	worst := slices.DeleteFunc(slices.Clone(f.Throttled), func(t Throttled) bool { return t.Time*100 < f.Window })
	if len(worst) == 0 {
		return nil
	}
	found := Finding{
		Severity: Warning,
		What:     fmt.Sprintf("Cgroups throttled by CPU limits: %d.", len(worst)),
		Cost:     "A throttled thread waits for the next period (100 ms by default), which shows as latency, and in a trial as the warning \"cpu-throttled\". To measure the cost for your workload: the same run with and without the limit, then slipstream compare BEFORE AFTER.",
		Do:       "Raise the limit, or remove it: cpu.max of the cgroup, resources.limits.cpu of the pod.",
	}
	const most = 5
	for _, t := range worst[:min(len(worst), most)] {
		found.Evidence = append(found.Evidence, evidence("cpu.stat of cgroup "+t.Cgroup+", in "+f.window(), "throttled %d times, its threads for %s in total", t.Times, t.Time.Round(time.Millisecond)))
	}
	return []Finding{found}
}

// LabLacks is the finding for something that a lab needs and this machine lacks. If it is optional, only the
// experiments that name it fail.
func LabLacks(what string, optional bool, why error) Finding {
	f := Finding{
		Rule: labLacks, Severity: Serious,
		What:     fmt.Sprintf("This machine cannot make %s.", what),
		Evidence: []Evidence{evidence("the probe of a lab, in a network namespace of its own", "%v", why)},
		Cost:     "Every run in a lab fails before its first block.",
		Do:       "Correct what the evidence names; then slipstream doctor lab",
	}
	if optional {
		f.Severity, f.Cost = Warning, "Runs that need it fail before their first block."
	}
	return f
}

const labLacks = "lab-lacks"
