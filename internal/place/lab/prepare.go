//go:build linux

package lab

import (
	"errors"
	"io/fs"

	"slipstream.dev/internal/place/lab/network"
)

// prepareNode sets the sysctls of a node's namespace as an operating system and kubelet do.
func prepareNode() error {
	return errors.Join(
		network.Sysctl(
			"net/ipv4/ip_forward=1",
			// The default of systemd, and so of most distributions.
			"net/ipv4/conf/all/rp_filter=2", "net/ipv4/conf/default/rp_filter=2",
			"net/ipv6/conf/all/forwarding=1",
		),
		prepareIPv6(),
		bridgeNetfilter(true),
	)
}

// prepareIPv6 enables IPv6, which the machine may disable in new namespaces (ipv6.disable_ipv6=1, or the setting of its own with
// net.core.devconf_inherit_init_net). It disables duplicate address detection, which would delay link-local addresses by a second
// or two.
func prepareIPv6() error {
	return network.Sysctl("net/ipv6/conf/all/disable_ipv6=0", "net/ipv6/conf/default/disable_ipv6=0",
		"net/ipv6/conf/default/accept_dad=0", "net/ipv6/conf/default/accept_ra=0")
}

// bridgeNetfilter sets whether bridged packets pass netfilter, which Kubernetes requires of nodes. Without br_netfilter in the
// kernel they do not: see LacksOnNode.
func bridgeNetfilter(on bool) error {
	value := "0"
	if on {
		value = "1"
	}
	for _, family := range []string{"iptables", "ip6tables"} {
		err := network.Sysctl("net/bridge/bridge-nf-call-" + family + "=" + value)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// trackBriefly makes conntrack forget closed connections after 1 s instead of 120 s. All labs of a machine share the limit
// nf_conntrack_max. So the connections of one variant would slow down the others, and a workload with thousands of connections
// per second would fill the table.
func trackBriefly(ns *network.Namespace) error {
	return ns.Do(func() error { return network.Sysctl("net/netfilter/nf_conntrack_tcp_timeout_time_wait=1") })
}
