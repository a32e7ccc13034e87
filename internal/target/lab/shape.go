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

// Shapes of the pods' network, beside the API's two of VXLAN.
const (
	// ShapeRouted has pods on a bridge and, for those of every other node, a route
	// by that node's address: flannel's host-gw, and Calico's without
	// encapsulation.
	ShapeRouted = "routed"
	// ShapeBridge has pods on a bridge and no way to those of another node.
	ShapeBridge = "bridge"
	// ShapeVXLANFlow has one VXLAN device a node without remote of its own. An
	// eBPF program at the pods' side gives each packet its tunnel key: Cilium's
	// overlay, and in their own way Open vSwitch's and Weave's fast data path.
	ShapeVXLANFlow = "vxlan-flow"
	// ShapeEBPF has eBPF programs route between pods and NIC, past the node's
	// netfilter: Cilium's host routing with direct routes between nodes.
	ShapeEBPF = "ebpf"
	// ShapeUDP has a process a node carry packets between a TUN device and a UDP
	// socket: flannel's udp.
	ShapeUDP = "udp"
)

// Shapes of the pods' network that a lab can have.
func Shapes() []string {
	return []string{v1alpha1.ShapeFlannel, v1alpha1.ShapeCalico, ShapeRouted, ShapeBridge, ShapeVXLANFlow, ShapeEBPF, ShapeUDP}
}

// bridged tells whether pods are on the node's bridge.
func (c Config) bridged() bool {
	return slices.Contains([]string{v1alpha1.ShapeFlannel, ShapeRouted, ShapeBridge, ShapeUDP}, c.Shape)
}

// mtu of the packets that pods send, of both IP versions.
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

// host is a node in the making.
type host struct {
	*namespace
	node
	// programs carry the pods' packets, where eBPF does.
	programs *programs.HostRouting
	// tunnelled has them carry those to other nodes by the VXLAN device.
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

// makeOverlay makes what joins the pods of node i with all others'.
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

// routes lead to the pods of every other node by that node's address, as flannel's
// host-gw makes them (pkg/backend/hostgw), and Cilium with auto-direct-node-routes.
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

// unreachable says at once that there is no way to the pods of other nodes, which
// would else be looked for behind the default route.
func unreachable(h *host) error {
	for _, p := range []netip.Prefix{cluster4, cluster6} {
		if err := h.nl.RouteAdd(&netlink.Route{Dst: ipNet(p), Type: unix.RTN_UNREACHABLE, Table: unix.RT_TABLE_MAIN}); err != nil {
			return fmt.Errorf("add unreachable route %s: %w", p, err)
		}
	}
	return nil
}

// blackhole ends packets to addresses of the node's pods that no pod has.
func blackhole(ns *namespace, pods netip.Prefix) error {
	if err := ns.nl.RouteAdd(&netlink.Route{Dst: ipNet(pods), Type: unix.RTN_BLACKHOLE, Table: unix.RT_TABLE_MAIN}); err != nil {
		return fmt.Errorf("add blackhole route %s: %w", pods, err)
	}
	return nil
}

// makePod links a pod with its node, as the product's CNI plugin does.
func makePod(h *host, ns *namespace, c Config, p pod) error {
	veth := netlink.NewVeth(linkAttrs(p.veth))
	veth.MTU, _ = c.mtu()
	veth.PeerName, veth.PeerHardwareAddr, veth.PeerNamespace = nicName, p.mac, ns.fd()
	switch {
	case c.Shape == v1alpha1.ShapeCalico:
		veth.HardwareAddr = calicoMAC
	case h.programs != nil:
		veth.MTU = c.NIC.MTU // as Cilium has it: what the overlay takes is on the pod's routes
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

// defaultRoutes lead a pod out. They have the MTU where the device's is another, or
// the first packets of every connection would be lost in finding it.
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
