//go:build linux

package bpf

import (
	"fmt"
	"io"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// dropForged is the one program of fastpath.c that newer kernels alone can have.
const dropForged = "guard"

// withoutDropForged has the programs be loaded by a kernel that takes no eBPF for netfilter.
func withoutDropForged(spec *ebpf.CollectionSpec) *ebpf.CollectionSpec {
	without := spec.Copy()
	without.Programs[dropForged] = &ebpf.ProgramSpec{
		Name: dropForged, Type: ebpf.SchedCLS, License: spec.Programs[dropForged].License,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	}
	return without
}

// DropForged drops, in the calling thread's network namespace until it is closed, packets that would
// have conntrack take a known connection to have ended, and are not of that connection. An error
// says what the kernel lacks.
func (f *Fastpath) DropForged() (io.Closer, error) {
	if f.objects.DropForged.Type() != ebpf.Netfilter {
		return nil, fmt.Errorf("this kernel lacks %s or CONFIG_NETFILTER_BPF_LINK: %w", since("eBPF for netfilter", "6.4"), f.noDropForged)
	}
	all, err := attachNetfilter(f.objects.DropForged, unix.NF_INET_PRE_ROUTING, conntrackPriority-1)
	if err != nil {
		return nil, fmt.Errorf("attach the program that drops forged ends of connections: %w", err)
	}
	return all, nil
}
