//go:build linux

// Package overlay connects the pods of a lab's nodes in the ways of different products: VXLAN as by flannel or Calico
// (vxlan.go), eBPF programs like Cilium's (ebpf.go), a process that forwards packets (forwarder.go), plain routes, or not at
// all. The lab makes the network namespaces and the nodes' NICs.
package overlay

import (
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/programs"
	"slipstream.dev/internal/spec"
)

// Shapes of the pod network, in addition to spec.ShapeFlannel and spec.ShapeCalico.
const (
	// ShapeRouted has pods on a bridge, and routes to the pods of other nodes via the addresses of these: flannel's host-gw, or
	// Calico without encapsulation.
	ShapeRouted = "routed"
	// ShapeBridge has pods on a bridge, without routes to those of other nodes.
	ShapeBridge = "bridge"
	// ShapeVXLANFlow has one external (flow-based) VXLAN device per node. An eBPF program at the pods' veths sets the tunnel
	// key of each packet, as with Cilium. Open vSwitch and Weave's fast datapath do the same by other means.
	ShapeVXLANFlow = "vxlan-flow"
	// ShapeEBPF has eBPF programs that route between pods and NIC, past the node's netfilter: Cilium's host routing with direct
	// routes between nodes.
	ShapeEBPF = "ebpf"
	// ShapeUDP has a process on each node that forwards packets between a TUN device and a UDP socket: flannel's backend udp.
	ShapeUDP = "udp"
	// ShapeWeave has a process on each node that captures the frames of the pods' bridge, and exchanges them with other nodes
	// over a UDP socket: Weave without its fast datapath.
	ShapeWeave = spec.ShapeWeave
)

// Shapes returns all shapes of the pod network.
func Shapes() []string {
	return []string{spec.ShapeFlannel, spec.ShapeCalico, ShapeRouted, ShapeBridge, ShapeVXLANFlow, ShapeEBPF, ShapeUDP, ShapeWeave}
}

// Bypasses reports whether the packets of a shape bypass netfilter and the veths of pods, because eBPF programs redirect them.
func Bypasses(shape string) bool { return shape == ShapeEBPF || shape == ShapeVXLANFlow }

// Forwards reports whether a shape has a forwarder on each node.
func Forwards(shape string) bool { return shape == ShapeUDP || shape == ShapeWeave }

// MinMTU is the least MTU that leaves an IPv6 overlay 1280 bytes, which IPv6 requires of a link.
const MinMTU = 1280 + overhead6

// VethName returns the name that the product would give the node's end of a pod's veth pair.
func VethName(shape, pod string) string {
	sum := sha1.Sum([]byte(pod))
	digits := hex.EncodeToString(sum[:])
	switch shape {
	case spec.ShapeCalico:
		return "cali" + digits[:11] // libcalico-go, VethNameForWorkload
	case ShapeVXLANFlow, ShapeEBPF:
		return "lxc" + digits[:12] // cilium, Endpoint2IfName in pkg/endpoint/connector
	}
	return "veth" + digits[:8] // containernetworking/plugins, RandomVethName
}

// Overlay describes the pod network of a lab.
type Overlay struct {
	// Shape is one of Shapes.
	Shape string
	// NICMTU is the MTU of the nodes' NICs.
	NICMTU int
	Nodes  []network.Node
	// Processes, Forwarder and Keep are for shapes with forwarders. Forwarder is a command that calls Forward. With Keep,
	// forwarders outlive this process.
	Processes network.Processes
	Forwarder []string
	Keep      bool
	// Log receives a warning if a forwarder exits.
	Log *slog.Logger
}

// Bridged reports whether the pods of a shape are on their node's bridge.
func Bridged(shape string) bool {
	return slices.Contains([]string{spec.ShapeFlannel, ShapeRouted, ShapeBridge, ShapeUDP, ShapeWeave}, shape)
}

// bridge returns the name of a node's bridge.
func (o *Overlay) bridge() string {
	if o.Shape == ShapeWeave {
		return weaveBridge
	}
	return bridgeName
}

// attached returns the prefixes of the subnet on a node's bridge.
func (o *Overlay) attached(n network.Node) (v4, v6 netip.Prefix) {
	if o.Shape == ShapeWeave {
		return n.Cluster4, network.Cluster6
	}
	return n.Pods4, n.Pods6
}

// mtu returns the MTUs of the pods for both IP versions.
func (o *Overlay) mtu() (v4, v6 int) {
	nic := o.NICMTU
	switch o.Shape {
	case spec.ShapeFlannel, spec.ShapeCalico:
		return nic - overhead4, nic - overhead6
	case ShapeVXLANFlow: // both are encapsulated in IPv4
		return nic - overhead4, nic - overhead4
	case ShapeUDP: // as above
		return nic - udpHeaders, nic - udpHeaders
	case ShapeWeave:
		return nic - overheadWeave, nic - overheadWeave
	}
	return nic, nic
}

// Host is a node that has joined an overlay. Connect connects pods to it.
type Host struct {
	overlay *Overlay
	ns      *network.Namespace
	// index is the index of the node in the overlay.
	index  int
	node   network.Node
	others []network.Node
	// programs forward the pods' packets, in shapes with eBPF.
	programs *programs.HostRouting
	// tunnelled means that the programs use the VXLAN device for packets to other nodes.
	tunnelled bool
}

// Join connects the ith node to the overlay. The caller closes the host.
func (o *Overlay) Join(ns *network.Namespace, i int) (*Host, error) {
	h := &Host{overlay: o, ns: ns, index: i, node: o.Nodes[i], others: slices.Concat(o.Nodes[:i], o.Nodes[i+1:])}
	if err := h.join(); err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

func (h *Host) join() error {
	if Bridged(h.overlay.Shape) {
		if err := h.makeBridge(); err != nil {
			return err
		}
	}
	switch h.overlay.Shape {
	case ShapeRouted:
		return h.makeRoutes()
	case ShapeBridge:
		return h.makeUnreachable()
	case ShapeVXLANFlow:
		return h.makeFlowTunnel()
	case ShapeEBPF:
		return h.makeDirect()
	case ShapeUDP:
		return h.makeTUN()
	case ShapeWeave:
		return h.makeCapture()
	}
	return h.makeTunnels()
}

// Close releases what Connect needs. The node stays connected.
func (h *Host) Close() {
	if h != nil && h.programs != nil {
		h.programs.Close()
	}
}

// makeRoutes adds routes to the pods of every other node via that node's address, as flannel's host-gw does
// (pkg/backend/hostgw), and Cilium with auto-direct-node-routes.
func (h *Host) makeRoutes() error {
	eth0, err := h.ns.Netlink.LinkByName(network.NIC)
	if err != nil {
		return fmt.Errorf("find NIC: %w", err)
	}
	for _, remote := range h.others {
		for _, r := range []netlink.Route{
			{Dst: network.IPNet(remote.Pods4), Gw: remote.Place.IPv4.AsSlice()},
			{Dst: network.IPNet(remote.Pods6), Gw: remote.Place.IPv6.AsSlice()},
		} {
			r.LinkIndex = eth0.Attrs().Index
			if err := h.ns.Netlink.RouteAdd(&r); err != nil {
				return fmt.Errorf("add route to pods of %s: %w", remote.Place.Name, err)
			}
		}
	}
	return nil
}

// makeUnreachable makes the kernel report that the pods of other nodes are unreachable, instead of sending packets to the
// default gateway.
func (h *Host) makeUnreachable() error {
	for _, p := range []netip.Prefix{network.Cluster4, network.Cluster6} {
		if err := h.ns.Netlink.RouteAdd(&netlink.Route{Dst: network.IPNet(p), Type: unix.RTN_UNREACHABLE, Table: unix.RT_TABLE_MAIN}); err != nil {
			return fmt.Errorf("add unreachable route %s: %w", p, err)
		}
	}
	return nil
}

// blackhole makes the node drop packets to addresses of its pod prefix that no pod has.
func blackhole(ns *network.Namespace, pods netip.Prefix) error {
	if err := ns.Netlink.RouteAdd(&netlink.Route{Dst: network.IPNet(pods), Type: unix.RTN_BLACKHOLE, Table: unix.RT_TABLE_MAIN}); err != nil {
		return fmt.Errorf("add blackhole route %s: %w", pods, err)
	}
	return nil
}

// Connect connects a pod to its node, as the product's CNI plugin does.
func (h *Host) Connect(ns *network.Namespace, p network.Pod) error {
	veth := netlink.NewVeth(network.LinkAttrs(p.Veth))
	veth.MTU, _ = h.overlay.mtu()
	veth.PeerName, veth.PeerHardwareAddr, veth.PeerNamespace = network.NIC, p.MAC, ns.FD()
	switch {
	case h.overlay.Shape == spec.ShapeCalico:
		veth.HardwareAddr = calicoMAC
	case h.programs != nil:
		veth.MTU = h.overlay.NICMTU // as with Cilium, which sets the overlay's MTU on the pod's routes
		veth.HardwareAddr = network.HardwareAddr(p.Place.Name, p.Veth)
	}
	if err := h.ns.Netlink.LinkAdd(veth); err != nil {
		return fmt.Errorf("add %s: %w", veth.Name, err)
	}
	if err := ns.SetUp(network.NIC, "lo"); err != nil {
		return err
	}
	eth0, err := ns.Netlink.LinkByName(network.NIC)
	if err != nil {
		return fmt.Errorf("find %s: %w", network.NIC, err)
	}
	switch {
	case h.overlay.Shape == spec.ShapeCalico:
		return h.connectCalico(ns, p, veth, eth0)
	case h.programs != nil:
		return h.connectPrograms(ns, p, veth, eth0)
	}
	return h.connectBridge(ns, p, veth, eth0)
}

// connectBridge connects a pod to the bridge, as the CNI plugin bridge does.
func (h *Host) connectBridge(ns *network.Namespace, p network.Pod, veth, eth0 netlink.Link) error {
	name := h.overlay.bridge()
	bridge, err := h.ns.Netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find bridge %s: %w", name, err)
	}
	if err := h.ns.Netlink.LinkSetMaster(veth, bridge); err != nil {
		return fmt.Errorf("add %s to %s: %w", p.Veth, name, err)
	}
	if h.overlay.Shape == ShapeWeave {
		if err := ns.Do(func() error { return wholePackets(network.NIC) }); err != nil {
			return err
		}
	} else if err := h.ns.Netlink.LinkSetHairpin(veth, true); err != nil {
		return fmt.Errorf("set hairpin of %s: %w", p.Veth, err)
	}
	v4, v6 := h.overlay.attached(h.node)
	gateway4, gateway6 := network.Plus(h.node.Pods4.Addr(), 1), network.Plus(h.node.Pods6.Addr(), 1)
	return errors.Join(
		ns.AddAddress(eth0, netip.PrefixFrom(p.Place.IPv4, v4.Bits())),
		ns.AddAddress(eth0, netip.PrefixFrom(p.Place.IPv6, v6.Bits())),
		h.defaultRoutes(ns, eth0, gateway4, gateway6),
		h.ns.Settle(p.Veth, name),
		h.ns.AwaitSolicited(name, gateway6),
		ns.AwaitSolicited(network.NIC, p.Place.IPv6),
		h.routeBackends(ns, bridge, p),
	)
}

// routeBackends routes the addresses of backends to their pod, and makes them local there.
func (h *Host) routeBackends(ns *network.Namespace, bridge netlink.Link, p network.Pod) error {
	if len(p.Backends) == 0 {
		return nil
	}
	lo, err := ns.Netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	for ip, backends := range p.Backends {
		if err := h.ns.Netlink.RouteAdd(&netlink.Route{LinkIndex: bridge.Attrs().Index, Dst: network.IPNet(backends), Gw: p.Place.IP(ip).AsSlice()}); err != nil {
			return fmt.Errorf("add route to backends %s: %w", backends, err)
		}
		if err := ns.Netlink.RouteAdd(&netlink.Route{
			LinkIndex: lo.Attrs().Index, Dst: network.IPNet(backends), Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
		}); err != nil {
			return fmt.Errorf("make backends %s local: %w", backends, err)
		}
	}
	return ns.Do(func() error {
		return network.Sysctl(
			// TCP caches metrics per peer address. One pod has all backends here, and would have an entry for each.
			"net/ipv4/tcp_no_metrics_save=1",
			// Permits binding an IPv6 socket to an address that is local only by a route, which IPv4 always permits (inet6_bind
			// in net/ipv6/af_inet6.c).
			"net/ipv6/ip_nonlocal_bind=1",
		)
	})
}

// defaultRoutes adds a pod's default routes. They set the overlay's MTU if the device has a larger one: otherwise every
// connection would lose its first packets to path MTU discovery.
func (h *Host) defaultRoutes(ns *network.Namespace, eth0 netlink.Link, gateway4, gateway6 netip.Addr) error {
	v4, v6 := h.overlay.mtu()
	if v4 == eth0.Attrs().MTU {
		v4 = 0
	}
	if v6 == eth0.Attrs().MTU {
		v6 = 0
	}
	return errors.Join(ns.DefaultRoute(eth0, gateway4, v4), ns.DefaultRoute(eth0, gateway6, v6))
}

// Probe tests in a temporary namespace, that of the thread, whether the kernel supports a shape.
func Probe(ns *network.Namespace, shape string) error {
	switch shape {
	case ShapeVXLANFlow, ShapeEBPF:
		return probePrograms(ns, shape)
	case ShapeUDP:
		return probeTUN()
	case ShapeWeave:
		return probeCapture()
	}
	return nil
}
