package doctor

import "strings"

// notPermitted: accelerators, and some of the facts, need capabilities.
func notPermitted(f Facts) []Finding {
	if len(f.Lacks) == 0 {
		return nil
	}
	return []Finding{{
		Severity: Note,
		What:     "This process lacks capabilities: it cannot apply accelerators, and some facts may be missing.",
		Evidence: []Evidence{evidence("/proc/self/status, CapEff", "lacks %s", strings.Join(f.Lacks, ", "))},
		Cost:     "Runs in a lab, slipstream accel and the agent fail. Runs in a cluster do not need the capabilities here.",
		Do:       "sudo slipstream doctor   # of a host, give its user sudo without a password (NOPASSWD), or log in as root",
	}}
}

const hostUnfit = "host-unfit"

// HostUnfit is a host that no run can be on, nor a look.
func HostUnfit(host string, why error) Finding {
	return Finding{
		Rule: hostUnfit, Severity: Serious, Where: host,
		What:     "No worker can be started on this host.",
		Evidence: []Evidence{evidence("a login by SSH", "%v", why)},
		Cost:     "A run that has this host fails before its first block. Nothing else was looked at here.",
		Do:       "What the line above says; then slipstream doctor hosts:" + host,
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
		Do:       "Boot a kernel with CONFIG_DEBUG_INFO_BTF, as those of the distributions are.",
	}}
}

// fastPath is found by --probe only.
func fastPath(f Facts) []Finding {
	if f.FastPath == "" {
		return nil
	}
	return []Finding{{
		Severity: Warning,
		What:     "The fast path cannot run here.",
		Evidence: []Evidence{evidence("the probe, in network namespaces of its own", "%s", f.FastPath)},
		Cost:     "Runs leave out variants with fastpath. What it gains where it runs: docs/results/fastpath.md.",
		Do:       "See docs/explanation/fastpath.md, \"What it needs\".",
	}}
}

func throttled(f Facts) (found []Finding) {
	for _, text := range f.Throttled {
		found = append(found, Finding{
			Severity: Warning,
			What:     "A CPU limit throttles the cgroup that this process runs in.",
			Evidence: []Evidence{evidence("cpu.stat of the cgroup, in "+f.window(), "%s", text)},
			Cost:     "A throttled thread waits for the next period (100 ms by default), which shows as latency. A trial in which this happens has the warning \"throttled\".",
			Do:       "Raise the limit: cpu.max of the cgroup, resources.limits.cpu of the pod.",
		})
	}
	return found
}
