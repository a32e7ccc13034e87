//go:build linux

package collect

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/process"
)

//go:generate bpf2go -tags linux -target bpfel -type softirq_cpu softirq ../../bpf/collect/softirq.c -- -O2 -fno-strict-aliasing -Wall -Wextra -Wno-unused-parameter -Werror -I../../bpf/headers

// softirqTimes measures the time in softirqs on every CPU.
type softirqTimes struct {
	objects softirqObjects
	links   []link.Link
}

// softirqCPU holds the nanoseconds and runs of each softirq on one CPU since openSoftirqTimes, in the order of the rows of
// /proc/softirqs. A softirq counts when it ends, including the interrupts during it.
type softirqCPU softirqSoftirqCpu

// openSoftirqTimes attaches to the tracepoints irq:softirq_entry and softirq_exit. It needs CAP_BPF and CAP_PERFMON, or
// CAP_SYS_ADMIN, and raw tracepoints. If it fails, callers fall back to /proc/stat.
func openSoftirqTimes() (*softirqTimes, error) {
	s := new(softirqTimes)
	explain := process.Loading()
	if err := explain(loadSoftirqObjects(&s.objects, nil)); err != nil {
		if errors.Is(err, unix.EPERM) {
			return nil, fmt.Errorf("load softirq programs, which takes root, or the capabilities BPF and PERFMON: %w", err)
		}
		return nil, fmt.Errorf("load softirq programs: %w", err)
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
func (s *softirqTimes) Read() ([]softirqCPU, error) {
	var cpus []softirqCPU
	if err := s.objects.Cpus.Lookup(uint32(0), &cpus); err != nil {
		return nil, fmt.Errorf("read softirq times: %w", err)
	}
	return cpus, nil
}

// Close detaches the programs.
func (s *softirqTimes) Close() error {
	var errs []error
	for _, l := range s.links {
		errs = append(errs, l.Close())
	}
	return errors.Join(append(errs, s.objects.Close())...)
}
