//go:build linux

package services

import (
	"slices"

	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/spec"
)

// kubeProxy returns what kube-proxy loads for services in a mode, first for IPv4, then for IPv6.
func kubeProxy(mode string, services []service) (all network.Rules) {
	for _, ip := range []int{4, 6} {
		v, mine := versions[ip], slices.DeleteFunc(slices.Clone(services), func(s service) bool { return s.transport.IP != ip })
		switch {
		case len(mine) == 0:
		case mode == spec.ServiceIPTables:
			all = append(all, network.Restore(v.restore, append(iptablesRules(mine, mine), iptablesJumps()...)))
		default:
			text := nftablesTable(v)
			for _, s := range mine {
				text = append(text, nftablesRules(s)...)
			}
			all = append(all, network.NFT(text))
		}
	}
	return all
}

// Rules returns the rules of a lab's services, for a mode of kube-proxy.
func (s *Config) Rules(nodes []network.Node) network.Rules {
	return kubeProxy(s.Mode, s.services(nodes))
}
