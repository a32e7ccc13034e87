//go:build linux

package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/netns"
)

// LinkAttrs returns the attributes of a device that starts up, with one queue. A veth uses only one of its default queues, and
// disabling the others costs an RCU grace period.
func LinkAttrs(name string) netlink.LinkAttrs {
	a := netlink.NewLinkAttrs()
	a.Name = name
	a.Flags = net.FlagUp
	a.NumTxQueues, a.NumRxQueues = 1, 1
	return a
}

// SetUp sets devices up.
func (ns *Namespace) SetUp(names ...string) error {
	for _, name := range names {
		if err := ns.Netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: name}}); err != nil {
			return fmt.Errorf("set %s up: %w", name, err)
		}
	}
	return nil
}

// Settle makes sure that devices that just came up can send. The kernel activates their queues a moment later in the background
// (net/core/link_watch.c), and drops packets until then, such as an ARP request, which is repeated only after a second.
// Querying a device flushes that work (rtnl_getlink in net/core/rtnetlink.c).
func (ns *Namespace) Settle(names ...string) error {
	for _, name := range names {
		if _, err := ns.Netlink.LinkByName(name); err != nil {
			return fmt.Errorf("find %s: %w", name, err)
		}
	}
	return nil
}

// AwaitSolicited waits until a device receives neighbour solicitations for its IPv6 address. The kernel joins the
// solicited-node multicast group in the background (addrconf_dad_begin in net/ipv6/addrconf.c). An earlier solicitation would
// be lost, and repeated only after a second.
func (ns *Namespace) AwaitSolicited(device string, a netip.Addr) error {
	raw := a.As16()
	group := fmt.Sprintf("ff0200000000000000000001ff%x", raw[13:]) // RFC 4291, section 2.7.1
	return ns.Do(func() error {
		for begin := time.Now(); time.Since(begin) < 30*time.Second; time.Sleep(time.Millisecond) {
			groups, err := os.ReadFile("/proc/thread-self/net/igmp6")
			if err != nil {
				return fmt.Errorf("read multicast groups of %s: %w", device, err)
			}
			for line := range strings.Lines(string(groups)) {
				if f := strings.Fields(line); len(f) > 2 && f[1] == device && f[2] == group {
					return nil
				}
			}
		}
		return fmt.Errorf("address %s of %s is not ready after 30 s", a, device)
	})
}

// AwaitLocal waits until the namespace delivers packets to an IPv6 address locally. The kernel adds the local route in the
// background, and forwards or drops packets until then.
func (ns *Namespace) AwaitLocal(a netip.Addr) error {
	local := &netlink.Route{Table: unix.RT_TABLE_LOCAL, Dst: IPNet(netip.PrefixFrom(a, a.BitLen()))}
	for begin := time.Now(); time.Since(begin) < 30*time.Second; time.Sleep(time.Millisecond) {
		routes, err := netns.Dump("local routes", func() ([]netlink.Route, error) {
			return ns.Netlink.RouteListFiltered(netlink.FAMILY_V6, local, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_DST)
		})
		if err != nil {
			return fmt.Errorf("look up address %s: %w", a, err)
		}
		if len(routes) > 0 {
			return nil
		}
	}
	return fmt.Errorf("address %s is not ready after 30 s", a)
}

// AddAddress adds an address without duplicate address detection.
func (ns *Namespace) AddAddress(link netlink.Link, p netip.Prefix) error {
	a := &netlink.Addr{IPNet: IPNet(p), Flags: unix.IFA_F_NODAD}
	if err := ns.Netlink.AddrAdd(link, a); err != nil {
		return fmt.Errorf("add address %s to %s: %w", p, link.Attrs().Name, err)
	}
	return nil
}

// DefaultRoute adds a default route via a gateway. An MTU of 0 means that of the device.
func (ns *Namespace) DefaultRoute(link netlink.Link, gateway netip.Addr, mtu int) error {
	everything := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if gateway.Is6() {
		everything = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	r := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: IPNet(everything), Gw: gateway.AsSlice(), MTU: mtu}
	if err := ns.Netlink.RouteAdd(r); err != nil {
		return fmt.Errorf("add default route by %s: %w", gateway, err)
	}
	return nil
}

// IPNet converts a prefix for netlink.
func IPNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// LinkRoute adds an on-link route.
func (ns *Namespace) LinkRoute(link netlink.Link, to netip.Prefix) error {
	if err := ns.Netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: IPNet(to), Scope: netlink.SCOPE_LINK}); err != nil {
		return fmt.Errorf("add route to %s: %w", to, err)
	}
	return nil
}

// Neighbour adds a permanent neighbour entry.
func (ns *Namespace) Neighbour(link netlink.Link, a netip.Addr, mac net.HardwareAddr) error {
	if err := ns.Netlink.NeighSet(&netlink.Neigh{
		LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT, IP: a.AsSlice(), HardwareAddr: mac,
	}); err != nil {
		return fmt.Errorf("add neighbour %s: %w", a, err)
	}
	return nil
}

// Attach attaches a program to the ingress (HANDLE_MIN_INGRESS) or egress (HANDLE_MIN_EGRESS) of a device, until the device is
// removed.
func (ns *Namespace) Attach(device int, parent uint32, program *ebpf.Program, name string) error {
	clsact := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: device,
		Handle:    netlink.MakeHandle(0xffff, 0),
		Parent:    netlink.HANDLE_CLSACT,
	}}
	if err := ns.Netlink.QdiscAdd(clsact); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add clsact to device %d: %w", device, err)
	}
	filter := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: device, Parent: parent,
			Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 1,
		},
		Fd: program.FD(), Name: name, DirectAction: true,
	}
	if err := ns.Netlink.FilterAdd(filter); err != nil {
		return fmt.Errorf("attach eBPF program %s to device %d: %w", name, device, err)
	}
	return nil
}

// Missing returns the error for something that the kernel lacks, or does not permit. It names the modules that provide it, and the
// kernel options that enable it.
func Missing(what, config, modules string, err error) error {
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("no permission to use %s: run as root with all capabilities (in a container: privileged)", what)
	}
	return fmt.Errorf("this kernel lacks %s (%w): load the modules (modprobe -a %s), or use one with %s", what, err, modules, config)
}

// TBF returns a token bucket filter for a rate in bytes per second. The burst lasts 1 ms, but has at least two of the largest
// packets, so that they pass whole. The queue lasts 20 ms.
func TBF(attrs netlink.QdiscAttrs, rate uint64) *netlink.Tbf {
	burst := max(rate/1000, 128<<10)
	return &netlink.Tbf{
		QdiscAttrs: attrs,
		Rate:       rate,
		Limit:      uint32(min(burst+rate/50, 1<<31)),
		// The time that the burst takes, in the kernel's units of 64 ns
		// (PSCHED_SHIFT in include/net/pkt_sched.h).
		Buffer: uint32(min(burst*1e9/rate/64, 1<<31)),
	}
}
