//go:build linux

// Package bpf holds every eBPF program of slipstream: the C sources, what they
// compile to, and a loader each. Where a program belongs and what its numbers
// mean is its user's: internal/collect's for the softirq times, the lab's for
// what a wire does and for how pods' packets travel, internal/accel's for the fast path.
//
// The objects are committed, so that building slipstream needs no C compiler;
// `make generate` writes them anew. They are the same for every little-endian
// machine. The fast path alone looks at types of the kernel's, and finds its way in
// them by the kernel's BTF.
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

// Softirq times softirqs on every CPU for as long as it is open.
type Softirq struct {
	objects softirqObjects
	links   []link.Link
}

// SoftirqCPU is what one CPU did since OpenSoftirq: nanoseconds and runs of
// each softirq, by the kernel's numbers, which are the order of /proc/softirqs'
// rows. A softirq under way is not in it yet. An interrupt within a softirq is.
type SoftirqCPU softirqSoftirqCpu

// OpenSoftirq attaches to the tracepoints irq:softirq_entry and softirq_exit.
// It fails without the right to (CAP_BPF and CAP_PERFMON, or CAP_SYS_ADMIN) and
// on kernels without raw tracepoints; a caller goes on with /proc/stat then.
func OpenSoftirq() (*Softirq, error) {
	s := new(Softirq)
	// Kernels before 5.11 count maps against the limit of locked memory. It
	// may not be ours to raise, and may be large enough as it is.
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

// Read returns the times of every possible CPU, at the index of its number.
func (s *Softirq) Read() ([]SoftirqCPU, error) {
	var cpus []SoftirqCPU
	if err := s.objects.Cpus.Lookup(uint32(0), &cpus); err != nil {
		return nil, fmt.Errorf("read softirq times: %w", err)
	}
	return cpus, nil
}

// Close detaches.
func (s *Softirq) Close() error {
	var errs []error
	for _, l := range s.links {
		errs = append(errs, l.Close())
	}
	return errors.Join(append(errs, s.objects.Close())...)
}

// LoadRehash loads the program that gives a packet the flow hash that a NIC
// would compute, in place of its sender's: for the egress of a wire's end. The
// caller attaches and closes it.
func LoadRehash() (*ebpf.Program, error) {
	var objects wireObjects
	if err := loadWireObjects(&objects, nil); err != nil {
		return nil, fmt.Errorf("load program of the wire: %w", err)
	}
	return objects.Rehash, nil
}
