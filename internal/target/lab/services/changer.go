//go:build linux

package services

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/target/lab/network"
	"slipstream.dev/internal/target/lab/programs"
)

// Changer replaces backends of the services of a lab that is up, as kube-proxy does where there are more than
// a thousand endpoints, or Cilium's agent.
type Changer struct {
	mode     string
	services []service
	// spaces are the namespaces of all nodes, which each have the rules; backends is the map in mode ebpf.
	spaces   []*network.Namespace
	backends *programs.ServiceBackends
	made     int
}

// Changer returns one for a lab. The caller closes it before the namespaces of its nodes.
func (s *Config) Changer(lab string, nodes []network.Node, spaces []*network.Namespace) (*Changer, error) {
	return s.changer(lab, s.services(nodes), spaces)
}

func (s *Config) changer(lab string, services []service, spaces []*network.Namespace) (*Changer, error) {
	c := &Changer{mode: s.Mode, services: services, spaces: spaces}
	if s.Mode != v1alpha1.ServiceEBPF {
		return c, nil
	}
	dir, err := OpenCgroup(lab)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	if c.backends, err = programs.OpenServiceBackends(int(dir.Fd())); err != nil {
		return nil, err
	}
	return c, nil
}

// Close closes what is open.
func (c *Changer) Close() error {
	if c.backends == nil {
		return nil
	}
	return c.backends.Close()
}

// Change replaces one backend of one service by the address that its server has to spare: of all services in
// turn, and then of each the next backend.
func (c *Changer) Change(ctx context.Context) error {
	i := c.made % len(c.services)
	s := &c.services[i]
	n := c.made / len(c.services) % len(s.backends)
	c.made++
	// The addresses of a service are its backends' and one more, which is free.
	for j := range len(s.backends) + 1 {
		to := netip.AddrPortFrom(network.Plus(s.first, j), servicePort)
		if !slices.Contains(s.backends, to) {
			return c.replace(ctx, i, n, to)
		}
	}
	return fmt.Errorf("service %s has no spare address", s.name)
}

// replace replaces the nth backend of the ith service.
func (c *Changer) replace(ctx context.Context, i, n int, to netip.AddrPort) error {
	s := &c.services[i]
	old := s.backends[n]
	s.backends[n] = to
	if c.mode == v1alpha1.ServiceEBPF {
		return c.backends.Replace(i, n, to, protocolNumbers[s.transport.Protocol])
	}
	all := c.rules(*s, old)
	var g errgroup.Group
	for _, ns := range c.spaces {
		g.Go(func() error {
			if _, err := all.Load(ctx, ns); err != nil || s.transport.Protocol != "udp" {
				return err
			}
			return ns.Do(func() error { return forget(old.Addr()) })
		})
	}
	if err := g.Wait(); err != nil {
		return fmt.Errorf("replace a backend of service %s: %w", s.name, err)
	}
	return nil
}

// rules returns what kube-proxy loads after a backend of a service has changed. The chain of the old backend stays.
func (c *Changer) rules(s service, old netip.AddrPort) network.Rules {
	v := versions[s.transport.IP]
	if c.mode == v1alpha1.ServiceIPTables {
		alike := slices.DeleteFunc(slices.Clone(c.services), func(o service) bool { return o.transport.IP != s.transport.IP })
		return network.Rules{network.Restore(v.restore, iptablesRules(alike, []service{s}))}
	}
	// It looks for chains that nobody needs any more.
	var all network.Rules
	for _, what := range []string{"chains", "sets"} {
		all = append(all, network.Command{Argv: []string{"nft", "--json", "list", what, v.ip}})
	}
	return append(all, network.NFT(fmt.Appendf(nftablesRules(s), "flush chain %s kube-proxy %s\n", v.ip, s.nftablesEndpoint(old))))
}

// forget has the thread's namespace track no datagrams to a backend any more: whoever sends from the same port
// again would have it again.
func forget(backend netip.Addr) error {
	h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("open netlink for conntrack: %w", err)
	}
	defer h.Close()
	family := netlink.InetFamily(unix.AF_INET)
	if backend.Is6() {
		family = unix.AF_INET6
	}
	var those netlink.ConntrackFilter
	err = those.AddProtocol(unix.IPPROTO_UDP)
	if err == nil {
		err = those.AddIP(netlink.ConntrackReplySrcIP, backend.AsSlice())
	}
	if err == nil {
		_, err = h.ConntrackDeleteFilters(netlink.ConntrackTable, family, &those)
	}
	if err != nil {
		return fmt.Errorf("delete conntrack entries of %s: %w", backend, err)
	}
	return nil
}
