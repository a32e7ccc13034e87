//go:build linux

package lab

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/cpuset"
	"slipstream.dev/internal/accel/kernel"
	"slipstream.dev/internal/target/lab/programs"
)

// nicName is the name of a node's NIC and of a pod's device.
const nicName = "eth0"

// switchName is the bridge of the switch.
const switchName = "switch"

// wire connects NICs: veths whose peers are ports of a bridge, in the switch's namespace. It behaves like a
// wire, and the veths like NICs:
//
//   - With offload full, GSO packets pass whole. With none, the NIC segments what it sends, and merges
//     what it receives by GRO in NAPI mode. (A veth uses NAPI only for packets from a device without TSO,
//     see veth_skb_is_eligible_for_gro in drivers/net/veth.c, so it does not with offload full.)
//   - With none, the switch's ports are in NAPI mode too. Packets then wait in the port's single ring, not
//     in the backlog of the CPU that sent them, where packets of a flow that moves between CPUs would be
//     reordered. NAPI implies GRO; a GRO size limit keeps the ports from merging.
//   - A full ring stops the queue of the sending device, so the devices have one. Without a queue, and on
//     kernels before 6.16, a full ring drops packets.
//   - A packet has the hash that the sender's socket gave its flow. A program at the NIC replaces it by the
//     one that a NIC would compute from the headers.
type wire struct {
	nic    v1alpha1.NIC
	sw     *namespace
	bridge int
	hash   *ebpf.Program
}

// prepareSwitch sets up the namespace of the switch, without netfilter.
func prepareSwitch() error {
	return errors.Join(
		sysctl("net/ipv6/conf/all/disable_ipv6=1", "net/ipv6/conf/default/disable_ipv6=1"),
		bridgeNetfilter(false),
	)
}

func newWire(nic v1alpha1.NIC, sw *namespace) (*wire, error) {
	hash, err := programs.LoadRehash()
	if err != nil {
		return nil, err
	}
	// Without multicast snooping, which needs a querier.
	snooping := false
	bridge := &netlink.Bridge{LinkAttrs: linkAttrs(switchName), MulticastSnooping: &snooping}
	bridge.MTU = nic.MTU
	if err := sw.nl.LinkAdd(bridge); err != nil {
		hash.Close()
		return nil, fmt.Errorf("add bridge of the switch: %w", err)
	}
	return &wire{nic: nic, sw: sw, bridge: bridge.Index, hash: hash}, nil
}

func (w *wire) close() { w.hash.Close() }

// linkAttrs returns the attributes of a device that is up at once, with one queue. A veth uses only one of
// its default queues, and disabling the others takes the kernel an RCU grace period.
func linkAttrs(name string) netlink.LinkAttrs {
	a := netlink.NewLinkAttrs()
	a.Name = name
	a.Flags = net.FlagUp
	a.NumTxQueues, a.NumRxQueues = 1, 1
	return a
}

// connect adds a node's NIC. irq is the CPU that receives the NIC's packets, or -1.
func (w *wire) connect(ns *namespace, n node, irq int) error {
	port := netlink.NewVeth(linkAttrs(n.port))
	port.MTU = w.nic.MTU
	port.MasterIndex = w.bridge
	port.PeerName, port.PeerHardwareAddr, port.PeerNamespace = nicName, n.mac, ns.fd()
	if err := w.sw.nl.LinkAdd(port); err != nil {
		return fmt.Errorf("add NIC: %w", err)
	}
	nic, err := ns.nl.LinkByName(nicName)
	if err != nil {
		return fmt.Errorf("find NIC: %w", err)
	}
	if err := w.sw.nl.LinkSetGROMaxSize(port, 1); err != nil {
		return fmt.Errorf("limit GRO of a port of the switch: %w", err)
	}
	if err := w.sw.do(func() error {
		return w.offload(n.port, w.nic.Offload == v1alpha1.OffloadNone)
	}); err != nil {
		return err
	}
	if err := ns.do(func() error {
		if err := w.offload(nicName, true); err != nil || irq < 0 {
			return err
		}
		return setRPS(cpuset.New(irq).Mask())
	}); err != nil {
		return err
	}
	if err := errors.Join(
		queue(w.sw, port.Index, n.rate),
		queue(ns, nic.Attrs().Index, n.rate),
		w.rehash(ns, nic.Attrs().Index),
		setUp(ns, "lo", nicName),
	); err != nil {
		return err
	}
	return errors.Join(
		addAddress(ns, nic, netip.PrefixFrom(n.place.IPv4, nodes4.Bits())),
		addAddress(ns, nic, netip.PrefixFrom(n.place.IPv6, nodes6.Bits())),
		// No host has the gateway's address. Every node has a default route, and proxy ARP answers only
		// for addresses that have a route.
		defaultRoute(ns, nic, nth(nodes4, 254), 0),
		defaultRoute(ns, nic, nth(nodes6, 254), 0),
		settle(ns, nicName),
		settle(w.sw, n.port, switchName),
		awaitSolicited(ns, nicName, n.place.IPv6),
	)
}

// setRPS sets the RPS mask of the NIC in the thread's namespace.
func setRPS(mask string) error {
	sys, err := kernel.OpenSysfs("")
	if err != nil {
		return err
	}
	defer sys.Close()
	if err := sys.Write(kernel.Queue(nicName, 0, "rps_cpus"), mask); err != nil {
		return fmt.Errorf("set RPS of the NIC to %s: %w", mask, err)
	}
	return nil
}

// setUp sets devices up.
func setUp(ns *namespace, names ...string) error {
	for _, name := range names {
		if err := ns.nl.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: name}}); err != nil {
			return fmt.Errorf("set %s up: %w", name, err)
		}
	}
	return nil
}

// settle makes sure that devices which came up can send. The kernel activates their queues a moment later
// in the background (net/core/link_watch.c), and drops packets until then: an ARP request, for instance,
// which is only repeated after a second. A query for a device flushes that work (rtnl_getlink in
// net/core/rtnetlink.c).
func settle(ns *namespace, names ...string) error {
	for _, name := range names {
		if _, err := ns.nl.LinkByName(name); err != nil {
			return fmt.Errorf("find %s: %w", name, err)
		}
	}
	return nil
}

// awaitSolicited waits until a device receives neighbour solicitations for its IPv6 address. The kernel
// joins the solicited-node multicast group in the background (addrconf_dad_begin in net/ipv6/addrconf.c).
// An earlier solicitation is lost, and only repeated after a second.
func awaitSolicited(ns *namespace, device string, a netip.Addr) error {
	raw := a.As16()
	group := fmt.Sprintf("ff0200000000000000000001ff%x", raw[13:]) // RFC 4291, section 2.7.1
	return ns.do(func() error {
		for begin := time.Now(); time.Since(begin) < 5*time.Second; time.Sleep(time.Millisecond) {
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
		return fmt.Errorf("address %s of %s is not ready after 5 s", a, device)
	})
}

// awaitLocal waits until the namespace delivers packets to an IPv6 address locally. The kernel adds the
// local route in the background too, and forwards or drops packets until then.
func awaitLocal(ns *namespace, a netip.Addr) error {
	local := &netlink.Route{Table: unix.RT_TABLE_LOCAL, Dst: ipNet(netip.PrefixFrom(a, a.BitLen()))}
	for begin := time.Now(); time.Since(begin) < 5*time.Second; time.Sleep(time.Millisecond) {
		routes, err := ns.nl.RouteListFiltered(netlink.FAMILY_V6, local, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_DST)
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return fmt.Errorf("look up address %s: %w", a, err)
		}
		if len(routes) > 0 {
			return nil
		}
	}
	return fmt.Errorf("address %s is not ready after 5 s", a)
}

// addAddress adds an address without duplicate address detection.
func addAddress(ns *namespace, link netlink.Link, p netip.Prefix) error {
	a := &netlink.Addr{IPNet: ipNet(p), Flags: unix.IFA_F_NODAD}
	if err := ns.nl.AddrAdd(link, a); err != nil {
		return fmt.Errorf("add address %s to %s: %w", p, link.Attrs().Name, err)
	}
	return nil
}

// defaultRoute adds a default route via a gateway; an MTU of 0 is the device's.
func defaultRoute(ns *namespace, link netlink.Link, gateway netip.Addr, mtu int) error {
	everything := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if gateway.Is6() {
		everything = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	r := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(everything), Gw: gateway.AsSlice(), MTU: mtu}
	if err := ns.nl.RouteAdd(r); err != nil {
		return fmt.Errorf("add default route by %s: %w", gateway, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// offload sets the offloads of a device.
func (w *wire) offload(device string, gro bool) error {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return fmt.Errorf("open ethtool: %w", err)
	}
	defer e.Close()
	features := map[string]bool{"rx-gro": gro}
	if w.nic.Offload == v1alpha1.OffloadNone {
		all, err := e.Features(device)
		if err != nil {
			return fmt.Errorf("read offloads of %s: %w", device, err)
		}
		for name, on := range all {
			// tx-generic-segmentation (GSO) is done by the kernel, not by the device.
			if on && strings.HasPrefix(name, "tx-") && strings.HasSuffix(name, "-segmentation") && name != "tx-generic-segmentation" {
				features[name] = false
			}
		}
	}
	if err := e.Change(device, features); err != nil {
		return fmt.Errorf("set offloads of %s: %w", device, err)
	}
	return nil
}

// queue adds the qdisc of a device, which also limits the rate.
func queue(ns *namespace, link int, most v1alpha1.BitRate) error {
	attrs := netlink.QdiscAttrs{LinkIndex: link, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}
	rate, err := most.BitsPerSecond()
	if err != nil {
		return err
	}
	var q netlink.Qdisc = &netlink.GenericQdisc{QdiscAttrs: attrs, QdiscType: "pfifo"} // of 1000 packets, the kernel's default for a NIC
	if rate > 0 {
		q = tbf(attrs, rate/8)
	}
	if err := ns.nl.QdiscAdd(q); err != nil {
		return fmt.Errorf("add %s queue to device %d: %w", q.Type(), link, err)
	}
	return nil
}

// tbf returns a token bucket filter for a rate in bytes per second. The burst is 1 ms, or two of the
// largest packets if that is more, so that they pass whole. The queue is 20 ms.
func tbf(attrs netlink.QdiscAttrs, rate uint64) *netlink.Tbf {
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

// rehash attaches the program at the egress of a NIC: there it runs once for a GSO packet, and before RPS at
// the other end, which reads the hash before any program there runs.
func (w *wire) rehash(ns *namespace, nic int) error {
	return attach(ns, nic, netlink.HANDLE_MIN_EGRESS, w.hash, "rehash")
}

// attach attaches a program at the ingress (HANDLE_MIN_INGRESS) or egress (HANDLE_MIN_EGRESS) of a device,
// for as long as the device exists.
func attach(ns *namespace, device int, parent uint32, program *ebpf.Program, name string) error {
	clsact := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: device,
		Handle:    netlink.MakeHandle(0xffff, 0),
		Parent:    netlink.HANDLE_CLSACT,
	}}
	if err := ns.nl.QdiscAdd(clsact); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add clsact to device %d: %w", device, err)
	}
	filter := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: device, Parent: parent,
			Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 1,
		},
		Fd: program.FD(), Name: name, DirectAction: true,
	}
	if err := ns.nl.FilterAdd(filter); err != nil {
		return fmt.Errorf("attach eBPF program %s to device %d: %w", name, device, err)
	}
	return nil
}

// congestionControl sets the congestion control of the thread's namespace. Outside the initial namespace,
// the kernel allows only some (TCP_CONG_NON_RESTRICTED). The traffic engine sets it on its sockets too.
func congestionControl(name string, log *slog.Logger) {
	if name == "" {
		return
	}
	if err := sysctl("net/ipv4/tcp_congestion_control=" + name); err != nil {
		log.Info("congestion control cannot be set for a namespace; sockets set it", "err", err)
	}
}
