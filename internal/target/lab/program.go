//go:build linux

package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/target/lab/programs"
)

// The devices of a node with Cilium, with its names (pkg/defaults/node.go). cilium_host has the node's
// address in the pod prefix, which is the pods' gateway; cilium_net is its peer.
const (
	ciliumHost  = "cilium_host"
	ciliumNet   = "cilium_net"
	ciliumVXLAN = "cilium_vxlan"
)

// Cilium's port, and the VNI, which is the number of the sender's security identity in Cilium: 2 is
// reserved:world (pkg/identity/numericidentity.go).
const (
	ciliumPort = 8472
	ciliumVNI  = 2
)

// makeDirect makes eBPF programs route between the pods of node i and its NIC. The kernel has the routes
// too: the programs look them up there, and pass other packets to the kernel.
func makeDirect(h *host, nodes []node, i int) error {
	if err := makeCiliumHost(h); err != nil {
		return err
	}
	if err := routes(h, nodes, i); err != nil {
		return err
	}
	if err := loadPrograms(h, nodes, i, 0); err != nil {
		return err
	}
	// The programs also route packets from pods to the other nodes. They route the packets from there, and
	// conntrack must see both directions of a connection or neither.
	for j, n := range nodes {
		if j == i {
			continue
		}
		for _, a := range []netip.Addr{n.place.IPv4, n.place.IPv6} {
			if err := h.programs.AddNode(netip.PrefixFrom(a, a.BitLen()), n.place.IPv4); err != nil {
				return err
			}
		}
	}
	eth0, err := h.nl.LinkByName(nicName)
	if err != nil {
		return fmt.Errorf("find NIC: %w", err)
	}
	return attach(h.namespace, eth0.Attrs().Index, netlink.HANDLE_MIN_INGRESS, h.programs.RouteIn, "route_in")
}

// makeFlowTunnel creates the external VXLAN device of node i, and eBPF programs that redirect packets
// between it and the pods. The tunnel is over IPv4, like Cilium's by default.
func makeFlowTunnel(h *host, c Config, nodes []node, i int) error {
	if err := makeCiliumHost(h); err != nil {
		return err
	}
	device := &netlink.Vxlan{LinkAttrs: linkAttrs(ciliumVXLAN), FlowBased: true, Port: ciliumPort}
	// Cilium leaves the NIC's MTU on its device and relies on the pods' routes. Here the program checks
	// whether a packet fits, and passes it to the kernel if not.
	device.MTU, _ = c.mtu()
	device.HardwareAddr = h.vtep4
	if err := h.nl.LinkAdd(device); err != nil {
		return fmt.Errorf("add %s: %w", ciliumVXLAN, err)
	}
	h.tunnelled = true
	if err := loadPrograms(h, nodes, i, device.Index); err != nil {
		return err
	}
	out, err := h.nl.LinkByName(ciliumHost)
	if err != nil {
		return fmt.Errorf("find %s: %w", ciliumHost, err)
	}
	for j, n := range nodes {
		if j == i {
			continue
		}
		for _, p := range []netip.Prefix{n.pods4, n.pods6} {
			if err := h.nl.RouteAdd(&netlink.Route{LinkIndex: out.Attrs().Index, Dst: ipNet(p), MTU: device.MTU, Scope: netlink.SCOPE_LINK}); err != nil {
				return fmt.Errorf("add route to pods of %s: %w", n.place.Name, err)
			}
		}
	}
	return errors.Join(
		attach(h.namespace, out.Attrs().Index, netlink.HANDLE_MIN_EGRESS, h.programs.TunnelHost, "tunnel_host"),
		attach(h.namespace, device.Index, netlink.HANDLE_MIN_INGRESS, h.programs.TunnelIn, "tunnel_in"),
		settle(h.namespace, ciliumVXLAN),
	)
}

// loadPrograms loads the programs of node i and the map of pod prefixes to nodes.
func loadPrograms(h *host, nodes []node, i, tunnel int) (err error) {
	if h.programs, err = programs.LoadHostRouting(tunnel, ciliumVNI); err != nil {
		return err
	}
	for j, n := range nodes {
		address := n.place.IPv4
		if j == i {
			address = netip.IPv4Unspecified()
		}
		for _, p := range []netip.Prefix{n.pods4, n.pods6} {
			if err := h.programs.AddNode(p, address); err != nil {
				return err
			}
		}
	}
	return nil
}

// makeCiliumHost creates the device that has the pods' gateway address.
func makeCiliumHost(h *host) error {
	// As Cilium's agent does (pkg/datapath/loader): the kernel's reverse path filter, even if loose, drops
	// everything from devices without addresses, such as Cilium's.
	if err := h.do(func() error {
		return sysctl("net/ipv4/conf/all/rp_filter=0", "net/ipv4/conf/default/rp_filter=0")
	}); err != nil {
		return err
	}
	veth := netlink.NewVeth(linkAttrs(ciliumHost))
	veth.PeerName = ciliumNet
	if err := h.nl.LinkAdd(veth); err != nil {
		return fmt.Errorf("add %s: %w", ciliumHost, err)
	}
	for _, name := range []string{ciliumHost, ciliumNet} {
		// No neighbour answers on these devices.
		if err := h.nl.LinkSetARPOff(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: name}}); err != nil {
			return fmt.Errorf("set ARP of %s off: %w", name, err)
		}
	}
	if err := setUp(h.namespace, ciliumNet); err != nil {
		return err
	}
	for _, p := range []netip.Prefix{h.pods4, h.pods6} {
		own := nth(p, 1)
		if err := errors.Join(addAddress(h.namespace, veth, netip.PrefixFrom(own, own.BitLen())), blackhole(h.namespace, p)); err != nil {
			return err
		}
	}
	return errors.Join(settle(h.namespace, ciliumHost, ciliumNet), awaitLocal(h.namespace, nth(h.pods6, 1)))
}

// programPod connects a pod whose packets eBPF forwards, as Cilium's plugin does. The kernel reaches each
// pod by a route, as with Cilium's endpoint routes. Cilium's program answers ARP requests for the gateway;
// here the neighbour entry is permanent.
func programPod(h *host, ns *namespace, c Config, p pod, veth *netlink.Veth, eth0 netlink.Link) error {
	gateway4, gateway6 := nth(h.pods4, 1), nth(h.pods6, 1)
	for _, a := range []struct{ pod, gateway netip.Addr }{{p.place.IPv4, gateway4}, {p.place.IPv6, gateway6}} {
		one := netip.PrefixFrom(a.pod, a.pod.BitLen())
		if err := errors.Join(
			addAddress(ns, eth0, one),
			linkRoute(ns, eth0, netip.PrefixFrom(a.gateway, a.gateway.BitLen())),
			neighbour(ns, eth0, a.gateway, veth.HardwareAddr),
			linkRoute(h.namespace, veth, one),
			neighbour(h.namespace, veth, a.pod, p.mac),
			h.programs.AddPod(a.pod, veth.Index, p.mac, veth.HardwareAddr),
		); err != nil {
			return err
		}
	}
	program, name := h.programs.RouteOut, "route_out"
	if h.tunnelled {
		program, name = h.programs.TunnelOut, "tunnel_out"
	}
	return errors.Join(
		defaultRoutes(ns, c, eth0, gateway4, gateway6),
		attach(h.namespace, veth.Index, netlink.HANDLE_MIN_INGRESS, program, name),
		settle(h.namespace, p.veth),
		settle(ns, nicName),
		awaitLocal(ns, p.place.IPv6),
	)
}

// linkRoute adds an on-link route.
func linkRoute(ns *namespace, link netlink.Link, to netip.Prefix) error {
	if err := ns.nl.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(to), Scope: netlink.SCOPE_LINK}); err != nil {
		return fmt.Errorf("add route to %s: %w", to, err)
	}
	return nil
}

// neighbour adds a permanent neighbour entry.
func neighbour(ns *namespace, link netlink.Link, a netip.Addr, mac net.HardwareAddr) error {
	if err := ns.nl.NeighSet(&netlink.Neigh{
		LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT, IP: a.AsSlice(), HardwareAddr: mac,
	}); err != nil {
		return fmt.Errorf("add neighbour %s: %w", a, err)
	}
	return nil
}

// probePrograms tests what the shapes of eBPF need.
func probePrograms(ns *namespace, c Config) error {
	if c.Shape == ShapeVXLANFlow {
		device := &netlink.Vxlan{LinkAttrs: linkAttrs("probe-flow"), FlowBased: true, Port: ciliumPort}
		if err := ns.nl.LinkAdd(device); err != nil && !errors.Is(err, unix.EEXIST) {
			return missing("VXLAN devices whose remote is the flow's", "CONFIG_VXLAN", "vxlan", err)
		}
	}
	p, err := programs.LoadHostRouting(0, 0)
	if err != nil {
		return fmt.Errorf("shape %s needs a kernel whose eBPF has bpf_redirect_peer, bpf_redirect_neigh and bpf_check_mtu (5.12 or later): %w", c.Shape, err)
	}
	return p.Close()
}
