//go:build linux

package datapath

import (
	"fmt"
	"io"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// dropForged is the name of the only program in fastpath.c that some supported kernels cannot load.
const dropForged = "drop_forged"

// withoutDropForged replaces drop_forged by a program that a kernel without eBPF for netfilter can load.
func withoutDropForged(spec *ebpf.CollectionSpec) *ebpf.CollectionSpec {
	without := spec.Copy()
	without.Programs[dropForged] = &ebpf.ProgramSpec{
		Name: dropForged, Type: ebpf.SchedCLS, License: spec.Programs[dropForged].License,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	}
	return without
}

// DropForged attaches drop_forged in the calling thread's network namespace, until the returned Closer is closed. The program
// drops forged packets that would make conntrack close a known connection. An error says what the kernel lacks.
func (p *Programs) DropForged() (io.Closer, error) {
	if p.objects.DropForged.Type() != ebpf.Netfilter {
		return nil, fmt.Errorf("this kernel lacks %s or CONFIG_NETFILTER_BPF_LINK: %w", since("eBPF for netfilter", "6.4"), p.noDropForged)
	}
	all, err := attachNetfilter(p.objects.DropForged, unix.NF_INET_PRE_ROUTING, conntrackPriority-1)
	if err != nil {
		return nil, fmt.Errorf("attach drop_forged: %w", err)
	}
	return all, nil
}
