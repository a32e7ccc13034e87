//go:build linux

package services

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/programs"
	"slipstream.dev/internal/spec"
)

// Changer replaces backends of the services of a running lab, as kube-proxy does if there are more than a thousand endpoints,
// or as Cilium's agent does. It tracks the current backends of the services.
type Changer struct {
	mode     string
	services []service
	// next counts the replacements: it selects the next service and backend.
	next int
	// stale holds, by IP version, the chains that the last batch flushed and the next one deletes.
	stale map[int][]string
	// spaces are the namespaces of all nodes, each of which has all rules. backends is the map in mode ebpf.
	spaces   []*network.Namespace
	backends *programs.ServiceBackends
}

// Changer returns a Changer for a lab that has just come up. It replaces backends of services to which clients connect last.
func (s *Config) Changer(nodes []network.Node) *Changer {
	return s.changer(s.services(nodes), len(s.Servers))
}

func (s *Config) changer(services []service, first int) *Changer {
	return &Changer{mode: s.Mode, services: services, next: first, stale: make(map[int][]string)}
}

// Open prepares the Changer to load rules in the namespaces of a lab's nodes. The caller closes these after the Changer.
func (c *Changer) Open(lab string, spaces []*network.Namespace) error {
	c.spaces = spaces
	if c.mode != spec.ServiceEBPF {
		return nil
	}
	dir, err := OpenCgroup(lab)
	if err != nil {
		return err
	}
	defer dir.Close()
	c.backends, err = programs.OpenServiceBackends(int(dir.Fd()))
	return err
}

// Close closes what is open.
func (c *Changer) Close() error {
	c.spaces = nil
	if c.backends == nil {
		return nil
	}
	defer func() { c.backends = nil }()
	return c.backends.Close()
}

// syncPeriod is the default of kube-proxy's --min-sync-period: the minimum time between the end of a batch of rules and the
// beginning of the next (pkg/proxy/runner/bounded_frequency_runner.go).
const syncPeriod = time.Second

// Run replaces perSecond backends per second until ctx ends, and returns how many it has replaced. It takes the services in
// turn, one backend of each. Changes that are due while rules are being loaded, or within syncPeriod after that, form one
// batch.
func (c *Changer) Run(ctx context.Context, perSecond int) (made int, err error) {
	begin, every := time.Now(), time.Second/time.Duration(perSecond)
	timer := time.NewTimer(every)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return made, nil
		case <-timer.C:
		}
		n := int(time.Since(begin)/every) - made
		// Complete a batch on all nodes once it has begun.
		before, err := c.replaceNext(n)
		if err == nil {
			err = c.load(context.WithoutCancel(ctx), before)
		}
		if err != nil {
			return made, err
		}
		made += n
		next := begin.Add(every * time.Duration(made+1))
		if c.mode != spec.ServiceEBPF {
			if earliest := time.Now().Add(syncPeriod); next.Before(earliest) {
				next = earliest
			}
		}
		timer.Reset(time.Until(next))
	}
}

// replaceNext replaces the next n backends, which form one batch.
func (c *Changer) replaceNext(n int) (before batch, err error) {
	before = make(batch)
	for range n {
		i := c.next % len(c.services)
		s := &c.services[i]
		nth := c.next / len(c.services) % len(s.backends)
		c.next++
		to, err := s.spare()
		if err != nil {
			return nil, err
		}
		if err := c.replace(before, i, nth, to); err != nil {
			return nil, err
		}
	}
	return before, nil
}

// spare returns an address of a service's server that is not one of its backends. There is one more address than backends.
func (s *service) spare() (netip.AddrPort, error) {
	for j := range len(s.backends) + 1 {
		if to := netip.AddrPortFrom(network.Plus(s.first, j), servicePort); !slices.Contains(s.backends, to) {
			return to, nil
		}
	}
	return netip.AddrPort{}, fmt.Errorf("service %s has no spare address", s.name)
}

// batch maps the index of each changed service to its previous backends.
type batch map[int][]netip.AddrPort

// replace replaces the nth backend of the ith service. In mode ebpf that takes effect immediately, otherwise once the batch is
// loaded.
func (c *Changer) replace(before batch, i, n int, to netip.AddrPort) error {
	s := &c.services[i]
	if before[i] == nil {
		before[i] = slices.Clone(s.backends)
	}
	s.backends[n] = to
	if c.mode == spec.ServiceEBPF {
		return c.backends.Replace(i, n, to, protocolNumbers[s.transport.Protocol])
	}
	return nil
}

// load loads the rules of a batch on all nodes.
func (c *Changer) load(ctx context.Context, before batch) error {
	if c.mode == spec.ServiceEBPF {
		return nil
	}
	rules := c.rules(before)
	var g errgroup.Group
	for _, ns := range c.spaces {
		g.Go(func() error {
			if _, err := rules.Load(ctx, ns); err != nil {
				return err
			}
			return ns.Do(func() error { return c.forget(before) })
		})
	}
	if err := g.Wait(); err != nil {
		return fmt.Errorf("replace backends of %d services: %w", len(before), err)
	}
	return nil
}

// rules returns what kube-proxy loads for a batch, first for IPv4, then for IPv6.
func (c *Changer) rules(before batch) (all network.Rules) {
	for _, ip := range []int{4, 6} {
		var changed []int
		for i, s := range c.services {
			if s.transport.IP == ip && len(s.without(before[i])) > 0 {
				changed = append(changed, i)
			}
		}
		switch {
		case len(changed) == 0:
		case c.mode == spec.ServiceIPTables:
			all = append(all, c.iptables(ip, changed))
		default:
			all = append(all, c.nftables(ip, changed, before)...)
		}
	}
	return all
}

// iptables returns the rules of changed services. In so large a cluster, kube-proxy removes the chains of old backends every
// half minute; a lab keeps them.
func (c *Changer) iptables(ip int, changed []int) network.Command {
	all := slices.DeleteFunc(slices.Clone(c.services), func(s service) bool { return s.transport.IP != ip })
	var some []service
	for _, i := range changed {
		some = append(some, c.services[i])
	}
	return network.Restore(versions[ip].restore, iptablesRules(all, some))
}

// nftables returns the transactions of a batch. As kube-proxy does, it deletes the chains that the previous batch has flushed,
// lists chains and sets, and writes the chains of changed services.
func (c *Changer) nftables(ip int, changed []int, before batch) (all network.Rules) {
	v := versions[ip]
	var deleted, text []byte
	for _, old := range c.stale[ip] {
		deleted = fmt.Appendf(deleted, "delete chain %s kube-proxy %s\n", v.ip, old)
	}
	c.stale[ip] = nil
	if deleted != nil {
		all = append(all, network.NFT(deleted))
	}
	for _, what := range []string{"chains", "sets"} {
		all = append(all, network.Command{Argv: []string{"nft", "--json", "list", what, v.ip}})
	}
	for _, i := range changed {
		s := c.services[i]
		text = append(text, nftablesRules(s)...)
		for _, gone := range s.without(before[i]) {
			name := s.nftablesEndpoint(gone)
			text = fmt.Appendf(text, "flush chain %s kube-proxy %s\n", v.ip, name)
			c.stale[ip] = append(c.stale[ip], name)
		}
	}
	return append(all, network.NFT(text))
}

// without returns the backends in before that are no longer those of the service.
func (s service) without(before []netip.AddrPort) []netip.AddrPort {
	return slices.DeleteFunc(slices.Clone(before), func(b netip.AddrPort) bool { return slices.Contains(s.backends, b) })
}

// forget deletes the conntrack entries of UDP flows to replaced backends, in the thread's network namespace: otherwise a client
// that sends from the same port again would still reach the old backend.
func (c *Changer) forget(before batch) error {
	filters := make(map[int][]netlink.CustomConntrackFilter) // by IP version
	for i, had := range before {
		s := c.services[i]
		if s.transport.Protocol != "udp" {
			continue
		}
		for _, gone := range s.without(had) {
			f := new(netlink.ConntrackFilter)
			if err := errors.Join(
				f.AddProtocol(unix.IPPROTO_UDP),
				f.AddIP(netlink.ConntrackOrigDstIP, s.address.Addr().AsSlice()),
				f.AddIP(netlink.ConntrackReplySrcIP, gone.Addr().AsSlice()),
			); err != nil {
				return fmt.Errorf("filter conntrack entries of backend %s: %w", gone, err)
			}
			filters[s.transport.IP] = append(filters[s.transport.IP], f)
		}
	}
	if len(filters) == 0 {
		return nil
	}
	h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("open netlink for conntrack: %w", err)
	}
	defer h.Close()
	families := map[int]netlink.InetFamily{4: unix.AF_INET, 6: unix.AF_INET6}
	for ip, those := range filters {
		if _, err := h.ConntrackDeleteFilters(netlink.ConntrackTable, families[ip], those...); err != nil {
			return fmt.Errorf("delete conntrack entries of replaced backends: %w", err)
		}
	}
	return nil
}
