//go:build linux

package datapath

import (
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// ResyncFilter drops the packets that resynchronise conntrack, after conntrack has seen them.
type ResyncFilter struct {
	// Mark is the skb mark of these packets.
	Mark    uint32
	objects resyncObjects
	links   attachments
}

// conntrackPriority is NF_IP_PRI_CONNTRACK (include/uapi/linux/netfilter_ipv4.h).
const conntrackPriority = -200

// DropResync attaches drop_resync in the calling thread's network namespace until Close. The program drops packets that the
// node sends with Mark, a random number, right after conntrack. An error says what the kernel lacks.
func DropResync() (r *ResyncFilter, err error) {
	spec, err := loadResync()
	if err != nil {
		return nil, fmt.Errorf("read the program that drops resync packets: %w", err)
	}
	r = &ResyncFilter{Mark: rand.Uint32() | 1}
	if err := spec.Variables["resync_mark"].Set(r.Mark); err != nil {
		return nil, err
	}
	if err := spec.LoadAndAssign(&r.objects, nil); err != nil {
		return nil, fmt.Errorf("load the program that drops resync packets (it needs eBPF for netfilter: Linux 6.4 or newer with CONFIG_NETFILTER_BPF_LINK): %w", err)
	}
	if r.links, err = attachNetfilter(r.objects.DropResync, unix.NF_INET_LOCAL_OUT, conntrackPriority+1); err != nil {
		return nil, errors.Join(fmt.Errorf("attach the program that drops resync packets: %w", err), r.Close())
	}
	return r, nil
}

// Close detaches the program.
func (r *ResyncFilter) Close() error { return errors.Join(r.links.Close(), r.objects.Close()) }

// attachments are the links of programs that stay attached until Close.
type attachments []link.Link

// Close detaches the programs.
func (a attachments) Close() error {
	var errs []error
	for _, l := range a {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}

// attachNetfilter attaches a program to a hook of IPv4 and IPv6 in the calling thread's network
// namespace.
func attachNetfilter(p *ebpf.Program, hook link.NetfilterInetHook, priority int32) (all attachments, err error) {
	for _, family := range []link.NetfilterProtocolFamily{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		l, err := link.AttachNetfilter(link.NetfilterOptions{Program: p, ProtocolFamily: family, Hook: hook, Priority: priority})
		if err != nil {
			return nil, errors.Join(err, all.Close())
		}
		all = append(all, l)
	}
	return all, nil
}
