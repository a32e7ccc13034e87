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
	"slipstream.dev/bpf"
	"slipstream.dev/internal/target"
)

// Services of a lab stand in front of servers, as in a cluster: each has a
// ClusterIP, and its backends.
//
// A backend's address is one that really answers. In place of so many pods, a range
// of them is routed to the server's pod and is local there. Every node has the rules
// that kube-proxy would write (see kubeproxy.go), or, in mode ebpf, the pods'
// processes are in a cgroup whose sockets are led to the backends (see cgroup.go). How
// packets travel from pod to pod is the shape's, as it is without services.
type Services struct {
	// Mode is one of the API's.
	Mode string `json:"mode"`
	// Servers are the pods that a service with so many Backends is in front of: one
	// each.
	Servers  []target.Seat `json:"servers"`
	Backends int           `json:"backends"`
	// Total of all services, those of the servers among them. The others have one
	// backend each, the address of the first server.
	Total int `json:"total"`
}

// The addresses of a lab with services. A node has room for the backends of its
// servers behind the pods' addresses; ClusterIPs are in the range that Kubernetes has
// unless told otherwise.
var (
	servedCluster4 = netip.MustParsePrefix("10.128.0.0/9")
	clusterIPs     = netip.MustParsePrefix("10.96.0.0/12")
)

const (
	// servedBits is the length of a node's prefix: 524,288 addresses.
	servedBits = 13
	// servicePort is where services are, and where their backends listen.
	servicePort = 7465
	// leastBlock is the least number of addresses that are set aside for a server.
	leastBlock = 256
)

// validate checks that there are addresses for all backends, and that every server is
// a pod of the lab.
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
	case s.Total < len(s.Servers) || s.Total > 1<<16:
		return fail("must be %d (one a server) to %d in all, are %d", len(s.Servers), 1<<16, s.Total)
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

// block is how many addresses are set aside for a server with so many backends: as
// many as a prefix has.
func block(backends int) int {
	return max(leastBlock, 1<<bits.Len(uint(backends-1)))
}

// servedPods is the prefix of node i, of its pods and their backends.
func servedPods(i int) netip.Prefix {
	return netip.PrefixFrom(plus(servedCluster4.Addr(), i<<(32-servedBits)), servedBits)
}

// plus is the address n after a.
func plus(a netip.Addr, n int) netip.Addr {
	raw := a.As4()
	for i := 3; i >= 0 && n > 0; i-- {
		n += int(raw[i])
		raw[i] = byte(n)
		n >>= 8
	}
	return netip.AddrFrom4(raw)
}

// serve puts services in front of the pods of a layout.
func (s *Services) serve(nodes []node) {
	used := make([]int, len(nodes))
	for i, at := range s.Servers {
		used[at.Node]++
		size := block(s.Backends)
		p := &nodes[at.Node].pods[at.Pod]
		p.backends = netip.PrefixFrom(plus(nodes[at.Node].pods4.Addr(), used[at.Node]*size), 33-bits.Len(uint(size)))
		p.place.Service = target.Service{IPv4: clusterIP(i), Port: servicePort, Everywhere: true}
	}
}

// clusterIP of the nth service. The first 256 addresses are left to what a cluster has
// at fixed ones.
func clusterIP(n int) netip.Addr { return plus(clusterIPs.Addr(), 1<<8+n) }

// service is one service of a lab.
type service struct {
	name     string
	address  netip.AddrPort
	backends []netip.AddrPort
}

// services of a lab, those of its servers first.
func (s *Services) services(nodes []node) []service {
	all := make([]service, s.Total)
	for i := range all {
		at := s.Servers[0]
		all[i] = service{name: fmt.Sprintf("other-%d", i), address: netip.AddrPortFrom(clusterIP(i), servicePort)}
		if i >= len(s.Servers) {
			all[i].backends = []netip.AddrPort{netip.AddrPortFrom(nodes[at.Node].pods[at.Pod].place.IPv4, servicePort)}
			continue
		}
		at = s.Servers[i]
		all[i].name = fmt.Sprintf("server-%d", i)
		first := nodes[at.Node].pods[at.Pod].backends.Addr()
		for j := range s.Backends {
			all[i].backends = append(all[i].backends, netip.AddrPortFrom(plus(first, j), servicePort))
		}
	}
	return all
}

// makeBackends has the pod's node route its backends' addresses there, and the pod
// take them for its own.
func makeBackends(h *host, ns *namespace, bridge netlink.Link, p pod) error {
	if !p.backends.IsValid() {
		return nil
	}
	if err := h.nl.RouteAdd(&netlink.Route{LinkIndex: bridge.Attrs().Index, Dst: ipNet(p.backends), Gw: p.place.IPv4.AsSlice()}); err != nil {
		return fmt.Errorf("add route to backends %s: %w", p.backends, err)
	}
	lo, err := ns.nl.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := ns.nl.RouteAdd(&netlink.Route{
		LinkIndex: lo.Attrs().Index, Dst: ipNet(p.backends), Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
	}); err != nil {
		return fmt.Errorf("make backends %s local: %w", p.backends, err)
	}
	// What TCP remembers of each peer it would remember once for each backend here,
	// where every backend is a pod of its own elsewhere.
	return insideFile(ns.file, func() error { return sysctl("net/ipv4/tcp_no_metrics_save=1") })
}

// makeServices makes the services of a lab whose pods are there.
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
	rules, argv := kubeProxy(c.Services.Mode, services)
	version, err := exec.CommandContext(ctx, argv[0], "--version").Output()
	if err != nil {
		return fmt.Errorf("ask %s for its version: %w", argv[0], err)
	}
	_, l.loader, _ = strings.Cut(strings.TrimSpace(string(version)), " v")
	return parallel(ctx, len(hosts), func(i int) error {
		begin := time.Now()
		if err := load(ctx, hosts[i].namespace, argv, rules); err != nil {
			return fmt.Errorf("rules of %s: %w", hosts[i].place.Name, err)
		}
		l.loads[i] = time.Since(begin)
		return nil
	})
}

// Loaded tells how long this process took to make the services of a node, and the
// version of what loaded their rules: "1.8.9 (nf_tables)" is an iptables that has the
// kernel's newer tables under it. In mode ebpf there is no such thing, and one load is
// for all nodes.
func (l *Lab) Loaded(node string) (took time.Duration, version string) {
	for i, n := range layout(l.state.Config) {
		if n.place.Name == node && i < len(l.loads) {
			took = l.loads[i]
		}
	}
	return took, l.loader
}

// How kube-proxy has rules loaded. What uses the kernel's older tables has one lock for
// the whole machine, and waits for it.
var (
	nft             = []string{"nft", "-f", "-"}
	iptablesRestore = []string{"iptables-restore", "-w", "5", "--noflush"}
)

// kubeProxy is what kube-proxy in a mode has which command load.
func kubeProxy(mode string, services []service) (rules []byte, argv []string) {
	if mode == v1alpha1.ServiceIPTables {
		return append(iptablesRules(services, services), iptablesJumps()...), iptablesRestore
	}
	rules = []byte(nftablesTable)
	for _, s := range services {
		rules = append(rules, nftablesRules(s, s.backends)...)
	}
	return rules, nft
}

// load has a command read rules in a namespace.
func load(ctx context.Context, ns *namespace, argv []string, rules []byte) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdin = bytes.NewReader(rules)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = io.Discard, &said
	if err := insideFile(ns.file, cmd.Start); err != nil {
		return fmt.Errorf("start %s: %w", argv[0], err)
	}
	if err := cmd.Wait(); err != nil {
		first, _, _ := strings.Cut(strings.TrimSpace(said.String()), "\n")
		return fmt.Errorf("%s: %w: %s", argv[0], err, first)
	}
	return nil
}

// probeServices tries what services need, in the thread's namespace, which goes.
func probeServices(c Config, ns *namespace) error {
	one := []service{{
		name: "probe", address: netip.AddrPortFrom(clusterIP(0), servicePort),
		backends: []netip.AddrPort{netip.AddrPortFrom(servedCluster4.Addr(), 1), netip.AddrPortFrom(servedCluster4.Addr(), 2)},
	}}
	mode := c.Services.Mode
	if mode == v1alpha1.ServiceEBPF {
		if _, err := cgroupRoot("/proc/self/mountinfo"); err != nil {
			return err
		}
		programs, err := bpf.LoadServices(1, 1)
		if err != nil {
			return fmt.Errorf("services in mode %s need a kernel with eBPF for cgroups (CONFIG_CGROUP_BPF, 5.8 or later): %w", mode, err)
		}
		return programs.Close()
	}
	rules, argv := kubeProxy(mode, one)
	if _, err := exec.LookPath(argv[0]); err != nil {
		pack := map[string]string{v1alpha1.ServiceIPTables: "iptables", v1alpha1.ServiceNFTables: "nftables"}[mode]
		return fmt.Errorf("services in mode %s need %s, which is not installed: install it (apt install %s), or choose another mode", mode, argv[0], pack)
	}
	if err := load(context.Background(), ns, argv, rules); err != nil {
		return fmt.Errorf("services in mode %s: this kernel or %s does not take kube-proxy's rules: %w", mode, argv[0], err)
	}
	return nil
}
