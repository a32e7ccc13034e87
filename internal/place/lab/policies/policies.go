//go:build linux

// Package policies applies network policies to the packets to a lab's pods. It loads rules as Calico writes them for iptables,
// with or without ipset, and for nftables (rules.go), or eBPF programs like Cilium's (ebpf.go).
//
// Every policy selects every pod. The last one allows all pods of the lab and the addresses of backends; the others allow
// addresses that nobody has. Packets of established connections are accepted before the policies. Packets that no policy allows
// are dropped after them.
package policies

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/spec"
)

// Config describes the network policies of a lab.
type Config struct {
	// Mode is one of the API's.
	Mode string `json:"mode"`
	// Count is the number of policies.
	Count int `json:"count"`
}

// peers is the number of addresses that a policy allows.
const peers = 10

// foreignPrefixes are addresses that no lab has, for the policies that allow nobody: those of RFC 6598, and unique local
// addresses.
var foreignPrefixes = map[int]netip.Prefix{4: netip.MustParsePrefix("100.64.0.0/10"), 6: netip.MustParsePrefix("fd73:6c69:70ff::/64")}

// Tool names the program that loads the rules.
func (c *Config) Tool() string {
	if c.Mode == spec.PolicyIPSet {
		return spec.PolicyIPTables
	}
	return c.Mode
}

// Validate checks the configuration for a lab of a shape. bypassed means that its packets bypass netfilter.
func (c *Config) Validate(shape string, bypassed bool) error {
	modes := []string{spec.PolicyIPTables, spec.PolicyIPSet, spec.PolicyNFTables, spec.PolicyEBPF}
	switch {
	case !slices.Contains(modes, c.Mode):
		return fmt.Errorf("mode must be one of %s, is %q", strings.Join(modes, ", "), c.Mode)
	case c.Count < 1:
		return fmt.Errorf("count must be at least 1, is %d", c.Count)
	case bypassed && c.Mode != spec.PolicyEBPF:
		return fmt.Errorf("mode must be %s in shape %s, whose packets bypass netfilter, is %s", spec.PolicyEBPF, shape, c.Mode)
	}
	return nil
}

// policy is one policy for one IP version.
type policy struct {
	name  string
	peers []netip.Prefix
}

// pod is a pod that policies select, with its addresses of one IP version.
type pod struct {
	name      string
	veth      string
	addresses []netip.Prefix
}

// policies returns all policies for an IP version.
func (c *Config) policies(nodes []network.Node, ip int) []policy {
	all := make([]policy, c.Count)
	for i := range all {
		all[i].name = fmt.Sprintf("policy-%d", i)
		for j := range peers {
			a := network.Plus(foreignPrefixes[ip].Addr(), 1+i*peers+j)
			all[i].peers = append(all[i].peers, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	last := &all[c.Count-1]
	last.peers = nil
	for _, n := range nodes {
		for _, p := range podsOf(n, ip) {
			last.peers = append(last.peers, p.addresses...)
		}
	}
	return all
}

func podsOf(n network.Node, ip int) (all []pod) {
	for i, p := range n.Pods {
		a := p.Place.IP(ip)
		one := pod{name: fmt.Sprintf("pod-%d", i), veth: p.Veth, addresses: []netip.Prefix{netip.PrefixFrom(a, a.BitLen())}}
		if backends, ok := p.Backends[ip]; ok {
			one.addresses = append(one.addresses, backends)
		}
		all = append(all, one)
	}
	return all
}

// Load applies the policies to the ith node, whose pods exist. bypassed means that packets bypass the veths of its pods. Load
// returns how long that took, and the version of the program that loaded the rules, if there was one.
func (c *Config) Load(ctx context.Context, ns *network.Namespace, nodes []network.Node, i int, bypassed bool) (took time.Duration, version string, err error) {
	begin := time.Now()
	if c.Mode == spec.PolicyEBPF {
		err := ns.Do(func() error { return c.attach(ns, nodes, i, bypassed) })
		return time.Since(begin), "", err
	}
	rules := c.rules(nodes, i)
	if version, err = rules.Version(ctx); err != nil {
		return 0, "", err
	}
	begin = time.Now()
	if c.Mode == spec.PolicyIPSet {
		if err := ns.Do(func() error { return c.makeSets(nodes) }); err != nil {
			return 0, "", err
		}
	}
	if _, err := rules.Load(ctx, ns); err != nil {
		return 0, "", err
	}
	return time.Since(begin), version, nil
}

// makeSets creates the ipsets in the thread's network namespace.
func (c *Config) makeSets(nodes []network.Node) error {
	h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("open netlink for ipset: %w", err)
	}
	defer h.Close()
	for ip, v := range versions {
		for _, p := range c.policies(nodes, ip) {
			name := v.set(p)
			if err := h.IpsetCreate(name, "hash:net", netlink.IpsetCreateOptions{Family: v.family, Revision: setRevision}); err != nil {
				return missingIPSet(fmt.Errorf("create set %s: %w", name, err))
			}
			for _, a := range p.peers {
				if err := h.IpsetAdd(name, &netlink.IPSetEntry{IP: a.Addr().AsSlice(), CIDR: uint8(a.Bits())}); err != nil {
					return fmt.Errorf("add %s to set %s: %w", a, name, err)
				}
			}
		}
	}
	return nil
}

// setRevision is the oldest revision of hash:net that supports IPv6 prefixes of all lengths.
const setRevision = 1

// missingIPSet adds what to do if the kernel has no ipset.
func missingIPSet(err error) error {
	return network.Missing("ipset", "CONFIG_IP_SET_HASH_NET and CONFIG_NETFILTER_XT_SET", "ip_set_hash_net xt_set", err)
}

// Probe tests in a temporary namespace, that of the thread, whether the machine supports the policies.
func (c *Config) Probe(ns *network.Namespace) error {
	what := "network policies in mode " + c.Mode
	few := Config{Mode: c.Mode, Count: 1}
	nodes := []network.Node{{Pods: []network.Pod{{Veth: "probe-policy"}}}}
	place := &nodes[0].Pods[0].Place
	place.IPv4, place.IPv6 = network.Cluster4.Addr().Next(), network.Cluster6.Addr().Next()
	switch c.Mode {
	case spec.PolicyEBPF:
		veth := netlink.NewVeth(network.LinkAttrs("probe-policy"))
		veth.PeerName = "probe-policed"
		if err := ns.Netlink.LinkAdd(veth); err != nil {
			return fmt.Errorf("add a veth to try eBPF programs on: %w", err)
		}
		if err := few.attach(ns, nodes, 0, false); err != nil {
			return fmt.Errorf("%s need a kernel with eBPF programs at tcx (6.6 or later): %w", what, err)
		}
		return nil
	case spec.PolicyIPSet:
		if err := few.makeSets(nodes); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	err := few.rules(nodes, 0).Probe(ns, what, map[string]string{"iptables-restore": "iptables", "ip6tables-restore": "iptables", "nft": "nftables"})
	if err != nil && c.Mode == spec.PolicyIPSet {
		// The reason may be that iptables lacks the match.
		return errors.Join(err, errors.New("the kernel needs CONFIG_NETFILTER_XT_SET for it (modprobe xt_set)"))
	}
	return err
}
