//go:build linux

package lab

import (
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/target"
)

// The addresses of every lab; its namespaces separate them from the machine's. Nodes are in the range
// that RFC 2544 reserves for benchmarks, pods in the one of flannel's documentation. IPv6 addresses are
// unique local ones.
var (
	nodes4   = netip.MustParsePrefix("198.18.0.0/24")
	nodes6   = netip.MustParsePrefix("fd73:6c69:7000::/64")
	cluster4 = netip.MustParsePrefix("10.244.0.0/16")
	cluster6 = netip.MustParsePrefix("fd73:6c69:7001::/48")
)

// node describes a node.
type node struct {
	place target.Place
	// ns is its namespace, port its port of the switch.
	ns, port string
	// rate of its NIC.
	rate v1alpha1.BitRate
	// mac of its NIC, vtep4 and vtep6 of its VXLAN devices.
	mac, vtep4, vtep6 net.HardwareAddr
	// pods4 and pods6 are the prefixes of its pods. The first address is the node's own on the overlay,
	// the second the gateway of a bridge.
	pods4, pods6 netip.Prefix
	// cluster4 is the prefix of the pods of all nodes.
	cluster4 netip.Prefix
	pods     []pod
}

// pod describes a pod.
type pod struct {
	place target.Place
	// ns is its namespace, veth the node's end of its link.
	ns, veth string
	mac      net.HardwareAddr
	// backends are further addresses of the pod, by IP version.
	backends map[int]netip.Prefix
}

// switchNS is the namespace of the switch that joins the nodes of a lab.
func switchNS(lab string) string { return "slip-" + lab + "-sw" }

// layout describes the nodes of a lab. It depends on the configuration alone, so the names of everything
// in a lab follow from its state.
func layout(c Config) []node {
	nodes := make([]node, c.Nodes)
	for i := range nodes {
		name := fmt.Sprintf("node%d", i)
		n := node{
			place: target.Place{
				Name: name, Kind: target.Node, Node: name,
				IPv4: nth(nodes4, i+1), IPv6: nth(nodes6, i+1),
			},
			ns:    fmt.Sprintf("slip-%s-n%d", c.Name, i),
			port:  name,
			rate:  c.NIC.Rate,
			mac:   hardwareAddr(name, "eth0"),
			vtep4: hardwareAddr(name, "vtep4"),
			vtep6: hardwareAddr(name, "vtep6"),
			pods4: subnet(cluster4, 24, i),
			pods6: subnet(cluster6, 64, i),

			cluster4: cluster4,
		}
		if c.Services != nil {
			n.pods4, n.cluster4 = servedPods(i), servedCluster4
		}
		for j := range c.Pods {
			name := fmt.Sprintf("%s/pod%d", n.place.Name, j)
			n.pods = append(n.pods, pod{
				place: target.Place{
					Name: name, Kind: target.Pod, Node: n.place.Name,
					IPv4: nth(n.pods4, j+2), IPv6: nth(n.pods6, j+2),
				},
				ns:   fmt.Sprintf("%sp%d", n.ns, j),
				veth: vethName(c.Shape, name),
				mac:  hardwareAddr(name, "eth0"),
			})
		}
		nodes[i] = n
	}
	if c.Services != nil {
		c.Services.serve(nodes)
	}
	if c.Balancer != nil {
		c.Balancer.seat(nodes)
	}
	for i := range nodes {
		bits, _ := nodes[i].rate.BitsPerSecond() // checked with the configuration
		nodes[i].place.NICRate = bits
	}
	return nodes
}

// vethName names the node's end of a pod's veth as the product would.
func vethName(shape, pod string) string {
	sum := sha1.Sum([]byte(pod))
	digits := hex.EncodeToString(sum[:])
	switch shape {
	case v1alpha1.ShapeCalico:
		return "cali" + digits[:11] // libcalico-go, VethNameForWorkload
	case ShapeVXLANFlow, ShapeEBPF:
		return "lxc" + digits[:12] // cilium, Endpoint2IfName in pkg/endpoint/connector
	}
	return "veth" + digits[:8] // containernetworking/plugins, RandomVethName
}

// hardwareAddr returns a locally administered unicast address. It is the same in every lab, so that nodes
// know each other's before they exist.
func hardwareAddr(place, device string) net.HardwareAddr {
	sum := sha1.Sum([]byte(place + " " + device))
	return append(net.HardwareAddr{0x02}, sum[:5]...)
}

// nth returns the nth address of a prefix; n is at most 255, and the prefix at least as wide.
func nth(p netip.Prefix, n int) netip.Addr {
	raw := p.Addr().AsSlice()
	raw[len(raw)-1] += byte(n)
	a, _ := netip.AddrFromSlice(raw) // of a length that it just had
	return a
}

// subnet returns the nth prefix of that many bits in a prefix. Both end at a byte, and n is at most 255.
func subnet(p netip.Prefix, bits, n int) netip.Prefix {
	raw := p.Addr().AsSlice()
	raw[bits/8-1] += byte(n)
	a, _ := netip.AddrFromSlice(raw)
	return netip.PrefixFrom(a, bits)
}

// namespaces of a lab in the order in which to remove them: pods, nodes, switch.
func namespaces(c Config) []string {
	var pods, nodes []string
	for _, n := range layout(c) {
		nodes = append(nodes, n.ns)
		for _, p := range n.pods {
			pods = append(pods, p.ns)
		}
	}
	return append(append(pods, nodes...), switchNS(c.Name))
}
