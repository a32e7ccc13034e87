//go:build linux

package bpf

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"github.com/cilium/ebpf"
)

// Pods are the programs that carry the packets of one node's pods past its
// routing and netfilter, and what they know: the pods of the node, and which
// addresses are whose of the other nodes. pods.c says where each program belongs;
// the caller attaches them. Attached programs outlive Close.
type Pods struct {
	// RouteOut and TunnelOut are for the ingress of a pod's veth on its node.
	RouteOut, TunnelOut *ebpf.Program
	// RouteIn is for the ingress of the NIC, TunnelIn for that of the VXLAN device.
	RouteIn, TunnelIn *ebpf.Program
	// TunnelHost is for the egress of a device that the node's own packets to
	// pods of other nodes are routed to.
	TunnelHost *ebpf.Program

	objects podsObjects
}

// LoadPods loads them. The VXLAN device and its network identifier matter only to
// those of the tunnel.
func LoadPods(tunnel, vni int) (*Pods, error) {
	spec, err := loadPods()
	if err != nil {
		return nil, err
	}
	for variable, value := range map[string]int{podsVarTunnel: tunnel, podsVarVni: vni} {
		if err := spec.Variables[variable].Set(uint32(value)); err != nil {
			return nil, fmt.Errorf("set %s of the pods' programs: %w", variable, err)
		}
	}
	p := new(Pods)
	if err := spec.LoadAndAssign(&p.objects, nil); err != nil {
		return nil, fmt.Errorf("load the pods' programs: %w", err)
	}
	o := &p.objects
	p.RouteOut, p.RouteIn = o.RouteOut, o.RouteIn
	p.TunnelOut, p.TunnelIn, p.TunnelHost = o.TunnelOut, o.TunnelIn, o.TunnelHost
	return p, nil
}

// AddPod tells of an address of a pod of this node: the index of the node's end of
// its link, and the Ethernet addresses of both ends.
func (p *Pods) AddPod(a netip.Addr, veth int, mac, vethMAC net.HardwareAddr) error {
	pod := podsPod{Veth: uint32(veth)}
	copy(pod.Mac[:], mac)
	copy(pod.VethMac[:], vethMAC)
	if err := p.objects.podsMaps.Pods.Put(a.As16(), pod); err != nil {
		return fmt.Errorf("add pod %s: %w", a, err)
	}
	return nil
}

// AddNode tells whose addresses are which node's, which has an IPv4 address; this
// node's own are those of 0.0.0.0.
func (p *Pods) AddNode(addresses netip.Prefix, node netip.Addr) error {
	key := struct {
		Bits    uint32
		Address [16]byte
	}{uint32(128 - addresses.Addr().BitLen() + addresses.Bits()), addresses.Addr().As16()}
	raw := node.As4()
	if err := p.objects.Nodes.Put(key, binary.BigEndian.Uint32(raw[:])); err != nil {
		return fmt.Errorf("add addresses %s of node %s: %w", addresses, node, err)
	}
	return nil
}

// Close lets go of programs and maps.
func (p *Pods) Close() error { return p.objects.Close() }
