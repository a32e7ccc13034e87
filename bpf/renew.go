//go:build linux

package bpf

import (
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Renewals are packets of this node that conntrack is to see, and nobody else.
type Renewals struct {
	// Mark is what such packets bear.
	Mark    uint32
	objects renewObjects
	links   []link.Link
}

// behindConntrack is the priority next to NF_IP_PRI_CONNTRACK
// (include/uapi/linux/netfilter_ipv4.h).
const behindConntrack = -200 + 1

// DropRenewals drops, in the calling thread's network namespace until Close, the packets of
// this node that bear a mark, right behind conntrack. An error says what the kernel lacks.
func DropRenewals() (r *Renewals, err error) {
	spec, err := loadRenew()
	if err != nil {
		return nil, fmt.Errorf("read the program that drops packets behind conntrack: %w", err)
	}
	r = &Renewals{Mark: rand.Uint32() | 1}
	if err := spec.Variables["renewal"].Set(r.Mark); err != nil {
		return nil, err
	}
	if err := spec.LoadAndAssign(&r.objects, nil); err != nil {
		return nil, fmt.Errorf("load the program that drops packets behind conntrack (it needs eBPF for netfilter: Linux 6.4 or newer with CONFIG_NETFILTER_BPF_LINK): %w", err)
	}
	for _, family := range []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		l, err := link.AttachNetfilter(link.NetfilterOptions{
			Program: r.objects.DropRenewals, ProtocolFamily: link.NetfilterProtocolFamily(family),
			Hook: link.NetfilterInetHook(unix.NF_INET_LOCAL_OUT), Priority: behindConntrack,
		})
		if err != nil {
			return nil, errors.Join(fmt.Errorf("attach the program that drops packets behind conntrack: %w", err), r.Close())
		}
		r.links = append(r.links, l)
	}
	return r, nil
}

// Close lets such packets pass.
func (r *Renewals) Close() error {
	var errs []error
	for _, l := range r.links {
		errs = append(errs, l.Close())
	}
	return errors.Join(append(errs, r.objects.Close())...)
}
