//go:build linux

// Package network has what a lab and its sub-packages share: descriptions of nodes and pods, network namespaces by name, and
// what netlink configures in them. It knows neither the shape of a pod network nor which nodes and pods there are.
package network

import (
	"crypto/sha1"
	"net"
	"net/netip"
	"os/exec"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/spec"
)

// NIC is the name of a node's NIC, and of a pod's device.
const NIC = "eth0"

// The addresses of the pods of every lab: the range of flannel's documentation, and unique local addresses. Network namespaces
// separate them from the machine's own.
var (
	Cluster4 = netip.MustParsePrefix("10.244.0.0/16")
	Cluster6 = netip.MustParsePrefix("fd73:6c69:7001::/48")
)

// Node describes a node.
type Node struct {
	Place place.Place
	// NS is the name of its network namespace, Port its port at the switch.
	NS, Port string
	// Rate is the rate of its NIC.
	Rate spec.BitRate
	// MAC is the MAC address of its NIC, VTEP4 and VTEP6 are those of its VXLAN devices.
	MAC, VTEP4, VTEP6 net.HardwareAddr
	// Pods4 and Pods6 are the prefixes of its pods. Their first address is the node's own on the overlay, the second one the
	// gateway of a bridge.
	Pods4, Pods6 netip.Prefix
	// Cluster4 is the prefix of the pods of all nodes.
	Cluster4 netip.Prefix
	Pods     []Pod
}

// Pod describes a pod.
type Pod struct {
	Place place.Place
	// NS is the name of its network namespace, Veth the node's end of its veth pair.
	NS, Veth string
	MAC      net.HardwareAddr
	// Backends are further addresses of the pod, by IP version.
	Backends map[int]netip.Prefix
}

// Processes starts the processes that belong to a lab, and watches them.
type Processes interface {
	// Start starts a command on a node.
	Start(node int, cmd *exec.Cmd) error
	// Watch calls wait in the background. When wait returns because the process has ended, Watch passes its error to tell,
	// unless the lab is being removed.
	Watch(wait func() error, tell func(error))
}

// HardwareAddr returns a locally administered unicast address. It is the same in every lab, so that nodes know each other's
// addresses in advance.
func HardwareAddr(place, device string) net.HardwareAddr {
	sum := sha1.Sum([]byte(place + " " + device))
	return append(net.HardwareAddr{0x02}, sum[:5]...)
}

// Plus returns the nth address after a.
func Plus(a netip.Addr, n int) netip.Addr {
	raw := a.AsSlice()
	for i := len(raw) - 1; i >= 0 && n > 0; i-- {
		n += int(raw[i])
		raw[i] = byte(n)
		n >>= 8
	}
	a, _ = netip.AddrFromSlice(raw) // its length is valid
	return a
}
