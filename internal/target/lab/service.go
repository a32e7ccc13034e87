//go:build linux

package lab

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/bits"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/target"
	"slipstream.dev/internal/target/lab/programs"
)

// Services of a lab are in front of servers, as in a cluster: each has a ClusterIP and backends.
//
// Every address of a backend answers. In place of so many pods, a range of addresses is routed to the
// server's pod and is local there. Every node has the rules that kube-proxy would write (kubeproxy.go).
// In mode ebpf, the pods' processes are instead in a cgroup with programs that translate service
// addresses (cgroup.go). How packets travel between pods depends on the shape, as without services.
type Services struct {
	// Mode is one of the API's.
	Mode string `json:"mode"`
	// Servers are the pods that have a service in front of them, each with so many Backends.
	Servers  []target.Seat `json:"servers"`
	Backends int           `json:"backends"`
	// Total is the number of all services, those of the servers included. The others have one backend
	// each, the address of the first server.
	Total int `json:"total"`
	// Transports of each service. There are rules only for these.
	Transports []target.Transport `json:"transports"`
}

// The addresses of a lab with services. The backends of a node's servers follow the addresses of its
// pods, for which IPv6 always has room. ClusterIPs of IPv4 are in Kubernetes' default range.
var (
	servedCluster4 = netip.MustParsePrefix("10.128.0.0/9")
	clusterIPs4    = netip.MustParsePrefix("10.96.0.0/12")
	clusterIPs6    = netip.MustParsePrefix("fd73:6c69:7002::/108") // as large as Kubernetes lets it be
)

const (
	// servedBits is the length of a node's IPv4 prefix: 524,288 addresses.
	servedBits = 13
	// servicePort is the port of services and of their backends.
	servicePort = 7465
	// leastBlock is the least number of addresses that are reserved for a server.
	leastBlock = 256
)

// validate checks that there are enough addresses, and that every server is a pod of the lab.
func (s *Services) validate(c Config) error {
	fail := func(format string, args ...any) error {
		return fmt.Errorf("lab %s: services: "+format, append([]any{c.Name}, args...)...)
	}
	modes := []string{v1alpha1.ServiceIPTables, v1alpha1.ServiceNFTables, v1alpha1.ServiceEBPF}
	switch {
	case c.Shape != v1alpha1.ShapeFlannel:
		return fail("must be of shape %s, is %s", v1alpha1.ShapeFlannel, c.Shape)
	case !slices.Contains(modes, s.Mode):
		return fail("mode must be one of %s, is %q", strings.Join(modes, ", "), s.Mode)
	case len(s.Servers) == 0:
		return fail("no pod has a service in front of it")
	case s.Backends < 1:
		return fail("backends must be at least 1, are %d", s.Backends)
	case len(s.Transports) == 0:
		return fail("none is for a transport")
	case s.Total < len(s.Servers) || s.Total > 1<<16:
		return fail("must be %d (one a server) to %d in all, are %d", len(s.Servers), 1<<16, s.Total)
	}
	for i, t := range s.Transports {
		if versions[t.IP].ip == "" || t.Protocol != "tcp" && t.Protocol != "udp" || slices.Contains(s.Transports[:i], t) {
			return fail("must each be of IP version 4 or 6 and of tcp or udp, once, are %v", s.Transports)
		}
	}
	seen := make(map[target.Seat]bool)
	for _, at := range s.Servers {
		if at.Node < 0 || at.Node >= c.Nodes || at.Pod < 0 || at.Pod >= c.Pods {
			return fail("there is no node%d/pod%d to be a server", at.Node, at.Pod)
		}
		if seen[at] {
			return fail("node%d/pod%d is a server twice", at.Node, at.Pod)
		}
		seen[at] = true
	}
	if !slices.Contains(s.versions(), 4) {
		return nil // a node's IPv6 prefix has room for all
	}
	// A node's first block has its pods, and the last its broadcast address.
	room := 1<<(32-servedBits)/block(s.Backends) - 2
	for i := range c.Nodes {
		n := 0
		for _, at := range s.Servers {
			if at.Node == i {
				n++
			}
		}
		if n > room {
			return fail("%d servers of node%d with %d backends each need more addresses than %s holds, which is enough for %d: "+
				"choose fewer backends, fewer pairs or more nodes", n, i, s.Backends, servedPods(i), max(room, 0))
		}
	}
	return nil
}

// versions returns the IP versions of the services.
func (s *Services) versions() (all []int) {
	for _, ip := range []int{4, 6} {
		if slices.ContainsFunc(s.Transports, func(t target.Transport) bool { return t.IP == ip }) {
			all = append(all, ip)
		}
	}
	return all
}

// block returns how many addresses are reserved for a server: a power of two, as they form a prefix.
func block(backends int) int {
	return max(leastBlock, 1<<bits.Len(uint(backends-1)))
}

// servedPods returns the prefix of the pods and backends of node i.
func servedPods(i int) netip.Prefix {
	return netip.PrefixFrom(plus(servedCluster4.Addr(), i<<(32-servedBits)), servedBits)
}

// plus returns the nth address after a.
func plus(a netip.Addr, n int) netip.Addr {
	raw := a.AsSlice()
	for i := len(raw) - 1; i >= 0 && n > 0; i-- {
		n += int(raw[i])
		raw[i] = byte(n)
		n >>= 8
	}
	a, _ = netip.AddrFromSlice(raw) // of a length that it just had
	return a
}

// serve adds services to the pods of a layout.
func (s *Services) serve(nodes []node) {
	used := make([]int, len(nodes))
	for i, at := range s.Servers {
		used[at.Node]++
		size := block(s.Backends)
		n := &nodes[at.Node]
		p := &n.pods[at.Pod]
		p.backends = make(map[int]netip.Prefix)
		p.place.Service = target.Service{Port: servicePort, Everywhere: true}
		for _, ip := range s.versions() {
			first, service := n.pods4.Addr(), &p.place.Service.IPv4
			if ip == 6 {
				first, service = n.pods6.Addr(), &p.place.Service.IPv6
			}
			p.backends[ip] = netip.PrefixFrom(plus(first, used[at.Node]*size), first.BitLen()+1-bits.Len(uint(size)))
			*service = clusterIP(ip, i)
		}
	}
}

// clusterIP returns the address of the nth service. The first 256 addresses are reserved, as in a cluster,
// for services with fixed ones.
func clusterIP(ip, n int) netip.Addr { return plus(versions[ip].clusterIPs.Addr(), 1<<8+n) }

// service is one service of a lab for one transport: what kube-proxy calls a service port.
type service struct {
	name      string
	transport target.Transport
	address   netip.AddrPort
	backends  []netip.AddrPort
}

// services returns all services of a lab for each transport, those of its servers first.
func (s *Services) services(nodes []node) (all []service) {
	for _, t := range s.Transports {
		for i := range s.Total {
			at := s.Servers[0]
			one := service{name: fmt.Sprintf("other-%d", i), transport: t, address: netip.AddrPortFrom(clusterIP(t.IP, i), servicePort)}
			if i >= len(s.Servers) {
				one.backends = []netip.AddrPort{netip.AddrPortFrom(nodes[at.Node].pods[at.Pod].place.IP(t.IP), servicePort)}
				all = append(all, one)
				continue
			}
			at = s.Servers[i]
			one.name = fmt.Sprintf("server-%d", i)
			first := nodes[at.Node].pods[at.Pod].backends[t.IP].Addr()
			for j := range s.Backends {
				one.backends = append(one.backends, netip.AddrPortFrom(plus(first, j), servicePort))
			}
			all = append(all, one)
		}
	}
	return all
}

// makeBackends routes the addresses of a pod's backends to the pod, and makes them local there.
func makeBackends(h *host, ns *namespace, bridge netlink.Link, p pod) error {
	if len(p.backends) == 0 {
		return nil
	}
	lo, err := ns.nl.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	for ip, backends := range p.backends {
		if err := h.nl.RouteAdd(&netlink.Route{LinkIndex: bridge.Attrs().Index, Dst: ipNet(backends), Gw: p.place.IP(ip).AsSlice()}); err != nil {
			return fmt.Errorf("add route to backends %s: %w", backends, err)
		}
		if err := ns.nl.RouteAdd(&netlink.Route{
			LinkIndex: lo.Attrs().Index, Dst: ipNet(backends), Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
		}); err != nil {
			return fmt.Errorf("make backends %s local: %w", backends, err)
		}
	}
	return ns.do(func() error {
		return sysctl(
			// TCP caches metrics per peer address. Here all backends are one pod, which would
			// have an entry for each.
			"net/ipv4/tcp_no_metrics_save=1",
			// Allows binding an IPv6 socket to an address that only a route makes local. IPv4
			// always does (inet6_bind in net/ipv6/af_inet6.c).
			"net/ipv6/ip_nonlocal_bind=1",
		)
	})
}

// makeServices creates the services of a lab whose pods exist.
func (l *Lab) makeServices(ctx context.Context, hosts []*host, nodes []node) error {
	c := l.state.Config
	services := c.Services.services(nodes)
	begin := time.Now()
	if c.translated() {
		err := makeTranslation(c, services)
		for i := range l.loads {
			l.loads[i] = time.Since(begin)
		}
		return err
	}
	all := kubeProxy(c.Services.Mode, services)
	version, err := exec.CommandContext(ctx, all[0].argv[0], "--version").Output()
	if err != nil {
		return fmt.Errorf("get the version of %s: %w", all[0].argv[0], err)
	}
	_, l.loader, _ = strings.Cut(strings.TrimSpace(string(version)), " v")
	return parallel(ctx, len(hosts), func(i int) error {
		begin := time.Now()
		for _, r := range all {
			if err := r.load(ctx, hosts[i].namespace); err != nil {
				return fmt.Errorf("rules of %s: %w", hosts[i].place.Name, err)
			}
		}
		l.loads[i] = time.Since(begin)
		return nil
	})
}

// Loaded returns how long loading the services of a node took, and the version of the program that loaded
// their rules: "1.8.9 (nf_tables)" is an iptables on top of nftables. In mode ebpf there is no version,
// and the time is that of all nodes.
func (l *Lab) Loaded(node string) (took time.Duration, version string) {
	for i, n := range layout(l.state.Config) {
		if n.place.Name == node && i < len(l.loads) {
			took = l.loads[i]
		}
	}
	return took, l.loader
}

// rules are the input of a command that loads them, as kube-proxy runs it.
type rules struct {
	argv []string
	text []byte
}

// nft and iptables load rules as kube-proxy does. Legacy iptables has one lock for the whole machine, and
// waits for it.
func nft(text []byte) rules { return rules{[]string{"nft", "-f", "-"}, text} }

func iptables(v version, text []byte) rules {
	return rules{[]string{v.restore, "-w", "5", "--noflush"}, text}
}

// kubeProxy returns what kube-proxy loads for services in a mode, one IP version after the other.
func kubeProxy(mode string, services []service) (all []rules) {
	for _, ip := range []int{4, 6} {
		v, mine := versions[ip], slices.DeleteFunc(slices.Clone(services), func(s service) bool { return s.transport.IP != ip })
		switch {
		case len(mine) == 0:
		case mode == v1alpha1.ServiceIPTables:
			all = append(all, iptables(v, append(iptablesRules(mine, mine), iptablesJumps()...)))
		default:
			text := nftablesTable(v)
			for _, s := range mine {
				text = append(text, nftablesRules(s)...)
			}
			all = append(all, nft(text))
		}
	}
	return all
}

// load loads the rules in a namespace.
func (r rules) load(ctx context.Context, ns *namespace) error {
	cmd := exec.CommandContext(ctx, r.argv[0], r.argv[1:]...)
	cmd.Stdin = bytes.NewReader(r.text)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = io.Discard, &said
	if err := ns.do(cmd.Start); err != nil {
		return fmt.Errorf("start %s: %w", r.argv[0], err)
	}
	if err := cmd.Wait(); err != nil {
		first, _, _ := strings.Cut(strings.TrimSpace(said.String()), "\n")
		return fmt.Errorf("%s: %w: %s", r.argv[0], err, first)
	}
	return nil
}

// probeServices tests what services need, in the thread's temporary namespace.
func probeServices(c Config, ns *namespace) error {
	mode := c.Services.Mode
	if mode == v1alpha1.ServiceEBPF {
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
	for _, t := range c.Services.Transports {
		one := service{name: "probe", transport: t, address: netip.AddrPortFrom(clusterIP(t.IP, 0), servicePort)}
		for i := range 2 {
			one.backends = append(one.backends, netip.AddrPortFrom(versions[t.IP].cluster.Addr(), uint16(1+i)))
		}
		some = append(some, one)
	}
	for _, r := range kubeProxy(mode, some) {
		if _, err := exec.LookPath(r.argv[0]); err != nil {
			pack := map[string]string{v1alpha1.ServiceIPTables: "iptables", v1alpha1.ServiceNFTables: "nftables"}[mode]
			return fmt.Errorf("services in mode %s need %s, which is not installed: install it (apt install %s), or use another mode", mode, r.argv[0], pack)
		}
		if err := r.load(context.Background(), ns); err != nil {
			return fmt.Errorf("services in mode %s: this kernel or %s does not accept kube-proxy's rules: %w", mode, r.argv[0], err)
		}
	}
	return nil
}
