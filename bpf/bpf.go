//go:build linux

// Package bpf holds all eBPF programs of slipstream: the C sources, the compiled
// objects, and a loader for each. Callers attach the programs and interpret their
// results: internal/collect the softirq times, the lab the wire and the pods'
// datapaths, internal/accel the fast path.
//
// The objects are committed, so that building slipstream needs no C compiler;
// `make generate` compiles them again. They are the same for every little-endian
// machine. Only the fast path reads kernel types, which CO-RE relocates by the
// kernel's BTF.
//
// The C is dual licensed: see LICENSE.
package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
)

//go:generate bpf2go -tags linux -target bpfel -type softirq_cpu softirq softirq.c -- -O2 -Wall -Wextra -Wno-unused-parameter -Werror -Iheaders
//go:generate bpf2go -tags linux -target bpfel wire wire.c -- -O2 -Wall -Wextra -Werror -Iheaders
//go:generate bpf2go -tags linux -target bpfel pods pods.c -- -O2 -Wall -Wextra -Werror -Iheaders
//go:generate bpf2go -tags linux -target bpfel service service.c -- -O2 -Wall -Wextra -Werror -Iheaders
//go:generate bpf2go -tags linux -target bpfel resync resync.c -- -O2 -Wall -Wextra -Werror -Iheaders
//go:generate bpf2go -tags linux -target bpfel -type address neighbours neighbours.c -- -O2 -Wall -Wextra -Werror -Iheaders
//go:generate bpf2go -tags linux -target bpfel -type vxlan_device -type key -type flow fastpath fastpath.c -- -O2 -mcpu=v3 -Wall -Wextra -Werror -Iheaders

// Softirq measures the time in softirqs on every CPU until it is closed.
type Softirq struct {
	objects softirqObjects
	links   attachments
}

// SoftirqCPU has the nanoseconds and runs of each softirq on one CPU since
// OpenSoftirq, in the kernel's order, which is that of the rows in /proc/softirqs.
// A softirq counts when it ends. An interrupt during a softirq counts as part of it.
type SoftirqCPU softirqSoftirqCpu

// OpenSoftirq attaches to the tracepoints irq:softirq_entry and softirq_exit.
// It fails without the privilege (CAP_BPF and CAP_PERFMON, or CAP_SYS_ADMIN) and
// on kernels without raw tracepoints; callers fall back to /proc/stat.
func OpenSoftirq() (*Softirq, error) {
	s := new(Softirq)
	// Kernels before 5.11 charge maps to RLIMIT_MEMLOCK. If the process may not
	// raise the limit, it may still be large enough.
	limitErr := rlimit.RemoveMemlock()
	if err := loadSoftirqObjects(&s.objects, nil); err != nil {
		return nil, fmt.Errorf("load softirq programs: %w", errors.Join(err, limitErr))
	}
	for _, at := range []link.RawTracepointOptions{
		{Name: "softirq_entry", Program: s.objects.SoftirqEntry},
		{Name: "softirq_exit", Program: s.objects.SoftirqExit},
	} {
		l, err := link.AttachRawTracepoint(at)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("attach to raw tracepoint %s: %w", at.Name, err), s.Close())
		}
		s.links = append(s.links, l)
	}
	return s, nil
}

// Read returns the times of every possible CPU, indexed by its number.
func (s *Softirq) Read() ([]SoftirqCPU, error) {
	var cpus []SoftirqCPU
	if err := s.objects.Cpus.Lookup(uint32(0), &cpus); err != nil {
		return nil, fmt.Errorf("read softirq times: %w", err)
	}
	return cpus, nil
}

// Close detaches the programs.
func (s *Softirq) Close() error {
	return errors.Join(s.links.Close(), s.objects.Close())
}

// LoadRehash loads the program that replaces the sender's flow hash of a packet by
// the one that a NIC would compute. The caller attaches it to the egress of a
// veth that stands for a wire, and closes it.
func LoadRehash() (*ebpf.Program, error) {
	var objects wireObjects
	if err := loadWireObjects(&objects, nil); err != nil {
		return nil, fmt.Errorf("load program of the wire: %w", err)
	}
	return objects.Rehash, nil
}
