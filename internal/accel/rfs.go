package accel

import (
	"context"
	"fmt"
	"math/bits"
	"strconv"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/kernel"
)

// rfsKind is Receive Flow Steering: a table of flows for the machine, and one for each receive queue. memory.go limits the memory
// that they take.
type rfsKind struct{}

// Plan implements Kind.
func (rfsKind) Plan(p *Plan, a v1alpha1.PolicyAccelerator) error {
	entries := a.RFS.Entries
	if entries <= 0 || entries&(entries-1) != 0 {
		// The kernel would round up, and another value would read back.
		return fmt.Errorf("rfs entries %d: want a power of two", entries)
	}
	if other := p.Machine(kernel.FlowTable, strconv.Itoa(entries)); other != "" {
		return Conflict(fmt.Sprintf("wants %d entries of the machine's flow table, another accelerator %s", entries, other))
	}
	for _, class := range a.RFS.Devices {
		p.Queues(class, flowCount, strconv.Itoa(entries), func(d Device, _ string) (string, error) { return flowShareOf(d, entries) })
	}
	if a.RFS.CPUs == "" {
		return nil
	}
	return masks(p, a.RFS.Devices, a.RFS.CPUs)
}

// flowCount is the file with a receive queue's share of the entries.
const flowCount = "rps_flow_cnt"

// flowShareOf divides the entries of a device among its queues.
func flowShareOf(d Device, entries int) (string, error) {
	if entries < d.RxQueues {
		return "", fmt.Errorf("rfs entries %d are fewer than the %d receive queues of %s", entries, d.RxQueues, d.Name)
	}
	// Use a power of two, because the kernel rounds up to one
	// (store_rps_dev_flow_table_cnt in net/core/net-sysfs.c). Round down, so
	// that all queues together stay within the table.
	return strconv.Itoa(1 << (bits.Len(uint(entries/d.RxQueues)) - 1)), nil
}

// Probe implements Kind.
func (rfsKind) Probe(context.Context) error {
	return inSysfs(func(queues kernel.Store) error { return probeRFS(queues, kernel.Sysctls{Proc: "/proc"}) })
}

// Open implements Kind.
func (rfsKind) Open(Host) Runner { return nil }

// Metrics implements Kind.
func (rfsKind) Metrics() []*Metric { return nil }

// probeRFS looks for the settings of the queues, which come with RPS, and for the machine's table.
func probeRFS(queues, machine kernel.Store) error {
	if err := probeRPS(queues); err != nil {
		return err
	}
	_, err := machine.Read(kernel.FlowTable)
	return err
}
