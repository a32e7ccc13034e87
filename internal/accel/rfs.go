package accel

import (
	"context"
	"fmt"
	"math/bits"
	"strconv"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/kernel"
)

// rfsKind is Receive Flow Steering: a flow table for the machine, and one for each receive queue. memory.go limits their
// memory.
type rfsKind struct{}

// Plan implements Kind.
func (rfsKind) Plan(p *Plan, a v1alpha1.PolicyAccelerator) error {
	entries := a.RFS.Entries
	if entries <= 0 || entries&(entries-1) != 0 {
		// The kernel rounds up to one, so another value would read back.
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

// flowCount is the file with the number of entries of a receive queue.
const flowCount = "rps_flow_cnt"

// flowShareOf returns the number of entries for each queue of a device.
func flowShareOf(d Device, entries int) (string, error) {
	if entries < d.RxQueues {
		return "", Impossible(fmt.Sprintf("rfs entries %d are fewer than the %d receive queues of %s", entries, d.RxQueues, d.Name))
	}
	// Use a power of two, because the kernel rounds up to one (store_rps_dev_flow_table_cnt in net/core/net-sysfs.c). Round
	// down, so that all queues together have at most this many entries.
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

// probeRFS looks for the settings of queues, which CONFIG_RPS brings, and for the machine's table.
func probeRFS(queues, machine kernel.Store) error {
	if err := probeRPS(queues); err != nil {
		return err
	}
	_, err := machine.Read(kernel.FlowTable)
	return err
}
