//go:build linux

package lab

import (
	"fmt"
	"net/netip"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/overlay"
)

// The addresses of the nodes of every lab: from the range that RFC 2544 reserves for benchmarks, and unique local addresses.
var (
	nodes4 = netip.MustParsePrefix("198.18.0.0/24")
	nodes6 = netip.MustParsePrefix("fd73:6c69:7000::/64")
)

// switchNS returns the name of the network namespace of a lab's switch.
func switchNS(lab string) string { return "slip-" + lab + "-sw" }

// layout describes the nodes of a lab. It depends only on the configuration, so that the state of a lab determines the names of
// everything in it.
func layout(c Config) []network.Node {
	nodes := make([]network.Node, c.Nodes)
	for i := range nodes {
		name := fmt.Sprintf("node%d", i)
		n := network.Node{
			Place: place.Place{
				Name: name, Kind: place.Node, Node: name,
				IPv4: network.Plus(nodes4.Addr(), i+1), IPv6: network.Plus(nodes6.Addr(), i+1),
			},
			NS:    fmt.Sprintf("slip-%s-n%d", c.Name, i),
			Port:  name,
			Rate:  c.NIC.Rate,
			MAC:   network.HardwareAddr(name, "eth0"),
			VTEP4: network.HardwareAddr(name, "vtep4"),
			VTEP6: network.HardwareAddr(name, "vtep6"),
			Pods4: subnet(network.Cluster4, 24, i),
			Pods6: subnet(network.Cluster6, 64, i),

			Cluster4: network.Cluster4,
		}
		if c.Services != nil {
			n.Pods4, n.Cluster4 = c.Services.Prefixes(i)
		}
		for j := range c.Pods {
			name := fmt.Sprintf("%s/pod%d", n.Place.Name, j)
			n.Pods = append(n.Pods, network.Pod{
				Place: place.Place{
					Name: name, Kind: place.Pod, Node: n.Place.Name,
					IPv4: network.Plus(n.Pods4.Addr(), j+2), IPv6: network.Plus(n.Pods6.Addr(), j+2),
				},
				NS:   fmt.Sprintf("%sp%d", n.NS, j),
				Veth: overlay.VethName(c.Shape, name),
				MAC:  network.HardwareAddr(name, "eth0"),
			})
		}
		nodes[i] = n
	}
	if c.Services != nil {
		c.Services.Assign(nodes)
	}
	if c.Balancer != nil {
		c.Balancer.Assign(nodes)
	}
	for i := range nodes {
		bits, _ := nodes[i].Rate.BitsPerSecond() // validate has checked it
		nodes[i].Place.NICRate = bits
	}
	return nodes
}

// subnet returns the nth subnet of p with a prefix length of bits. Both prefix lengths are multiples of 8, and n is at most
// 255.
func subnet(p netip.Prefix, bits, n int) netip.Prefix {
	raw := p.Addr().AsSlice()
	raw[bits/8-1] += byte(n)
	a, _ := netip.AddrFromSlice(raw)
	return netip.PrefixFrom(a, bits)
}

// namespaces returns the names of a lab's network namespaces in the order of removal: pods, nodes, switch.
func namespaces(c Config) []string {
	var pods, nodes []string
	for _, n := range layout(c) {
		nodes = append(nodes, n.NS)
		for _, p := range n.Pods {
			pods = append(pods, p.NS)
		}
	}
	return append(append(pods, nodes...), switchNS(c.Name))
}
