//go:build linux

package collect

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/ethtool"
	"slipstream.dev/internal/kernelfs"
	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/nic"
	"slipstream.dev/internal/record"
)

// bootID is the file that identifies a machine until its next boot.
const bootID = "sys/kernel/random/boot_id"

// Describe returns the facts about this place that affect a result, as the kernel writes them. proc is /proc. sys is a sysfs
// that shows this network namespace; without it, links have no queues. Unknown facts are empty. The caller fills in Node.Name,
// the node's CPUs, Tools and Link.Class.
func Describe(ctx context.Context, proc, sys fs.FS) (record.Node, error) {
	n := record.Node{
		Boot:       kernelfs.Text(proc, bootID),
		Kernel:     kernelfs.Text(proc, "sys/kernel/osrelease"),
		CPUs:       kernelfs.Text(sys, "devices/system/cpu/online"),
		Isolated:   kernelfs.Text(sys, "devices/system/cpu/isolated"),
		Governor:   kernelfs.Text(sys, "devices/system/cpu/cpu0/cpufreq/scaling_governor"),
		Clock:      kernelfs.Text(sys, "devices/system/clocksource/clocksource0/current_clocksource"),
		Hypervisor: kernelfs.Text(sys, "hypervisor/type") != "",
		Sysctls:    make(map[string]string),

		PhysicalHost: physicalHost(proc),
	}
	if n.Boot == "" || n.Kernel == "" {
		return n, errors.New("describe this place: proc has no boot id or kernel release")
	}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return n, fmt.Errorf("describe this place: uname: %w", err)
	}
	n.Arch = unix.ByteSliceToString(uts.Machine[:])

	release := readKeys(proc, "self/root/etc/os-release", "=")
	n.Distribution = strings.Trim(release["PRETTY_NAME"], `"'`)
	info := readKeys(proc, "cpuinfo", ":")
	n.CPUModel = info["model name"]
	if part := info["CPU part"]; n.CPUModel == "" && part != "" { // arm64 has only numbers
		n.CPUModel = fmt.Sprintf("implementer %s part %s", info["CPU implementer"], part)
	}
	if slices.Contains(strings.Fields(info["flags"]), "hypervisor") {
		n.Hypervisor = true
	}
	total, _ := strings.CutSuffix(readKeys(proc, "meminfo", ":")["MemTotal"], " kB")
	if kib, err := strconv.ParseUint(total, 10, 64); err == nil {
		n.MemoryByte = kib << 10
	}
	for _, name := range []string{
		"kernel.bpf_stats_enabled",
		"net.core.bpf_jit_enable",
		"net.core.default_qdisc",
		"net.core.dev_weight",
		"net.core.netdev_budget",
		"net.core.netdev_budget_usecs",
		"net.core.netdev_max_backlog",
		"net.core.netdev_tstamp_prequeue",
		"net.core.rmem_max",
		"net.core.rps_sock_flow_entries",
		"net.core.wmem_max",
		"net.ipv4.tcp_available_congestion_control",
		"net.ipv4.tcp_congestion_control",
		"net.ipv4.tcp_rmem",
		"net.ipv4.tcp_wmem",
	} {
		if v := kernelfs.Text(proc, "sys/"+strings.ReplaceAll(name, ".", "/")); v != "" {
			n.Sysctls[name] = strings.Join(strings.Fields(v), " ") // some use tabs
		}
	}
	var err error
	if n.Links, err = links(ctx, sys); err != nil {
		return n, fmt.Errorf("describe this place: %w", err)
	}
	return n, nil
}

// links returns the devices of this network namespace.
func links(ctx context.Context, sys fs.FS) ([]record.Link, error) {
	all, err := netns.Dump("links", netlink.LinkList)
	if err != nil {
		return nil, err
	}
	tool, err := ethtool.Open()
	if err != nil {
		return nil, err
	}
	defer tool.Close()
	nics := nic.Facts(nic.Source{Sys: sys, Tool: tool}.Read())
	var out []record.Link
	for _, l := range all {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		a := l.Attrs()
		r := record.Link{Name: a.Name, Kind: l.Type(), MTU: a.MTU, RxQueues: a.NumRxQueues, TxQueues: a.NumTxQueues, Speed: nic.Speed(sys, a.Name)}
		if n, ok := nics[a.Name]; ok {
			r.NIC = &n
		}
		features, err := tool.Features(a.Name)
		if err != nil && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.EOPNOTSUPP) {
			return nil, err
		}
		for name, feature := range features {
			if feature.Active {
				r.Offloads = append(r.Offloads, name)
			}
		}
		slices.Sort(r.Offloads)
		for i := range a.NumRxQueues {
			queue := fmt.Sprintf("class/net/%s/queues/rx-%d/", a.Name, i)
			rps := kernelfs.Text(sys, queue+"rps_cpus")
			if rps == "" {
				break // a kernel without RPS, or fewer queues in use than the device has
			}
			r.RPS, r.RFS = append(r.RPS, rps), append(r.RFS, kernelfs.Text(sys, queue+"rps_flow_cnt"))
		}
		out = append(out, r)
	}
	return out, nil
}

// readKeys returns the keys and values of a file, or nothing if it cannot be read. The first value of a key counts.
func readKeys(root fs.FS, name, separator string) map[string]string {
	b, _ := fs.ReadFile(root, name)
	m := make(map[string]string)
	for line := range strings.Lines(string(b)) {
		k, v, ok := strings.Cut(line, separator)
		k = strings.TrimSpace(k)
		if _, twice := m[k]; ok && !twice {
			m[k] = strings.TrimSpace(v)
		}
	}
	return m
}
