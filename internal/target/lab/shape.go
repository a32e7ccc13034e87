//go:build linux

package lab

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/target/lab/programs"
)

// Shapes of the pod network, in addition to the API's two of VXLAN.
const (
	// ShapeRouted has pods on a bridge, and a route to the pods of every other node via that node's
	// address: flannel's host-gw, or Calico without encapsulation.
	ShapeRouted = "routed"
	// ShapeBridge has pods on a bridge, and no route to those of other nodes.
	ShapeBridge = "bridge"
	// ShapeVXLANFlow has one external (flow-based) VXLAN device per node. An eBPF program at the
	// pods' veths gives each packet its tunnel key, as in Cilium's overlay and, by other means, Open
	// vSwitch and Weave's fast data path.
	ShapeVXLANFlow = "vxlan-flow"
	// ShapeEBPF has eBPF programs that route between pods and NIC and bypass the node's netfilter:
	// Cilium's host routing with direct routes between nodes.
	ShapeEBPF = "ebpf"
	// ShapeUDP has a process on each node that forwards packets between a TUN device and a UDP
	// socket: flannel's udp.
	ShapeUDP = "udp"
)

// Shapes returns the shapes of the pod network that a lab can have.
func Shapes() []string {
	return []string{v1alpha1.ShapeFlannel, v1alpha1.ShapeCalico, ShapeRouted, ShapeBridge, ShapeVXLANFlow, ShapeEBPF, ShapeUDP}
}

// bridged reports whether pods are on the node's bridge.
func (c Config) bridged() bool {
	return slices.Contains([]string{v1alpha1.ShapeFlannel, ShapeRouted, ShapeBridge, ShapeUDP}, c.Shape)
}

// mtu returns the MTUs of the pods for both IP versions.
func (c Config) mtu() (v4, v6 int) {
	nic := c.NIC.MTU
	switch c.Shape {
	case v1alpha1.ShapeFlannel, v1alpha1.ShapeCalico:
		return nic - overhead4, nic - overhead6
	case ShapeVXLANFlow: // both travel over IPv4
		return nic - overhead4, nic - overhead4
	case ShapeUDP: // so they do here
		return nic - overheadUDP, nic - overheadUDP
	}
	return nic, nic
}

// host is a node that is being created.
type host struct {
	*namespace
	node
	// programs forward the pods' packets, in shapes of eBPF.
	programs *programs.HostRouting
	// tunnelled: they send packets to other nodes through the VXLAN device.
	tunnelled bool
}

func (h *host) close() {
	if h == nil {
		return
	}
	if h.programs != nil {
		h.programs.Close()
	}
	h.namespace.close()
}

// makeOverlay connects the pods of node i with those of the other nodes.
func (l *Lab) makeOverlay(h *host, nodes []node, i int, log *slog.Logger) error {
	c := l.state.Config
	if c.bridged() {
		if err := makeBridge(h.namespace, c, h.node); err != nil {
			return err
		}
	}
	switch c.Shape {
	case ShapeRouted:
		return routes(h, nodes, i)
	case ShapeBridge:
		return unreachable(h)
	case ShapeVXLANFlow:
		return makeFlowTunnel(h, c, nodes, i)
	case ShapeEBPF:
		return makeDirect(h, nodes, i)
	case ShapeUDP:
		return l.makeForwarder(h, nodes, i, log)
	}
	return makeTunnels(h.namespace, c, nodes, i)
}

// routes adds routes to the pods of every other node via that node's address, like flannel's host-gw
// (pkg/backend/hostgw) and Cilium's auto-direct-node-routes.
func routes(h *host, nodes []node, i int) error {
	eth0, err := h.nl.LinkByName(nicName)
	if err != nil {
		return fmt.Errorf("find NIC: %w", err)
	}
	for j, remote := range nodes {
		if j == i {
			continue
		}
		for _, r := range []netlink.Route{
			{Dst: ipNet(remote.pods4), Gw: remote.place.IPv4.AsSlice()},
			{Dst: ipNet(remote.pods6), Gw: remote.place.IPv6.AsSlice()},
		} {
			r.LinkIndex = eth0.Attrs().Index
			if err := h.nl.RouteAdd(&r); err != nil {
				return fmt.Errorf("add route to pods of %s: %w", remote.place.Name, err)
			}
		}
	}
	return nil
}

// unreachable makes the kernel answer at once that the pods of other nodes are unreachable; otherwise it
// would send the packets to the default gateway.
func unreachable(h *host) error {
	for _, p := range []netip.Prefix{cluster4, cluster6} {
		if err := h.nl.RouteAdd(&netlink.Route{Dst: ipNet(p), Type: unix.RTN_UNREACHABLE, Table: unix.RT_TABLE_MAIN}); err != nil {
			return fmt.Errorf("add unreachable route %s: %w", p, err)
		}
	}
	return nil
}

// blackhole drops packets to addresses in the node's pod prefix that no pod has.
func blackhole(ns *namespace, pods netip.Prefix) error {
	if err := ns.nl.RouteAdd(&netlink.Route{Dst: ipNet(pods), Type: unix.RTN_BLACKHOLE, Table: unix.RT_TABLE_MAIN}); err != nil {
		return fmt.Errorf("add blackhole route %s: %w", pods, err)
	}
	return nil
}

// makePod connects a pod to its node, as the product's CNI plugin does.
func makePod(h *host, ns *namespace, c Config, p pod) error {
	veth := netlink.NewVeth(linkAttrs(p.veth))
	veth.MTU, _ = c.mtu()
	veth.PeerName, veth.PeerHardwareAddr, veth.PeerNamespace = nicName, p.mac, ns.fd()
	switch {
	case c.Shape == v1alpha1.ShapeCalico:
		veth.HardwareAddr = calicoMAC
	case h.programs != nil:
		veth.MTU = c.NIC.MTU // like Cilium, which sets the overlay's MTU on the pod's routes
		veth.HardwareAddr = hardwareAddr(p.place.Name, p.veth)
	}
	if err := h.nl.LinkAdd(veth); err != nil {
		return fmt.Errorf("add %s: %w", veth.Name, err)
	}
	if err := setUp(ns, nicName, "lo"); err != nil {
		return err
	}
	eth0, err := ns.nl.LinkByName(nicName)
	if err != nil {
		return fmt.Errorf("find %s: %w", nicName, err)
	}
	switch {
	case c.Shape == v1alpha1.ShapeCalico:
		return calicoPod(h.namespace, ns, c, p, veth, eth0)
	case h.programs != nil:
		return programPod(h, ns, c, p, veth, eth0)
	}
	return bridgePod(h, ns, c, p, veth, eth0)
}

// bridgePod puts a pod on the bridge, as the CNI plugin of that name does.
func bridgePod(h *host, ns *namespace, c Config, p pod, veth, eth0 netlink.Link) error {
	bridge, err := h.nl.LinkByName(bridgeName)
	if err != nil {
		return fmt.Errorf("find bridge %s: %w", bridgeName, err)
	}
	if err := h.nl.LinkSetMaster(veth, bridge); err != nil {
		return fmt.Errorf("add %s to %s: %w", p.veth, bridgeName, err)
	}
	if err := h.nl.LinkSetHairpin(veth, true); err != nil {
		return fmt.Errorf("set hairpin of %s: %w", p.veth, err)
	}
	gateway4, gateway6 := nth(h.pods4, 1), nth(h.pods6, 1)
	return errors.Join(
		addAddress(ns, eth0, netip.PrefixFrom(p.place.IPv4, h.pods4.Bits())),
		addAddress(ns, eth0, netip.PrefixFrom(p.place.IPv6, h.pods6.Bits())),
		defaultRoutes(ns, c, eth0, gateway4, gateway6),
		settle(h.namespace, p.veth, bridgeName),
		awaitSolicited(h.namespace, bridgeName, gateway6),
		awaitSolicited(ns, nicName, p.place.IPv6),
		makeBackends(h, ns, bridge, p),
	)
}

// defaultRoutes adds a pod's default routes. They have the overlay's MTU if the device has another one:
// otherwise every connection would lose its first packets to path MTU discovery.
func defaultRoutes(ns *namespace, c Config, eth0 netlink.Link, gateway4, gateway6 netip.Addr) error {
	v4, v6 := c.mtu()
	if v4 == eth0.Attrs().MTU {
		v4 = 0
	}
	if v6 == eth0.Attrs().MTU {
		v6 = 0
	}
	return errors.Join(defaultRoute(ns, eth0, gateway4, v4), defaultRoute(ns, eth0, gateway6, v6))
}
