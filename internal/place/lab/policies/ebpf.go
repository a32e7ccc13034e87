//go:build linux

package policies

import (
	"fmt"

	"github.com/cilium/ebpf"

	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/programs"
)

// attach applies the policies to the ith node with eBPF programs, in the thread's network namespace. All pods of the lab have
// the identity of the last policy.
func (c *Config) attach(ns *network.Namespace, nodes []network.Node, i int, bypassed bool) error {
	addresses, allowed := 0, len(nodes[i].Pods)*c.Count
	for ip := range versions {
		for _, q := range c.policies(nodes, ip) {
			addresses += len(q.peers)
		}
	}
	loaded, err := programs.LoadPolicies(max(1, addresses), max(1, allowed))
	if err != nil {
		return err
	}
	defer loaded.Close() // the devices hold the attached programs
	for ip := range versions {
		for identity, q := range c.policies(nodes, ip) {
			for _, a := range q.peers {
				if err := loaded.Identify(a, uint32(identity)); err != nil {
					return err
				}
			}
		}
		for number, p := range podsOf(nodes[i], ip) {
			for identity := range c.Count {
				if err := loaded.Allow(uint32(number), uint32(identity)); err != nil {
					return err
				}
			}
			for _, a := range p.addresses {
				if err := loaded.AddPod(uint32(number), a); err != nil {
					return err
				}
			}
		}
	}
	return c.attachDevices(ns, loaded, nodes[i], bypassed)
}

// attachDevices attaches the programs to the pods' veths. If packets to pods bypass these, it attaches their program to the
// NIC.
func (c *Config) attachDevices(ns *network.Namespace, loaded *programs.Policies, n network.Node, bypassed bool) error {
	for _, p := range n.Pods {
		veth, err := ns.Netlink.LinkByName(p.Veth)
		if err != nil {
			return fmt.Errorf("find %s: %w", p.Veth, err)
		}
		if err := loaded.AttachFromPod(veth.Attrs().Index); err != nil {
			return err
		}
		if bypassed {
			continue
		}
		if err := loaded.AttachToPod(veth.Attrs().Index, ebpf.AttachTCXEgress); err != nil {
			return err
		}
	}
	if !bypassed {
		return nil
	}
	nic, err := ns.Netlink.LinkByName(network.NIC)
	if err != nil {
		return fmt.Errorf("find NIC: %w", err)
	}
	return loaded.AttachToPod(nic.Attrs().Index, ebpf.AttachTCXIngress)
}
