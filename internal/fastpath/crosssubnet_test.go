//go:build linux

package fastpath_test

import (
	"fmt"
	"net"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/spec"
)

// TestCrossSubnet has nodes that reach one of each other's pods through VXLAN and the other by a plain route, as with Calico's
// VXLANCrossSubnet. Connections to both must be accelerated at the same time, each on the kernel's path, and the second must
// follow when its route changes to the tunnel and back.
func TestCrossSubnet(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeCalico, spec.OffloadFull)
	route := func(change func(*netlink.Route) error) {
		t.Helper()
		for node := range 2 {
			w.in(fmt.Sprintf("n%d", node), func() error {
				eth0, err := netlink.LinkByName("eth0")
				if err != nil {
					return err
				}
				return change(&netlink.Route{LinkIndex: eth0.Attrs().Index, Dst: prefix(pod(1-node, 1), 32), Gw: net.IPv4(198, 18, 0, byte(2-node)).To4()})
			})
		}
	}
	route(netlink.RouteAdd)
	w.start()
	tunnelled, routed := w.connectOf(0, direct).back(), w.connectOf(1, direct).back()
	w.accelerate(tunnelled)
	w.accelerate(routed)
	// plain counts the packets of a connection on the wire that are not encapsulated.
	plain := func(e echo) int {
		t.Helper()
		w.shape = overlay.ShapeRouted // what capture looks for
		defer func() { w.shape = spec.ShapeCalico }()
		stop := w.capture(unix.IPPROTO_TCP, uint16(e.RemoteAddr().(*net.TCPAddr).Port))
		w.trip(e, 100)
		return len(stop())
	}
	both := func(when string, want int) {
		t.Helper()
		if n := plain(tunnelled); n > 0 {
			t.Errorf("%s: %d packets of the tunnelled connection are on the wire without encapsulation", when, n)
		}
		if n := plain(routed); (n >= 100) != (want > 0) || want == 0 && n > 0 {
			t.Errorf("%s: %d packets of the other connection are on the wire without encapsulation, want %d", when, n, want)
		}
		w.accelerate(tunnelled)
		w.accelerate(routed)
	}
	both("with the route", 100)
	route(netlink.RouteDel)
	both("without the route", 0)
	route(netlink.RouteAdd)
	both("with the route again", 100)
	for node, p := range w.paths {
		for _, e := range []echo{tunnelled, routed} {
			if n := w.roundTrips(e, node, 100); n < 150 {
				t.Errorf("node%d: of 200 packets %d took the fast path", node, n)
			}
		}
		if err := p.Problem(); err != nil {
			t.Error(err)
		}
	}
}
