//go:build linux

package services

import (
	"context"
	"errors"
	"net/netip"
	"testing"

	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/spec"
)

// What services_test, which has the tests of whole labs, needs of this package.

const Port = servicePort

func Block(backends int) int { return block(backends) }

type Service = service

func (s service) Address() netip.AddrPort    { return s.address }
func (s service) Backends() []netip.AddrPort { return s.backends }

// All returns the services of a lab of two nodes with this many pods each.
func (s *Config) All(pods int) []Service {
	nodes := twoNodes(pods)
	s.Assign(nodes)
	return s.services(nodes)
}

// Loader returns a function that loads services as a lab does: in a network namespace or, in mode ebpf, for a cgroup.
func Loader(mode string, services []Service) func(ctx context.Context, ns *network.Namespace, cgroup string) error {
	if mode == spec.ServiceEBPF {
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

// Change replaces the nth backend of the first of a lab's services. nodes are the namespaces of the lab's nodes.
func (s *Config) Change(t testing.TB, lab string, nodes []string, services []Service, n int, to netip.AddrPort) {
	t.Helper()
	var spaces []*network.Namespace
	for _, node := range nodes {
		ns, err := network.Open(node)
		if err != nil {
			t.Fatal(err)
		}
		defer ns.Close()
		spaces = append(spaces, ns)
	}
	c := s.changer(services, 0)
	if err := c.Open(lab, spaces); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	before := make(batch)
	if err := errors.Join(c.replace(before, 0, n, to), c.load(t.Context(), before)); err != nil {
		t.Fatal(err)
	}
}
