//go:build linux

package programs

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"github.com/cilium/ebpf"
)

// HostRouting holds the programs that carry packets of one node's pods past its routing and netfilter, and their maps: the pods
// of the node, and the pod prefixes of all nodes. hostrouting.c says where the caller attaches each program. Attached programs
// outlive Close.
type HostRouting struct {
	// RouteOut and TunnelOut belong on the ingress of a pod's veth on its node.
	RouteOut, TunnelOut *ebpf.Program
	// RouteIn belongs on the ingress of the NIC, TunnelIn on that of the VXLAN device.
	RouteIn, TunnelIn *ebpf.Program
	// TunnelHost belongs on the egress of the device to which the node routes its own
	// packets to pods of other nodes.
	TunnelHost *ebpf.Program

	objects hostroutingObjects
}

// LoadHostRouting loads the programs. tunnel, the index of the VXLAN device, and vni are for the tunnel programs only.
func LoadHostRouting(tunnel, vni int) (*HostRouting, error) {
	spec, err := loadHostrouting()
	if err != nil {
		return nil, err
	}
	for variable, value := range map[string]int{hostroutingVarTunnel: tunnel, hostroutingVarVni: vni} {
		if err := spec.Variables[variable].Set(uint32(value)); err != nil {
			return nil, fmt.Errorf("set %s of the host routing programs: %w", variable, err)
		}
	}
	p := new(HostRouting)
	if err := spec.LoadAndAssign(&p.objects, nil); err != nil {
		return nil, fmt.Errorf("load the host routing programs: %w", err)
	}
	o := &p.objects
	p.RouteOut, p.RouteIn = o.RouteOut, o.RouteIn
	p.TunnelOut, p.TunnelIn, p.TunnelHost = o.TunnelOut, o.TunnelIn, o.TunnelHost
	return p, nil
}

// AddPod adds an address of a pod of this node, with the index of its veth on the node, and the MAC addresses of both ends of
// the veth pair.
func (p *HostRouting) AddPod(a netip.Addr, veth int, mac, vethMAC net.HardwareAddr) error {
	pod := hostroutingPod{Veth: uint32(veth)}
	copy(pod.Mac[:], mac)
	copy(pod.VethMac[:], vethMAC)
	if err := p.objects.hostroutingMaps.Pods.Put(a.As16(), pod); err != nil {
		return fmt.Errorf("add pod %s: %w", a, err)
	}
	return nil
}

// AddNode adds a pod prefix of the node with this IPv4 address; 0.0.0.0 is this node.
func (p *HostRouting) AddNode(addresses netip.Prefix, node netip.Addr) error {
	raw := node.As4()
	if err := p.objects.Nodes.Put(prefixOf(addresses), binary.BigEndian.Uint32(raw[:])); err != nil {
		return fmt.Errorf("add addresses %s of node %s: %w", addresses, node, err)
	}
	return nil
}

// prefix is a prefix as the programs expect it, with IPv4 mapped into IPv6.
type prefix struct {
	Bits    uint32
	Address [16]byte
}

func prefixOf(p netip.Prefix) prefix {
	return prefix{uint32(128 - p.Addr().BitLen() + p.Bits()), p.Addr().As16()}
}

// Close closes programs and maps.
func (p *HostRouting) Close() error { return p.objects.Close() }
