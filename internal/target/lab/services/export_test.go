//go:build linux

package services

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/target"
	"slipstream.dev/internal/target/lab/network"
)

// What the tests of whole labs, which are in services_test, need of this package.

const Port = servicePort

func Block(backends int) int { return block(backends) }

type Service = service

func (s service) Address() netip.AddrPort    { return s.address }
func (s service) Backends() []netip.AddrPort { return s.backends }

// All returns the services of a lab that has two nodes, with so many pods on each.
func (s *Config) All(pods int) []Service {
	nodes := twoNodes(pods)
	s.Assign(nodes)
	return s.services(nodes)
}

// Loader returns what loads services as a lab does: in a namespace or, in mode ebpf, a cgroup of that name.
func Loader(mode string, services []Service) func(ctx context.Context, ns *network.Namespace, cgroup string) error {
	if mode == v1alpha1.ServiceEBPF {
		return func(_ context.Context, _ *network.Namespace, cgroup string) error {
			return makeTranslation(cgroup, services)
		}
	}
	rules := kubeProxy(mode, services)
	return func(ctx context.Context, ns *network.Namespace, _ string) error {
		_, err := rules.Load(ctx, ns)
		return err
	}
}

// Change replaces the nth backend of the first of a lab's services, which are all of one IP version, as
// kube-proxy does where there are more than a thousand endpoints, or Cilium's agent. The chain of the old backend
// stays. nodes are the namespaces of the lab's nodes.
func (s *Config) Change(t testing.TB, lab string, nodes []string, services []Service, n int, to netip.AddrPort) {
	t.Helper()
	one := &services[0]
	old := one.backends[n]
	one.backends[n] = to
	v := versions[one.transport.IP]
	var all Rules
	switch s.Mode {
	case v1alpha1.ServiceEBPF:
		if err := backendsMap(t, lab).Update([2]uint32{0, uint32(n)}, wireAddress(to, one.transport), ebpf.UpdateExist); err != nil {
			t.Fatal(err)
		}
		return
	case v1alpha1.ServiceIPTables:
		all = Rules{iptables(v, iptablesRules(services, services[:1]))}
	case v1alpha1.ServiceNFTables:
		// It looks for chains that nobody needs any more.
		for _, what := range []string{"chains", "sets"} {
			all = append(all, command{argv: []string{"nft", "--json", "list", what, v.ip}})
		}
		all = append(all, nft(fmt.Appendf(nftablesRules(*one), "flush chain %s kube-proxy %s\n", v.ip, one.nftablesEndpoint(old))))
	}
	var g errgroup.Group
	for _, node := range nodes {
		g.Go(func() error {
			ns, err := network.Open(node)
			if err != nil {
				return err
			}
			defer ns.Close()
			if _, err := all.Load(context.Background(), ns); err != nil || one.transport.Protocol != "udp" {
				return err
			}
			return ns.Do(func() error { return forget(old.Addr()) })
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
}

// forget has the thread's namespace track no datagrams to a backend any more: whoever
// sends from the same port again would have it again.
func forget(backend netip.Addr) error {
	h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer h.Close()
	family := netlink.InetFamily(unix.AF_INET)
	if backend.Is6() {
		family = unix.AF_INET6
	}
	var those netlink.ConntrackFilter
	if err := errors.Join(those.AddProtocol(unix.IPPROTO_UDP), those.AddIP(netlink.ConntrackReplySrcIP, backend.AsSlice())); err != nil {
		return err
	}
	_, err = h.ConntrackDeleteFilters(netlink.ConntrackTable, family, &those)
	return err
}

// wireAddress is an address as the map of backends has it.
func wireAddress(a netip.AddrPort, of target.Transport) (raw [20]byte) {
	protocol := uint16(unix.IPPROTO_TCP)
	if of.Protocol == "udp" {
		protocol = unix.IPPROTO_UDP
	}
	ip := a.Addr().As16()
	copy(raw[:], ip[:])
	binary.BigEndian.PutUint16(raw[16:], a.Port())
	binary.NativeEndian.PutUint16(raw[18:], protocol)
	return raw
}

// backendsMap is that of the programs which a lab's cgroup has.
func backendsMap(t testing.TB, lab string) *ebpf.Map {
	t.Helper()
	dir, err := OpenCgroup(lab)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	attached, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: ebpf.AttachCGroupInet4Connect})
	if err != nil || len(attached.Programs) != 1 {
		t.Fatalf("programs of the cgroup: %v, %v", attached, err)
	}
	program, err := ebpf.NewProgramFromID(attached.Programs[0].ID)
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	info, err := program.Info()
	if err != nil {
		t.Fatal(err)
	}
	ids, _ := info.MapIDs()
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { m.Close() })
		if info, err := m.Info(); err == nil && info.Name == "backends" {
			return m
		}
	}
	t.Fatal("the programs have no map of backends")
	return nil
}
