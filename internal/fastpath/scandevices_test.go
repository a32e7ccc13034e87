//go:build linux

package fastpath

import (
	"errors"
	"fmt"
	"net"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv"
)

// addLink adds a device to the thread's network namespace, sets it up, and returns its index.
func addLink(t *testing.T, l netlink.Link) int {
	t.Helper()
	if err := errors.Join(netlink.LinkAdd(l), netlink.LinkSetUp(l)); err != nil {
		t.Fatalf("add %s: %v", l.Attrs().Name, err)
	}
	return l.Attrs().Index
}

func named(name string) netlink.LinkAttrs {
	a := netlink.NewLinkAttrs()
	a.Name = name
	return a
}

// scanHere scans the devices of the thread's network namespace.
func scanHere(t *testing.T, known []netlink.Neigh, renew func() error) (node, error) {
	t.Helper()
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	return scanDevices(h, known, nil, func(ebpf.ProgramID) bool { return false }, renew)
}

// TestLeaseRenewedDuringScan checks that a scan renews the lease for each device and for each address that it looks up.
func TestLeaseRenewedDuringScan(t *testing.T) {
	testenv.EnterNamespace(t)
	const pods = 20
	bridge := addLink(t, &netlink.Bridge{LinkAttrs: named("bridge")})
	var known []netlink.Neigh
	for i := range pods {
		addLink(t, &netlink.Veth{LinkAttrs: named(fmt.Sprintf("pod%d", i)), PeerName: fmt.Sprintf("far%d", i)})
		known = append(known, netlink.Neigh{LinkIndex: bridge, IP: net.IPv4(10, 0, 0, byte(i)), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, byte(i)}})
	}
	renewals := 0
	if _, err := scanHere(t, known, func() error { renewals++; return nil }); err != nil {
		t.Fatal(err)
	}
	if renewals < 2*pods+pods {
		t.Errorf("the lease was renewed %d times for %d links and %d addresses", renewals, 2*pods, pods)
	}
	expired := errors.New("expired")
	if _, err := scanHere(t, known, func() error { return expired }); !errors.Is(err, expired) {
		t.Errorf("the scan goes on without a lease: %v", err)
	}
}
