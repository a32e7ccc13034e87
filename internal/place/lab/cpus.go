//go:build linux

package lab

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/accel/cpuset"
)

// nodeCPUs are the CPUs that a node's processes run on.
type nodeCPUs struct {
	CPUs []int
	// IRQ is the CPU that takes the NIC's interrupts. It is -1 if nodes share CPUs: packets are then received on the sender's
	// CPU, as a veth does.
	IRQ int
	// SharesCore means that another node may have CPUs of the same core.
	SharesCore bool `json:",omitempty"`
}

// divide gives each node its own CPUs, the last one for its NIC's interrupts, if there are two or more per node. Otherwise all
// nodes share all CPUs. A core's CPUs go to one node, even if some cores are then idle, unless that leaves a node with fewer
// than two CPUs. Cores that share a cache must be adjacent.
func divide(cores [][]int, nodes int) []nodeCPUs {
	cpus := slices.Concat(cores...)
	parts := make([]nodeCPUs, nodes)
	if len(cpus) < 2*nodes {
		for i := range parts {
			parts[i] = nodeCPUs{CPUs: cpus, IRQ: -1}
		}
		return parts
	}
	for i := range parts {
		// If the CPUs do not divide evenly, the first nodes get one more.
		most := len(cpus) / nodes
		if i < len(cpus)%nodes {
			most++
		}
		var own []int
		for len(cores) > 0 && len(own)+len(cores[0]) <= most {
			own, cores = append(own, cores[0]...), cores[1:]
		}
		if len(own) < 2 {
			return divideThreads(cpus, nodes)
		}
		parts[i] = nodeCPUs{CPUs: own, IRQ: own[len(own)-1]}
	}
	return parts
}

// divideThreads divides CPUs without regard to their cores.
func divideThreads(cpus []int, nodes int) []nodeCPUs {
	var single [][]int
	for _, cpu := range cpus {
		single = append(single, []int{cpu})
	}
	parts := divide(single, nodes)
	for i := range parts {
		parts[i].SharesCore = true
	}
	return parts
}

// availableCPUs returns the CPUs that this process may run on and that are not isolated, by cores: on many machines, CPUs 0 and
// n/2 are threads of one.
func availableCPUs(sys string) (cores [][]int, err error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("read this process's CPU affinity: %w", err)
	}
	dir := filepath.Join(sys, "devices/system/cpu")
	var isolated []int
	if text, err := os.ReadFile(filepath.Join(dir, "isolated")); err == nil {
		if isolated, err = parseCPUs(string(text)); err != nil {
			return nil, fmt.Errorf("read isolated CPUs: %w", err)
		}
	}
	type cpu struct{ id, socket, core int }
	var cpus []cpu
	for id := range len(set) * 64 {
		if !set.IsSet(id) || slices.Contains(isolated, id) {
			continue
		}
		c := cpu{id: id, core: id}
		topology := filepath.Join(dir, fmt.Sprintf("cpu%d", id), "topology")
		if text, err := os.ReadFile(filepath.Join(topology, "physical_package_id")); err == nil {
			c.socket, _ = strconv.Atoi(strings.TrimSpace(string(text))) // if unknown, assume one socket
		}
		if text, err := os.ReadFile(filepath.Join(topology, "thread_siblings_list")); err == nil {
			if threads, err := parseCPUs(string(text)); err == nil && len(threads) > 0 {
				c.core = threads[0]
			}
		}
		cpus = append(cpus, c)
	}
	slices.SortFunc(cpus, func(a, b cpu) int {
		return cmp.Or(cmp.Compare(a.socket, b.socket), cmp.Compare(a.core, b.core), cmp.Compare(a.id, b.id))
	})
	for i, c := range cpus {
		if i == 0 || c.socket != cpus[i-1].socket || c.core != cpus[i-1].core {
			cores = append(cores, nil)
		}
		last := &cores[len(cores)-1]
		*last = append(*last, c.id)
	}
	if len(cores) == 0 {
		return nil, fmt.Errorf("every CPU that this process may run on is isolated: start it on others (taskset)")
	}
	return cores, nil
}

// parseCPUs parses a list of the kernel, such as "0-3,8".
func parseCPUs(list string) ([]int, error) {
	set, err := cpuset.ParseList(strings.TrimSpace(list))
	return set.CPUs(), err
}

// formatCPUs formats a list as the kernel does.
func formatCPUs(cpus []int) string { return cpuset.New(cpus...).String() }
