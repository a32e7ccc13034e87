//go:build linux

package lab

import (
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/netns"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

// TestLacksOnNode checks that a machine whose kernel has no br_netfilter is told which module it lacks, but only for pods on a
// bridge.
func TestLacksOnNode(t *testing.T) {
	sysctls := t.TempDir()
	for _, shape := range []string{spec.ShapeFlannel, overlay.ShapeRouted, overlay.ShapeBridge} {
		if err := lacksOnNode(sysctls, shape); err == nil || !strings.Contains(err.Error(), "modprobe -a br_netfilter") {
			t.Errorf("shape %s: %v", shape, err)
		}
	}
	if err := lacksOnNode(sysctls, spec.ShapeCalico); err != nil {
		t.Errorf("pods that are on no bridge: %v", err)
	}
	testenv.WriteFile(t, filepath.Join(sysctls, "net/bridge/bridge-nf-call-iptables"), "0\n")
	if err := lacksOnNode(sysctls, spec.ShapeFlannel); err != nil {
		t.Errorf("with br_netfilter: %v", err)
	}
}

// TestPrepareIPv6 checks that a lab has IPv6 where the machine disables it in new namespaces.
func TestPrepareIPv6(t *testing.T) {
	testenv.NeedRoot(t)
	h, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	ns, err := network.Adopt("of the test", h)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	if err := ns.Do(func() error {
		if err := network.Sysctl("net/ipv6/conf/all/disable_ipv6=1"); err != nil {
			return err
		}
		return prepareIPv6()
	}); err != nil {
		t.Fatal(err)
	}
	veth := netlink.NewVeth(network.LinkAttrs("eth0"))
	veth.PeerName = "eth1"
	if err := ns.Netlink.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"lo", "eth0"} {
		link, err := ns.Netlink.LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := ns.AddAddress(link, netip.PrefixFrom(network.Cluster6.Addr().Next(), 64)); err != nil {
			t.Error(err)
		}
	}
}
