//go:build linux

package bpf

import (
	"fmt"
	"io"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// guard is the one program of fastpath.c that newer kernels alone can have.
const guard = "guard"

// withoutGuard has the programs be loaded by a kernel that takes no eBPF for netfilter.
func withoutGuard(spec *ebpf.CollectionSpec) *ebpf.CollectionSpec {
	without := spec.Copy()
	without.Programs[guard] = &ebpf.ProgramSpec{
		Name: guard, Type: ebpf.SchedCLS, License: spec.Programs[guard].License,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	}
	return without
}

// Guard drops, in the calling thread's network namespace until it is closed, packets that would
// have conntrack take a known connection to have ended, and are not of that connection. An error
// says what the kernel lacks.
func (f *Fastpath) Guard() (io.Closer, error) {
	if f.objects.Guard.Type() != ebpf.Netfilter {
		return nil, fmt.Errorf("this kernel lacks %s or CONFIG_NETFILTER_BPF_LINK: %w", since("eBPF for netfilter", "6.4"), f.noGuard)
	}
	all, err := attachNetfilter(f.objects.Guard, unix.NF_INET_PRE_ROUTING, conntrackPriority-1)
	if err != nil {
		return nil, fmt.Errorf("attach the program that drops forged ends of connections: %w", err)
	}
	return all, nil
}
