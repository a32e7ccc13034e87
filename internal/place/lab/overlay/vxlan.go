//go:build linux

package overlay

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/spec"
)

// The sizes of the headers that VXLAN adds: 14 bytes of Ethernet, 8 of VXLAN, 8 of UDP, and 20 or 40 of IP (RFC 7348, section
// 5).
const (
	overhead4 = 50
	overhead6 = 70
)

// vxlan holds what differs between flannel and Calico.
type vxlan struct {
	device4, device6 string
	vni, port        int
}

var products = map[string]vxlan{
	spec.ShapeFlannel: {device4: "flannel.1", device6: "flannel-v6.1", vni: 1, port: 8472},
	spec.ShapeCalico:  {device4: "vxlan.calico", device6: "vxlan-v6.calico", vni: 4096, port: 4789},
}

// Calico gives the node's ends of all veth pairs the same MAC address, and so the same link-local address, which is the pods'
// IPv6 gateway. No device has the address of the IPv4 gateway; proxy ARP answers for it.
var (
	calicoMAC      = net.HardwareAddr{0xee, 0xee, 0xee, 0xee, 0xee, 0xee}
	calicoGateway6 = netip.MustParseAddr("fe80::ecee:eeff:feee:eeee")
	calicoGateway4 = netip.MustParseAddr("169.254.1.1")
)

const bridgeName = "cni0"

// makeTunnels creates the VXLAN devices of flannel or Calico on a node.
func (h *Host) makeTunnels() error {
	ns := h.ns
	eth0, err := ns.Netlink.LinkByName(network.NIC)
	if err != nil {
		return fmt.Errorf("find NIC: %w", err)
	}
	for _, v := range h.tunnels(eth0.Attrs().Index) {
		if err := ns.Netlink.LinkAdd(v.device); err != nil {
			return fmt.Errorf("add %s: %w", v.device.Name, err)
		}
		own := v.pods(h.node)
		if err := ns.AddAddress(v.device, netip.PrefixFrom(own.Addr(), own.Addr().BitLen())); err != nil {
			return err
		}
		if h.overlay.Shape == spec.ShapeCalico {
			if err := blackhole(ns, own); err != nil {
				return err
			}
		}
		for _, remote := range h.others {
			if err := v.join(ns, remote); err != nil {
				return fmt.Errorf("join %s: %w", remote.Place.Name, err)
			}
		}
	}
	return nil
}

// tunnel is the overlay of one IP version.
type tunnel struct {
	device *netlink.Vxlan
	// pods, vtep and nic return a node's addresses of that version.
	pods func(network.Node) netip.Prefix
	vtep func(network.Node) net.HardwareAddr
	nic  func(network.Node) netip.Addr
}

func (h *Host) tunnels(nic int) []tunnel {
	product := products[h.overlay.Shape]
	all := []tunnel{{
		device: &netlink.Vxlan{LinkAttrs: network.LinkAttrs(product.device4)},
		pods:   func(n network.Node) netip.Prefix { return n.Pods4 },
		vtep:   func(n network.Node) net.HardwareAddr { return n.VTEP4 },
		nic:    func(n network.Node) netip.Addr { return n.Place.IPv4 },
	}, {
		device: &netlink.Vxlan{LinkAttrs: network.LinkAttrs(product.device6)},
		pods:   func(n network.Node) netip.Prefix { return n.Pods6 },
		vtep:   func(n network.Node) net.HardwareAddr { return n.VTEP6 },
		nic:    func(n network.Node) netip.Addr { return n.Place.IPv6 },
	}}
	all[0].device.MTU, all[1].device.MTU = h.overlay.mtu()
	for _, t := range all {
		t.device.HardwareAddr = t.vtep(h.node)
		t.device.SrcAddr = t.nic(h.node).AsSlice()
		t.device.VtepDevIndex = nic
		t.device.VxlanId, t.device.Port = product.vni, product.port
	}
	return all
}

// join adds a remote node, as flanneld and Felix do: an FDB entry for its VXLAN device, a neighbour entry for its first
// address, and a route to its pods.
func (t tunnel) join(ns *network.Namespace, remote network.Node) error {
	index, pods := t.device.Index, t.pods(remote)
	if err := ns.Netlink.NeighSet(&netlink.Neigh{
		LinkIndex: index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF, State: netlink.NUD_PERMANENT,
		IP: t.nic(remote).AsSlice(), HardwareAddr: t.vtep(remote),
	}); err != nil {
		return fmt.Errorf("add forwarding entry: %w", err)
	}
	if err := ns.Neighbour(t.device, pods.Addr(), t.vtep(remote)); err != nil {
		return err
	}
	if err := ns.Netlink.RouteAdd(&netlink.Route{
		LinkIndex: index, Dst: network.IPNet(pods), Gw: pods.Addr().AsSlice(), Flags: int(netlink.FLAG_ONLINK),
	}); err != nil {
		return fmt.Errorf("add route: %w", err)
	}
	return nil
}

func (h *Host) makeBridge() error {
	ns, n, name := h.ns, h.node, h.overlay.bridge()
	bridge := &netlink.Bridge{LinkAttrs: network.LinkAttrs(name)}
	bridge.MTU, _ = h.overlay.mtu()
	bridge.HardwareAddr = bridgeMAC(n, name)
	if err := ns.Netlink.LinkAdd(bridge); err != nil {
		return fmt.Errorf("add bridge %s: %w", name, err)
	}
	v4, v6 := h.overlay.attached(n)
	return errors.Join(
		ns.AddAddress(bridge, netip.PrefixFrom(network.Plus(n.Pods4.Addr(), 1), v4.Bits())),
		ns.AddAddress(bridge, netip.PrefixFrom(network.Plus(n.Pods6.Addr(), 1), v6.Bits())),
	)
}

// bridgeMAC returns the MAC address of a node's bridge.
func bridgeMAC(n network.Node, bridge string) net.HardwareAddr {
	return network.HardwareAddr(n.Place.Name, bridge)
}

// connectCalico connects a pod by routes, as Calico's plugin and Felix do.
func (h *Host) connectCalico(ns *network.Namespace, p network.Pod, veth, eth0 netlink.Link) error {
	if err := h.ns.Do(func() error {
		// As Felix does. The delay is for networks in which several hosts may answer; here only one does.
		return network.Sysctl("net/ipv4/conf/"+p.Veth+"/proxy_arp=1", "net/ipv4/neigh/"+p.Veth+"/proxy_delay=0")
	}); err != nil {
		return err
	}
	for _, a := range []netip.Addr{p.Place.IPv4, p.Place.IPv6} {
		one := netip.PrefixFrom(a, a.BitLen())
		if err := errors.Join(ns.AddAddress(eth0, one), h.ns.LinkRoute(veth, one)); err != nil {
			return err
		}
	}
	if err := ns.LinkRoute(eth0, netip.PrefixFrom(calicoGateway4, 32)); err != nil {
		return err
	}
	return errors.Join(
		h.defaultRoutes(ns, eth0, calicoGateway4, calicoGateway6),
		h.ns.Settle(p.Veth),
		h.ns.AwaitSolicited(p.Veth, calicoGateway6),
		ns.AwaitSolicited(network.NIC, p.Place.IPv6),
	)
}
