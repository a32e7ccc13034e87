//go:build linux

// Package services has the services of a lab, which are in front of servers as in a cluster: each has a ClusterIP
// and backends.
//
// Every address of a backend answers. Instead of one pod per backend, a range of addresses is routed to the
// server's pod and is local there: Assign chooses the addresses, and the overlay routes them. Every node has the
// rules that kube-proxy would write (kubeproxy.go). In mode ebpf, the pods' processes are instead in a cgroup
// with programs that translate service addresses (cgroup.go). How packets travel between pods depends on the
// shape, as without services.
//
// Filter adds the netfilter rules that every node of a lab has, also without services (filter.go).
package services

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strings"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/programs"
	"slipstream.dev/internal/spec"
)

// Config describes the services of a lab.
type Config struct {
	// Mode is one of the API's.
	Mode string `json:"mode"`
	// Servers are the pods that have a service in front of them, each with this many Backends.
	Servers  []place.Position `json:"servers"`
	Backends int              `json:"backends"`
	// Total is the number of all services, including those of the servers. The others have OtherBackends each (1 if that is 0),
	// at addresses of the first server.
	Total         int `json:"total"`
	OtherBackends int `json:"otherBackends,omitempty"`
	// Transports are those of each service. There are rules only for these.
	Transports []place.Transport `json:"transports"`
}

// The addresses of a lab with services. The backends of a node's servers follow the addresses of its
// pods, for which IPv6 always has room. ClusterIPs of IPv4 are in Kubernetes' default range.
var (
	servedCluster4 = netip.MustParsePrefix("10.128.0.0/9")
	clusterIPs4    = netip.MustParsePrefix("10.96.0.0/12")
	clusterIPs6    = netip.MustParsePrefix("fd73:6c69:7002::/108") // the largest that Kubernetes permits
)

const (
	// servedBits is the length of a node's IPv4 prefix: 524,288 addresses.
	servedBits  = 13
	servicePort = 7465
	// leastBlock is the minimum number of addresses that are reserved for a server.
	leastBlock = 256
)

// Validate checks that there are enough addresses, and that every server is a pod of a lab with this shape and these numbers of
// nodes and of pods per node.
func (s *Config) Validate(shape string, nodes, pods int) error {
	modes := []string{spec.ServiceIPTables, spec.ServiceNFTables, spec.ServiceEBPF}
	switch {
	case shape != spec.ShapeFlannel:
		return fmt.Errorf("must be of shape %s, is %s", spec.ShapeFlannel, shape)
	case !slices.Contains(modes, s.Mode):
		return fmt.Errorf("mode must be one of %s, is %q", strings.Join(modes, ", "), s.Mode)
	case len(s.Servers) == 0:
		return errors.New("at least one pod must be a server")
	case s.Backends < 1:
		return fmt.Errorf("backends must be at least 1, are %d", s.Backends)
	case s.OtherBackends < 0 || s.OtherBackends >= leastBlock:
		return fmt.Errorf("services without a server must have fewer than %d backends each, have %d", leastBlock, s.OtherBackends)
	case len(s.Transports) == 0:
		return errors.New("at least one transport is needed")
	case s.Total < len(s.Servers) || s.Total > 1<<16:
		return fmt.Errorf("must be %d (one a server) to %d in all, are %d", len(s.Servers), 1<<16, s.Total)
	}
	for i, t := range s.Transports {
		if versions[t.IP].ip == "" || t.Protocol != "tcp" && t.Protocol != "udp" || slices.Contains(s.Transports[:i], t) {
			return fmt.Errorf("transports must be tcp or udp over IP version 4 or 6, each once, are %v", s.Transports)
		}
	}
	seen := make(map[place.Position]bool)
	for _, at := range s.Servers {
		if at.Node < 0 || at.Node >= nodes || at.Pod < 0 || at.Pod >= pods {
			return fmt.Errorf("there is no node%d/pod%d to be a server", at.Node, at.Pod)
		}
		if seen[at] {
			return fmt.Errorf("node%d/pod%d is a server twice", at.Node, at.Pod)
		}
		seen[at] = true
	}
	if !slices.Contains(s.versions(), 4) {
		return nil // a node's IPv6 prefix has room for all
	}
	// A node's first block has its pods, and the last its broadcast address.
	room := 1<<(32-servedBits)/block(s.Backends) - 2
	for i := range nodes {
		n := 0
		for _, at := range s.Servers {
			if at.Node == i {
				n++
			}
		}
		if n > room {
			return fmt.Errorf("%d servers of node%d with %d backends each need more addresses than %s holds, which is enough for %d: "+
				"choose fewer backends, fewer pairs or more nodes", n, i, s.Backends, servedPods(i), max(room, 0))
		}
	}
	return nil
}

func (s *Config) versions() (all []int) {
	for _, ip := range []int{4, 6} {
		if slices.ContainsFunc(s.Transports, func(t place.Transport) bool { return t.IP == ip }) {
			all = append(all, ip)
		}
	}
	return all
}

// block returns how many addresses are reserved for a server: a power of two, because they form a prefix, and more than the
// number of backends, so that one can be replaced.
func block(backends int) int {
	return max(leastBlock, 1<<bits.Len(uint(backends)))
}

// Prefixes returns the IPv4 prefixes of the pods and backends of node i and of all nodes. They replace those of a lab without
// services.
func (s *Config) Prefixes(i int) (pods, cluster netip.Prefix) { return servedPods(i), servedCluster4 }

// servedPods returns the prefix of the pods and backends of node i.
func servedPods(i int) netip.Prefix {
	return netip.PrefixFrom(network.Plus(servedCluster4.Addr(), i<<(32-servedBits)), servedBits)
}

// Assign gives the servers among the pods their services, and the addresses of their backends.
func (s *Config) Assign(nodes []network.Node) {
	used := make([]int, len(nodes))
	for i, at := range s.Servers {
		used[at.Node]++
		size := block(s.Backends)
		n := &nodes[at.Node]
		p := &n.Pods[at.Pod]
		p.Backends = make(map[int]netip.Prefix)
		p.Place.Service = place.Service{Port: servicePort, Everywhere: true}
		for _, ip := range s.versions() {
			first, service := n.Pods4.Addr(), &p.Place.Service.IPv4
			if ip == 6 {
				first, service = n.Pods6.Addr(), &p.Place.Service.IPv6
			}
			p.Backends[ip] = netip.PrefixFrom(network.Plus(first, used[at.Node]*size), first.BitLen()+1-bits.Len(uint(size)))
			*service = clusterIP(ip, i)
		}
	}
}

// clusterIP returns the address of the nth service. The first 256 addresses are reserved for services with fixed addresses, as
// in a cluster.
func clusterIP(ip, n int) netip.Addr { return network.Plus(versions[ip].clusterIPs.Addr(), 1<<8+n) }

// service is a service for one transport, which kube-proxy calls a service port.
type service struct {
	name      string
	transport place.Transport
	address   netip.AddrPort
	backends  []netip.AddrPort
	// first is the address of the first backend. The addresses of the others follow.
	first netip.Addr
}

// services returns all services of a lab, for each transport, with those of its servers first.
func (s *Config) services(nodes []network.Node) (all []service) {
	for _, t := range s.Transports {
		for i := range s.Total {
			one := service{name: fmt.Sprintf("other-%d", i), transport: t, address: netip.AddrPortFrom(clusterIP(t.IP, i), servicePort)}
			at, backends := s.Servers[0], max(1, s.OtherBackends)
			if i < len(s.Servers) {
				at, backends, one.name = s.Servers[i], s.Backends, fmt.Sprintf("server-%d", i)
			}
			one.first = nodes[at.Node].Pods[at.Pod].Backends[t.IP].Addr()
			for j := range backends {
				one.backends = append(one.backends, netip.AddrPortFrom(network.Plus(one.first, j), servicePort))
			}
			all = append(all, one)
		}
	}
	return all
}

// Probe tests in a temporary namespace, that of the thread, whether the machine supports the services.
func (s *Config) Probe(ns *network.Namespace) error {
	mode := s.Mode
	if mode == spec.ServiceEBPF {
		if _, err := cgroupRoot("/proc/self/mountinfo"); err != nil {
			return err
		}
		loaded, err := programs.LoadServices(1, 1)
		if err != nil {
			return fmt.Errorf("services in mode %s need a kernel with eBPF for cgroups (CONFIG_CGROUP_BPF, 5.8 or later): %w", mode, err)
		}
		return loaded.Close()
	}
	var some []service
	for _, t := range s.Transports {
		one := service{name: "probe", transport: t, address: netip.AddrPortFrom(clusterIP(t.IP, 0), servicePort)}
		for i := range 2 {
			one.backends = append(one.backends, netip.AddrPortFrom(versions[t.IP].cluster.Addr(), uint16(1+i)))
		}
		some = append(some, one)
	}
	return kubeProxy(mode, some).Probe(ns, "services in mode "+mode, map[string]string{
		"iptables-restore": "iptables", "ip6tables-restore": "iptables", "nft": "nftables",
	})
}
