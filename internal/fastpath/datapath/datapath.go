//go:build linux

// Package datapath loads the eBPF programs of the fast path, and reads and writes their maps. It attaches only the netfilter
// programs; internal/fastpath attaches the others to devices, and decides what the maps contain. The C sources are in
// bpf/fastpath.
//
// The compiled objects are committed, so that building slipstream needs no C compiler. They work on every little-endian
// machine: CO-RE relocates accesses to kernel types.
package datapath

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/ringbuf"

	"slipstream.dev/internal/process"
)

//go:generate bpf2go -tags linux -target bpfel -type vxlan_device -type key -type flow -type event -type event_kind -type recovery -type tracked -type entry_state fastpath ../../../bpf/fastpath/fastpath.c -- -O2 -fno-strict-aliasing -mcpu=v3 -Wall -Wextra -Werror -I../../../bpf -I../../../bpf/headers
//go:generate bpf2go -tags linux -target bpfel resync ../../../bpf/fastpath/resync.c -- -O2 -fno-strict-aliasing -Wall -Wextra -Werror -I../../../bpf -I../../../bpf/headers
//go:generate bpf2go -tags linux -target bpfel -type address neighbours ../../../bpf/fastpath/neighbours.c -- -O2 -fno-strict-aliasing -Wall -Wextra -Werror -I../../../bpf -I../../../bpf/headers

// Programs holds the programs and maps of one node's fast path. bpf/fastpath/fastpath.c describes the hook and the purpose of
// each program.
type Programs struct {
	// RedirectPod belongs on the ingress of a pod's veth on the node, ObservePod on its egress.
	RedirectPod, ObservePod *ebpf.Program
	// ObserveVXLAN belongs on the egress of a VXLAN device, RedirectVXLAN on its ingress.
	ObserveVXLAN, RedirectVXLAN *ebpf.Program
	// ObserveNIC belongs on the egress of the NIC, DecapNIC on its ingress. If the node also routes packets of pods over the
	// NIC without encapsulation, ObserveRouter replaces ObserveNIC, and RedirectNIC follows DecapNIC.
	ObserveNIC, DecapNIC, ObserveRouter, RedirectNIC *ebpf.Program

	objects fastpathObjects
	tables  tables
	// reasons holds the names of enum reason, by value.
	reasons []string
	events  *ringbuf.Reader
	// noDropForged is the error with which the kernel refused to load drop_forged, or nil.
	noDropForged error
	// The keys of the maps link_macs, watched_pods, remotes, routers and pod_devices.
	linkMACs            map[fastpathLinkMac]bool
	watched             map[fastpathWatch]bool
	remotes             map[fastpathRemote]bool
	routers, podDevices map[uint32]bool
}

// Load loads the programs. They forward nothing until RenewLease. An error says what the kernel
// lacks.
func Load() (*Programs, error) {
	spec, err := loadFastpath()
	if err != nil {
		return nil, fmt.Errorf("read programs of the fast path: %w", err)
	}
	return load(spec)
}

func load(spec *ebpf.CollectionSpec) (*Programs, error) {
	refused := process.Loading()
	p := &Programs{
		linkMACs: make(map[fastpathLinkMac]bool), watched: make(map[fastpathWatch]bool), remotes: make(map[fastpathRemote]bool),
		routers: make(map[uint32]bool), podDevices: make(map[uint32]bool),
	}
	var err error
	if p.reasons, err = reasonsOf(spec.Types); err != nil {
		return nil, fmt.Errorf("read programs of the fast path: %w", err)
	}
	if err := spec.Variables[fastpathVarHashSeed].Set(rand.Uint64()); err != nil {
		return nil, fmt.Errorf("seed the hash of the fast path: %w", err)
	}
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return nil, fmt.Errorf("count the CPUs: %w", err)
	}
	spec.Maps["runs"].MaxEntries = uint32(cpus)
	if p.noDropForged = spec.LoadAndAssign(&p.objects, nil); p.noDropForged != nil {
		if err := withoutDropForged(spec).LoadAndAssign(&p.objects, nil); err != nil {
			return nil, fmt.Errorf("load programs of the fast path: %w", explain(refused(err)))
		}
	}
	o := &p.objects
	p.RedirectPod, p.ObservePod, p.ObserveVXLAN, p.RedirectVXLAN = o.RedirectPod, o.ObservePod, o.ObserveVxlan, o.RedirectVxlan
	p.ObserveNIC, p.DecapNIC, p.ObserveRouter, p.RedirectNIC = o.ObserveNic, o.DecapNic, o.ObserveRouter, o.RedirectNic
	if err := p.tables.open(o); err != nil {
		return nil, errors.Join(err, p.tables.close(), o.Close())
	}
	if p.events, err = ringbuf.NewReader(o.Events); err != nil {
		return nil, errors.Join(fmt.Errorf("open the ring buffer of the fast path: %w", err), p.tables.close(), o.Close())
	}
	return p, nil
}

// reasonsOf derives the names of reasons, which metrics and logs show, from the enumerators of enum reason.
func reasonsOf(types *btf.Spec) (names []string, err error) {
	var reason *btf.Enum
	if err := types.TypeByName("reason", &reason); err != nil {
		return nil, err
	}
	for _, v := range reason.Values {
		if name, ok := strings.CutPrefix(v.Name, "REASON_"); ok {
			names = append(names, strings.ToLower(strings.ReplaceAll(name, "_", "-")))
		}
	}
	return names, nil
}

// Close closes programs and maps, and makes ReadEvent return.
func (p *Programs) Close() error {
	return errors.Join(p.events.Close(), p.tables.close(), p.objects.Close())
}

// RenewLease lets the programs forward packets until a time of CLOCK_MONOTONIC.
func (p *Programs) RenewLease(until time.Duration) error {
	if err := p.objects.LeaseExpires.Set(uint64(until)); err != nil {
		return fmt.Errorf("renew the lease of the fast path: %w", err)
	}
	return nil
}

// SetGeneration invalidates the flows of all other generations.
func (p *Programs) SetGeneration(n uint32) error {
	if err := p.objects.Generation.Set(n); err != nil {
		return fmt.Errorf("invalidate the fast path: %w", err)
	}
	return nil
}

// SetNode configures the smallest MTU of all paths, and the source ports of outer packets: from is the first, to is one after
// the last.
func (p *Programs) SetNode(mtu int, from, to uint16) error {
	if err := errors.Join(
		p.objects.Mtu.Set(uint32(mtu)),
		p.objects.PortFrom.Set(uint32(from)),
		p.objects.PortTo.Set(uint32(to)),
	); err != nil {
		return fmt.Errorf("configure the fast path of the node: %w", err)
	}
	return nil
}

// Counts returns the number of packets by reason. Reasons like "fast-out-vxlan" count packets on the fast path, by direction
// and kind. All others say why packets took the slow path. A packet may count twice: as "revalidate", and under the reason for
// which its flow turned out ineligible.
func (p *Programs) Counts() (map[string]uint64, error) {
	var each []fastpathCpuState
	if err := p.objects.CpuStates.Lookup(uint32(0), &each); err != nil {
		return nil, fmt.Errorf("read counters of the fast path: %w", err)
	}
	counts := make(map[string]uint64, len(p.reasons))
	for reason, name := range p.reasons {
		for _, cpu := range each {
			counts[name] += cpu.Reasons[reason]
		}
	}
	return counts, nil
}
