//go:build linux

package overlay

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/programs"
)

// The names of Cilium's devices on a node (pkg/defaults/node.go). cilium_host has the node's address in the pod prefix, which
// is the pods' gateway; cilium_net is its peer.
const (
	ciliumHost  = "cilium_host"
	ciliumNet   = "cilium_net"
	ciliumVXLAN = "cilium_vxlan"
)

// Cilium's port and VNI. Cilium sets the VNI to the sender's security identity; 2 is reserved:world
// (pkg/identity/numericidentity.go).
const (
	ciliumPort = 8472
	ciliumVNI  = 2
)

// makeDirect makes eBPF programs route between the pods of a node and its NIC. The programs look up the kernel's routes, and
// leave other packets to the kernel.
func (h *Host) makeDirect() error {
	if err := h.makeCiliumHost(); err != nil {
		return err
	}
	if err := h.makeRoutes(); err != nil {
		return err
	}
	if err := h.loadPrograms(0); err != nil {
		return err
	}
	// The programs also route packets from pods to the other nodes themselves, because they route the replies: conntrack must
	// see both directions of a connection or neither.
	for _, n := range h.others {
		for _, a := range []netip.Addr{n.Place.IPv4, n.Place.IPv6} {
			if err := h.programs.AddNode(netip.PrefixFrom(a, a.BitLen()), n.Place.IPv4); err != nil {
				return err
			}
		}
	}
	eth0, err := h.ns.Netlink.LinkByName(network.NIC)
	if err != nil {
		return fmt.Errorf("find NIC: %w", err)
	}
	return h.ns.Attach(eth0.Attrs().Index, netlink.HANDLE_MIN_INGRESS, h.programs.RouteIn, "route_in")
}

// makeFlowTunnel creates a node's external VXLAN device, and eBPF programs that redirect packets between it and the pods. The
// tunnel uses IPv4, as Cilium's does by default.
func (h *Host) makeFlowTunnel() error {
	if err := h.makeCiliumHost(); err != nil {
		return err
	}
	device := &netlink.Vxlan{LinkAttrs: network.LinkAttrs(ciliumVXLAN), FlowBased: true, Port: ciliumPort}
	// Cilium's device keeps the MTU of the NIC, and Cilium relies on the pods' routes. Here the program checks whether a packet
	// fits, and leaves a larger one to the kernel.
	device.MTU, _ = h.overlay.mtu()
	device.HardwareAddr = h.node.VTEP4
	if err := h.ns.Netlink.LinkAdd(device); err != nil {
		return fmt.Errorf("add %s: %w", ciliumVXLAN, err)
	}
	h.tunnelled = true
	if err := h.loadPrograms(device.Index); err != nil {
		return err
	}
	out, err := h.ns.Netlink.LinkByName(ciliumHost)
	if err != nil {
		return fmt.Errorf("find %s: %w", ciliumHost, err)
	}
	for _, n := range h.others {
		for _, p := range []netip.Prefix{n.Pods4, n.Pods6} {
			if err := h.ns.Netlink.RouteAdd(&netlink.Route{LinkIndex: out.Attrs().Index, Dst: network.IPNet(p), MTU: device.MTU, Scope: netlink.SCOPE_LINK}); err != nil {
				return fmt.Errorf("add route to pods of %s: %w", n.Place.Name, err)
			}
		}
	}
	return errors.Join(
		h.ns.Attach(out.Attrs().Index, netlink.HANDLE_MIN_EGRESS, h.programs.TunnelHost, "tunnel_host"),
		h.ns.Attach(device.Index, netlink.HANDLE_MIN_INGRESS, h.programs.TunnelIn, "tunnel_in"),
		h.ns.Settle(ciliumVXLAN),
	)
}

// loadPrograms loads the programs of a node, and fills the map from pod prefixes to nodes.
func (h *Host) loadPrograms(tunnel int) (err error) {
	if h.programs, err = programs.LoadHostRouting(tunnel, ciliumVNI); err != nil {
		return err
	}
	for i, n := range h.overlay.Nodes {
		address := n.Place.IPv4
		if i == h.index {
			address = netip.IPv4Unspecified()
		}
		for _, p := range []netip.Prefix{n.Pods4, n.Pods6} {
			if err := h.programs.AddNode(p, address); err != nil {
				return err
			}
		}
	}
	return nil
}

// makeCiliumHost creates the device with the pods' gateway address.
func (h *Host) makeCiliumHost() error {
	// As Cilium's agent does (pkg/datapath/loader): even a loose reverse path filter drops everything from devices without
	// addresses, such as Cilium's.
	if err := h.ns.Do(func() error {
		return network.Sysctl("net/ipv4/conf/all/rp_filter=0", "net/ipv4/conf/default/rp_filter=0")
	}); err != nil {
		return err
	}
	veth := netlink.NewVeth(network.LinkAttrs(ciliumHost))
	veth.PeerName = ciliumNet
	if err := h.ns.Netlink.LinkAdd(veth); err != nil {
		return fmt.Errorf("add %s: %w", ciliumHost, err)
	}
	for _, name := range []string{ciliumHost, ciliumNet} {
		// No neighbour answers on these devices.
		if err := h.ns.Netlink.LinkSetARPOff(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: name}}); err != nil {
			return fmt.Errorf("set ARP of %s off: %w", name, err)
		}
	}
	if err := h.ns.SetUp(ciliumNet); err != nil {
		return err
	}
	for _, p := range []netip.Prefix{h.node.Pods4, h.node.Pods6} {
		own := network.Plus(p.Addr(), 1)
		if err := errors.Join(h.ns.AddAddress(veth, netip.PrefixFrom(own, own.BitLen())), blackhole(h.ns, p)); err != nil {
			return err
		}
	}
	return errors.Join(h.ns.Settle(ciliumHost, ciliumNet), h.ns.AwaitLocal(network.Plus(h.node.Pods6.Addr(), 1)))
}

// connectPrograms connects a pod whose packets eBPF forwards, as Cilium's plugin does. The kernel has a route to each pod, as
// with Cilium's endpoint routes. The pod has a permanent neighbour entry for the gateway; with Cilium, a program answers its
// ARP requests.
func (h *Host) connectPrograms(ns *network.Namespace, p network.Pod, veth *netlink.Veth, eth0 netlink.Link) error {
	gateway4, gateway6 := network.Plus(h.node.Pods4.Addr(), 1), network.Plus(h.node.Pods6.Addr(), 1)
	for _, a := range []struct{ pod, gateway netip.Addr }{{p.Place.IPv4, gateway4}, {p.Place.IPv6, gateway6}} {
		one := netip.PrefixFrom(a.pod, a.pod.BitLen())
		if err := errors.Join(
			ns.AddAddress(eth0, one),
			ns.LinkRoute(eth0, netip.PrefixFrom(a.gateway, a.gateway.BitLen())),
			ns.Neighbour(eth0, a.gateway, veth.HardwareAddr),
			h.ns.LinkRoute(veth, one),
			h.ns.Neighbour(veth, a.pod, p.MAC),
			h.programs.AddPod(a.pod, veth.Index, p.MAC, veth.HardwareAddr),
		); err != nil {
			return err
		}
	}
	program, name := h.programs.RouteOut, "route_out"
	if h.tunnelled {
		program, name = h.programs.TunnelOut, "tunnel_out"
	}
	return errors.Join(
		h.defaultRoutes(ns, eth0, gateway4, gateway6),
		h.ns.Attach(veth.Index, netlink.HANDLE_MIN_INGRESS, program, name),
		h.ns.Settle(p.Veth),
		ns.Settle(network.NIC),
		ns.AwaitLocal(p.Place.IPv6),
	)
}

// probePrograms tests whether the kernel supports the shapes with eBPF programs.
func probePrograms(ns *network.Namespace, shape string) error {
	if shape == ShapeVXLANFlow {
		device := &netlink.Vxlan{LinkAttrs: network.LinkAttrs("probe-flow"), FlowBased: true, Port: ciliumPort}
		if err := ns.Netlink.LinkAdd(device); err != nil && !errors.Is(err, unix.EEXIST) {
			return network.Missing("VXLAN devices whose remote is the flow's", "CONFIG_VXLAN", "vxlan", err)
		}
	}
	p, err := programs.LoadHostRouting(0, 0)
	if err != nil {
		return fmt.Errorf("shape %s needs a kernel whose eBPF has bpf_redirect_peer, bpf_redirect_neigh and bpf_check_mtu (5.12 or later): %w", shape, err)
	}
	return p.Close()
}
