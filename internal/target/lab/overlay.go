//go:build linux

package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
)

// What VXLAN adds to a packet: an Ethernet header of 14 bytes, 8 of VXLAN and 8
// of UDP, and 20 or 40 of IP (RFC 7348, section 5).
const (
	overhead4 = 50
	overhead6 = 70
)

// vxlan is what differs between the products.
type vxlan struct {
	device4, device6 string
	vni, port        int
}

var products = map[string]vxlan{
	v1alpha1.ShapeFlannel: {device4: "flannel.1", device6: "flannel-v6.1", vni: 1, port: 8472},
	v1alpha1.ShapeCalico:  {device4: "vxlan.calico", device6: "vxlan-v6.calico", vni: 4096, port: 4789},
}

// Calico gives the node's end of every pod's veth the same MAC address, and so the same link-local
// address, which is the pods' IPv6 gateway. No device has the IPv4 gateway; proxy ARP answers for it.
var (
	calicoMAC      = net.HardwareAddr{0xee, 0xee, 0xee, 0xee, 0xee, 0xee}
	calicoGateway6 = netip.MustParseAddr("fe80::ecee:eeff:feee:eeee")
	calicoGateway4 = netip.MustParseAddr("169.254.1.1")
)

const bridgeName = "cni0"

// prepareNode sets up a node's namespace like an operating system and kubelet.
func prepareNode(cc string, log *slog.Logger) error {
	congestionControl(cc, log)
	return errors.Join(
		sysctl(
			"net/ipv4/ip_forward=1",
			// systemd's default, on the nodes of most distributions.
			"net/ipv4/conf/all/rp_filter=2", "net/ipv4/conf/default/rp_filter=2",
			"net/ipv6/conf/all/forwarding=1",
		),
		noAddressDetection(),
		bridgeNetfilter(true),
	)
}

// preparePod sets up a pod's namespace.
func preparePod(cc string, log *slog.Logger) error {
	congestionControl(cc, log)
	return noAddressDetection()
}

// noAddressDetection disables duplicate address detection, which delays link-local addresses by a second
// or two.
func noAddressDetection() error {
	return sysctl("net/ipv6/conf/default/accept_dad=0", "net/ipv6/conf/default/accept_ra=0")
}

// bridgeNetfilter says whether bridged packets pass netfilter, as Kubernetes requires of its nodes. They
// do not on a kernel without br_netfilter.
func bridgeNetfilter(on bool) error {
	value := "0"
	if on {
		value = "1"
	}
	for _, family := range []string{"iptables", "ip6tables"} {
		err := sysctl("net/bridge/bridge-nf-call-" + family + "=" + value)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// makeTunnels creates the VXLAN devices of flannel or Calico on node i.
func makeTunnels(ns *namespace, c Config, nodes []node, i int) error {
	eth0, err := ns.nl.LinkByName(nicName)
	if err != nil {
		return fmt.Errorf("find NIC: %w", err)
	}
	for _, v := range tunnels(c, eth0.Attrs().Index, nodes[i]) {
		if err := ns.nl.LinkAdd(v.device); err != nil {
			return fmt.Errorf("add %s: %w", v.device.Name, err)
		}
		own := v.pods(nodes[i])
		if err := addAddress(ns, v.device, netip.PrefixFrom(own.Addr(), own.Addr().BitLen())); err != nil {
			return err
		}
		if c.Shape == v1alpha1.ShapeCalico {
			if err := blackhole(ns, own); err != nil {
				return err
			}
		}
		for j, remote := range nodes {
			if j == i {
				continue
			}
			if err := v.join(ns, remote); err != nil {
				return fmt.Errorf("join %s: %w", remote.place.Name, err)
			}
		}
	}
	return nil
}

// tunnel is the overlay of one IP version.
type tunnel struct {
	device *netlink.Vxlan
	// pods, vtep and nic of a node in that version.
	pods func(node) netip.Prefix
	vtep func(node) net.HardwareAddr
	nic  func(node) netip.Addr
}

func tunnels(c Config, nic int, n node) []tunnel {
	product := products[c.Shape]
	all := []tunnel{{
		device: &netlink.Vxlan{LinkAttrs: linkAttrs(product.device4)},
		pods:   func(n node) netip.Prefix { return n.pods4 },
		vtep:   func(n node) net.HardwareAddr { return n.vtep4 },
		nic:    func(n node) netip.Addr { return n.place.IPv4 },
	}, {
		device: &netlink.Vxlan{LinkAttrs: linkAttrs(product.device6)},
		pods:   func(n node) netip.Prefix { return n.pods6 },
		vtep:   func(n node) net.HardwareAddr { return n.vtep6 },
		nic:    func(n node) netip.Addr { return n.place.IPv6 },
	}}
	all[0].device.MTU, all[1].device.MTU = c.mtu()
	for _, t := range all {
		t.device.HardwareAddr = t.vtep(n)
		t.device.SrcAddr = t.nic(n).AsSlice()
		t.device.VtepDevIndex = nic
		t.device.VxlanId, t.device.Port = product.vni, product.port
	}
	return all
}

// join adds a remote node, as flanneld and Felix do: the FDB entry of its VXLAN device, the neighbour
// entry of its first address, and a route to its pods.
func (t tunnel) join(ns *namespace, remote node) error {
	index, pods := t.device.Index, t.pods(remote)
	if err := ns.nl.NeighSet(&netlink.Neigh{
		LinkIndex: index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF, State: netlink.NUD_PERMANENT,
		IP: t.nic(remote).AsSlice(), HardwareAddr: t.vtep(remote),
	}); err != nil {
		return fmt.Errorf("add forwarding entry: %w", err)
	}
	if err := ns.nl.NeighSet(&netlink.Neigh{
		LinkIndex: index, State: netlink.NUD_PERMANENT,
		IP: pods.Addr().AsSlice(), HardwareAddr: t.vtep(remote),
	}); err != nil {
		return fmt.Errorf("add neighbour: %w", err)
	}
	if err := ns.nl.RouteAdd(&netlink.Route{
		LinkIndex: index, Dst: ipNet(pods), Gw: pods.Addr().AsSlice(), Flags: int(netlink.FLAG_ONLINK),
	}); err != nil {
		return fmt.Errorf("add route: %w", err)
	}
	return nil
}

// makeBridge creates the bridge of the pods.
func makeBridge(ns *namespace, c Config, n node) error {
	bridge := &netlink.Bridge{LinkAttrs: linkAttrs(bridgeName)}
	bridge.MTU, _ = c.mtu()
	bridge.HardwareAddr = hardwareAddr(n.place.Name, bridgeName)
	if err := ns.nl.LinkAdd(bridge); err != nil {
		return fmt.Errorf("add bridge %s: %w", bridgeName, err)
	}
	return errors.Join(
		addAddress(ns, bridge, netip.PrefixFrom(nth(n.pods4, 1), n.pods4.Bits())),
		addAddress(ns, bridge, netip.PrefixFrom(nth(n.pods6, 1), n.pods6.Bits())),
	)
}

func calicoPod(host, ns *namespace, c Config, p pod, veth, eth0 netlink.Link) error {
	if err := host.do(func() error {
		// As Felix: the delay is for networks in which several hosts could answer; here one does.
		return sysctl("net/ipv4/conf/"+p.veth+"/proxy_arp=1", "net/ipv4/neigh/"+p.veth+"/proxy_delay=0")
	}); err != nil {
		return err
	}
	for _, a := range []netip.Addr{p.place.IPv4, p.place.IPv6} {
		one := netip.PrefixFrom(a, a.BitLen())
		if err := addAddress(ns, eth0, one); err != nil {
			return err
		}
		if err := host.nl.RouteAdd(&netlink.Route{LinkIndex: veth.Attrs().Index, Dst: ipNet(one), Scope: netlink.SCOPE_LINK}); err != nil {
			return fmt.Errorf("add route to %s: %w", a, err)
		}
	}
	if err := ns.nl.RouteAdd(&netlink.Route{
		LinkIndex: eth0.Attrs().Index, Scope: netlink.SCOPE_LINK,
		Dst: ipNet(netip.PrefixFrom(calicoGateway4, 32)),
	}); err != nil {
		return fmt.Errorf("add route to gateway: %w", err)
	}
	return errors.Join(
		defaultRoutes(ns, c, eth0, calicoGateway4, calicoGateway6),
		settle(host, p.veth),
		awaitSolicited(host, p.veth, calicoGateway6),
		awaitSolicited(ns, nicName, p.place.IPv6),
	)
}
