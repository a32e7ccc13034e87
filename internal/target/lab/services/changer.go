//go:build linux

package services

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

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

// Period is the least time between two batches of changes: kube-proxy's default of --min-sync-period, none in mode
// ebpf.
func (c *Changer) Period() time.Duration {
	if c.mode == v1alpha1.ServiceEBPF {
		return 0
	}
	return time.Second
}

// Change replaces n backends in one batch: one of each service in turn, and then of each the next backend.
func (c *Changer) Change(ctx context.Context, n int) error {
	b := make(batch)
	for range n {
		i := c.made % len(c.services)
		s := &c.services[i]
		nth := c.made / len(c.services) % len(s.backends)
		c.made++
		to, err := s.spare()
		if err != nil {
			return err
		}
		if err := c.replace(b, i, nth, to); err != nil {
			return err
		}
	}
	return c.load(ctx, b)
}

// spare returns an address of a service's server that is none of its backends: there is one more than backends.
func (s *service) spare() (netip.AddrPort, error) {
	for j := range len(s.backends) + 1 {
		if to := netip.AddrPortFrom(network.Plus(s.first, j), servicePort); !slices.Contains(s.backends, to) {
			return to, nil
		}
	}
	return netip.AddrPort{}, fmt.Errorf("service %s has no spare address", s.name)
}

// batch has the replaced backends of services, by the index of the service.
type batch map[int][]netip.AddrPort

// replace replaces the nth backend of the ith service: in mode ebpf at once, otherwise once the batch is loaded.
func (c *Changer) replace(b batch, i, n int, to netip.AddrPort) error {
	s := &c.services[i]
	b[i] = append(b[i], s.backends[n])
	s.backends[n] = to
	if c.mode == v1alpha1.ServiceEBPF {
		return c.backends.Replace(i, n, to, protocolNumbers[s.transport.Protocol])
	}
	return nil
}

// load loads the rules of a batch on all nodes.
func (c *Changer) load(ctx context.Context, b batch) error {
	if c.mode == v1alpha1.ServiceEBPF {
		return nil
	}
	rules := c.rules(b)
	var g errgroup.Group
	for _, ns := range c.spaces {
		g.Go(func() error {
			if _, err := rules.Load(ctx, ns); err != nil {
				return err
			}
			return ns.Do(func() error { return c.forget(b) })
		})
	}
	if err := g.Wait(); err != nil {
		return fmt.Errorf("replace backends of %d services: %w", len(b), err)
	}
	return nil
}

// rules returns what kube-proxy loads for a batch. The chains of old backends stay.
func (c *Changer) rules(b batch) (all network.Rules) {
	for _, ip := range []int{4, 6} {
		v := versions[ip]
		var alike, changed []service
		var text []byte
		for i, s := range c.services {
			if s.transport.IP != ip {
				continue
			}
			alike = append(alike, s)
			if b[i] == nil {
				continue
			}
			changed = append(changed, s)
			text = append(text, nftablesRules(s)...)
			for _, old := range s.gone(b[i]) {
				text = fmt.Appendf(text, "flush chain %s kube-proxy %s\n", v.ip, s.nftablesEndpoint(old))
			}
		}
		switch {
		case len(changed) == 0:
		case c.mode == v1alpha1.ServiceIPTables:
			all = append(all, network.Restore(v.restore, iptablesRules(alike, changed)))
		default:
			// It looks for chains that nobody needs any more.
			for _, what := range []string{"chains", "sets"} {
				all = append(all, network.Command{Argv: []string{"nft", "--json", "list", what, v.ip}})
			}
			all = append(all, network.NFT(text))
		}
	}
	return all
}

// gone returns which of the replaced backends of a service were not made backends again.
func (s service) gone(replaced []netip.AddrPort) []netip.AddrPort {
	return slices.DeleteFunc(slices.Clone(replaced), func(old netip.AddrPort) bool { return slices.Contains(s.backends, old) })
}

// forget has the thread's namespace track no datagrams to backends that are gone: whoever sends from the same port
// again would have them again.
func (c *Changer) forget(b batch) error {
	for i, replaced := range b {
		if s := c.services[i]; s.transport.Protocol == "udp" {
			for _, old := range s.gone(replaced) {
				if err := forget(old.Addr()); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// forget deletes what the thread's namespace tracks of datagrams to a backend.
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
