//go:build linux

package datapath

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// since adds to a feature the version that introduced it. It is for messages only: kernels backport
// features, so nothing here compares versions.
func since(what, version string) string { return what + " (since Linux " + version + ")" }

// helpers lists the newest helpers that the fast path uses.
var helpers = []struct {
	helper        asm.BuiltinFunc
	name, version string
}{
	{asm.FnRingbufOutput, "bpf_ringbuf_output", "5.8"},
	{asm.FnSkcToTcpSock, "bpf_skc_to_tcp_sock", "5.9"},
	{asm.FnRedirectPeer, "bpf_redirect_peer", "5.10"},
	{asm.FnKtimeGetCoarseNs, "bpf_ktime_get_coarse_ns", "5.11"},
}

// explain probes the kernel for each feature that the fast path needs, and returns an error that names the missing ones. If
// none is missing, it returns the error of loading.
func explain(failed error) error {
	if errors.Is(failed, unix.EPERM) {
		return fmt.Errorf("this needs root, or the capabilities BPF, NET_ADMIN and PERFMON: %w", failed)
	}
	var lacks []string
	for _, h := range helpers {
		if errors.Is(features.HaveProgramHelper(ebpf.SchedCLS, h.helper), ebpf.ErrNotSupported) {
			lacks = append(lacks, since(h.name, h.version))
		}
	}
	// Without this helper, the ebpf package falls back to bpf_probe_read, so the error may be another one than ErrNotSupported.
	if features.HaveProgramHelper(ebpf.SchedCLS, asm.FnProbeReadKernel) != nil {
		lacks = append(lacks, lacksProbeRead())
	}
	lacks = append(lacks, lacksBTF()...)
	if errors.Is(haveTCX(), ebpf.ErrNotSupported) {
		lacks = append(lacks, since("tcx", "6.6"))
	}
	if len(lacks) == 0 {
		return failed
	}
	return fmt.Errorf("this kernel lacks %s", strings.Join(lacks, ", "))
}

// lacksProbeRead returns why programs cannot read kernel memory.
func lacksProbeRead() string {
	const helper = "bpf_probe_read_kernel"
	if mode, err := os.ReadFile("/sys/kernel/security/lockdown"); err == nil && strings.Contains(string(mode), "[confidentiality]") {
		return helper + ", which lockdown=confidentiality forbids (lockdown=integrity does not)"
	}
	return since(helper, "5.5") + " or forbids it (lockdown=confidentiality)"
}

// lacksBTF returns the missing kfuncs, or that the kernel has no BTF.
func lacksBTF() []string {
	kernel, err := btf.LoadKernelSpec()
	if err != nil {
		return []string{"BTF (CONFIG_DEBUG_INFO_BTF)"}
	}
	var lacks []string
	if !hasFunction(kernel, "bpf_cast_to_kern_ctx") {
		lacks = append(lacks, since("bpf_cast_to_kern_ctx", "6.2"))
	}
	const lookup = "bpf_skb_ct_lookup"
	if hasFunction(kernel, lookup) {
		return lacks
	}
	const conntrack = "nf_conntrack"
	there := func(file string) bool { _, err := os.Stat("/sys/module/" + conntrack + file); return err == nil }
	module, err := btf.LoadKernelModuleSpec(conntrack)
	switch {
	case err == nil && hasFunction(module, lookup):
	case !there(""):
		lacks = append(lacks, "connection tracking (load the module "+conntrack+")")
	case err != nil && there("/initstate"): // a built-in nf_conntrack has no BTF of its own
		lacks = append(lacks, "BTF of its modules (CONFIG_DEBUG_INFO_BTF_MODULES)")
	default:
		lacks = append(lacks, since(lookup, "5.18"))
	}
	return lacks
}

func hasFunction(spec *btf.Spec, name string) bool {
	var f *btf.Func
	return spec.TypeByName(name, &f) == nil
}

// haveTCX probes for tcx: it attaches a program to a device that does not exist.
func haveTCX() error {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
	if err != nil {
		return err
	}
	defer p.Close()
	l, err := link.AttachTCX(link.TCXOptions{Interface: math.MaxInt32, Program: p, Attach: ebpf.AttachTCXIngress})
	if err == nil {
		err = l.Close()
	}
	return err
}
