//go:build linux

package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/accel/cpuset"
	"slipstream.dev/internal/accel/kernel"
	"slipstream.dev/internal/ethtool"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/programs"
	"slipstream.dev/internal/spec"
)

const switchName = "switch"

// wire connects NICs: veths whose peers are ports of a bridge in the switch's namespace. The veths are made to behave like
// NICs, and the bridge like a wire:
//
//   - With offload full, GSO packets pass whole. With none, the NIC segments what it sends, and merges
//     what it receives by GRO in NAPI mode. (A veth uses NAPI only for packets from a device without TSO,
//     see veth_skb_is_eligible_for_gro in drivers/net/veth.c, so it does not with offload full.)
//   - With none, the switch's ports are in NAPI mode too. Packets then wait in the port's single ring, not
//     in the backlog of the CPU that sent them, where packets of a flow that moves between CPUs would be
//     reordered. NAPI implies GRO; a GRO size limit keeps the ports from merging.
//   - A full ring stops the queue of the sending device, so the devices have one. Without a queue, and on
//     kernels before 6.16, a full ring drops packets.
//   - A packet keeps the flow hash of the sender's socket. A program at the NIC replaces it with the one
//     that a NIC would compute from the headers.
type wire struct {
	nic    spec.NIC
	sw     *network.Namespace
	bridge int
	hash   *ebpf.Program
}

// prepareSwitch sets the sysctls of the switch's namespace: without IPv6 and netfilter.
func prepareSwitch() error {
	return errors.Join(
		network.Sysctl("net/ipv6/conf/all/disable_ipv6=1", "net/ipv6/conf/default/disable_ipv6=1"),
		bridgeNetfilter(false),
	)
}

func newWire(nic spec.NIC, sw *network.Namespace) (*wire, error) {
	hash, err := programs.LoadRehash()
	if err != nil {
		return nil, err
	}
	// Multicast snooping would need a querier.
	snooping := false
	bridge := &netlink.Bridge{LinkAttrs: network.LinkAttrs(switchName), MulticastSnooping: &snooping}
	bridge.MTU = nic.MTU
	if err := sw.Netlink.LinkAdd(bridge); err != nil {
		hash.Close()
		return nil, fmt.Errorf("add bridge of the switch: %w", err)
	}
	return &wire{nic: nic, sw: sw, bridge: bridge.Index, hash: hash}, nil
}

func (w *wire) close() { w.hash.Close() }

// connect adds a node's NIC. irq is the CPU that receives the NIC's packets, or -1 for the sender's.
func (w *wire) connect(ns *network.Namespace, n network.Node, irq int) error {
	port := netlink.NewVeth(network.LinkAttrs(n.Port))
	port.MTU = w.nic.MTU
	port.MasterIndex = w.bridge
	port.PeerName, port.PeerHardwareAddr, port.PeerNamespace = network.NIC, n.MAC, ns.FD()
	if err := w.sw.Netlink.LinkAdd(port); err != nil {
		return fmt.Errorf("add NIC: %w", err)
	}
	nic, err := ns.Netlink.LinkByName(network.NIC)
	if err != nil {
		return fmt.Errorf("find NIC: %w", err)
	}
	if err := w.sw.Netlink.LinkSetGROMaxSize(port, 1); err != nil {
		return fmt.Errorf("limit GRO of a port of the switch: %w", err)
	}
	if err := w.sw.Do(func() error {
		return w.offload(n.Port, w.nic.Offload == spec.OffloadNone)
	}); err != nil {
		return err
	}
	if err := ns.Do(func() error {
		if err := w.offload(network.NIC, true); err != nil || irq < 0 {
			return err
		}
		return setRPS(cpuset.New(irq).Mask())
	}); err != nil {
		return err
	}
	if err := errors.Join(
		queue(w.sw, port.Index, n.Rate),
		queue(ns, nic.Attrs().Index, n.Rate),
		w.rehash(ns, nic.Attrs().Index),
		ns.SetUp("lo", network.NIC),
	); err != nil {
		return err
	}
	return errors.Join(
		ns.AddAddress(nic, netip.PrefixFrom(n.Place.IPv4, nodes4.Bits())),
		ns.AddAddress(nic, netip.PrefixFrom(n.Place.IPv6, nodes6.Bits())),
		// No host has the gateway's address. The default route exists because every node has one, and because proxy ARP answers
		// only for addresses with a route.
		ns.DefaultRoute(nic, network.Plus(nodes4.Addr(), 254), 0),
		ns.DefaultRoute(nic, network.Plus(nodes6.Addr(), 254), 0),
		ns.Settle(network.NIC),
		w.sw.Settle(n.Port, switchName),
		ns.AwaitSolicited(network.NIC, n.Place.IPv6),
	)
}

// setRPS sets the RPS mask of the NIC in the thread's namespace.
func setRPS(mask string) error {
	sys, err := kernel.OpenSysfs("")
	if err != nil {
		return err
	}
	defer sys.Close()
	if err := sys.Write(kernel.Queue(network.NIC, 0, "rps_cpus"), mask); err != nil {
		return fmt.Errorf("set RPS of the NIC to %s: %w", mask, err)
	}
	return nil
}

func (w *wire) offload(device string, gro bool) error {
	e, err := ethtool.Open()
	if err != nil {
		return err
	}
	defer e.Close()
	features := map[string]bool{"rx-gro": gro}
	if w.nic.Offload == spec.OffloadNone {
		all, err := e.Features(device)
		if err != nil {
			return err
		}
		for name, feature := range all {
			// tx-generic-segmentation (GSO) is done by the kernel, not by the device.
			if feature.Active && strings.HasPrefix(name, "tx-") && strings.HasSuffix(name, "-segmentation") && name != "tx-generic-segmentation" {
				features[name] = false
			}
		}
	}
	return e.Change(device, features)
}

// queue adds a qdisc to a device, which also limits the rate to most.
func queue(ns *network.Namespace, link int, most spec.BitRate) error {
	attrs := netlink.QdiscAttrs{LinkIndex: link, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}
	rate, err := most.BitsPerSecond()
	if err != nil {
		return err
	}
	var q netlink.Qdisc = &netlink.GenericQdisc{QdiscAttrs: attrs, QdiscType: "pfifo"} // with 1000 packets, the default queue length of a NIC
	if rate > 0 {
		q = network.TBF(attrs, rate/8)
	}
	if err := ns.Netlink.QdiscAdd(q); err != nil {
		return fmt.Errorf("add %s queue to device %d: %w", q.Type(), link, err)
	}
	return nil
}

// rehash attaches the program to the egress of a NIC. There it runs once per GSO packet, and before RPS of the peer, which
// reads the hash before any program there could run.
func (w *wire) rehash(ns *network.Namespace, nic int) error {
	return ns.Attach(nic, netlink.HANDLE_MIN_EGRESS, w.hash, "rehash")
}
