//go:build linux

package lab

import (
	"net"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"slipstream.dev/internal/collect"
	"slipstream.dev/internal/place/lab/network"
	"slipstream.dev/internal/spec"
)

// TestCongestionControl checks that both ends of a connection without a congestion control of its own use the lab's, whether
// the kernel permits the sysctl or only routes may name it.
func TestCongestionControl(t *testing.T) {
	text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_available_congestion_control")
	if err != nil {
		t.Fatal(err)
	}
	available := strings.Fields(string(text))
	for _, shape := range []string{spec.ShapeFlannel, spec.ShapeCalico} {
		for _, name := range available {
			t.Run(shape+" "+name, func(t *testing.T) {
				l := up(t, func(c *Config) { c.Shape, c.CongestionControl = shape, name })
				checkCongestionControl(t, l, name)
			})
		}
		t.Run(shape+" by routes", func(t *testing.T) { // unlike the default of the namespaces
			own, other := available[0], available[len(available)-1]
			l := up(t, func(c *Config) { c.Shape, c.CongestionControl = shape, own })
			for _, p := range l.Places() {
				routeThrough(t, l, p.Name, other)
			}
			checkCongestionControl(t, l, other)
		})
	}
}

// routeThrough sets the congestion control of a place's routes, and checks that they do not change otherwise.
func routeThrough(t *testing.T, l *Lab, place, name string) {
	t.Helper()
	file, err := l.find(place)
	if err != nil {
		t.Fatal(err)
	}
	ns, err := network.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	before := routes(t, ns)
	if err := routeCongestionControl(ns, name); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, routes(t, ns)); diff != "" {
		t.Errorf("%s: other routes than before (-before +after):\n%s", place, diff)
	}
}

func checkCongestionControl(t *testing.T, l *Lab, want string) {
	t.Helper()
	for _, ends := range [][2]string{{"node0", "node1"}, {"node0/pod0", "node1/pod0"}} {
		for _, version := range []int{4, 6} {
			for i, got := range congestionControls(t, l, ends, version) {
				if !slices.Equal(got, []string{want}) {
					t.Errorf("IPv%d, %s to %s: %s has %q, want %q", version, ends[0], ends[1], ends[i], got, want)
				}
			}
		}
	}
}

func congestionControls(t *testing.T, l *Lab, ends [2]string, version int) (got [2][]string) {
	t.Helper()
	var listener net.Listener
	in(t, l, ends[1], func() (err error) {
		listener, err = net.ListenTCP("tcp", &net.TCPAddr{IP: placeOf(t, l, ends[1]).IP(version).AsSlice()})
		return err
	})
	defer listener.Close()
	port := uint16(listener.Addr().(*net.TCPAddr).Port)
	in(t, l, ends[0], func() error {
		client, err := net.Dial("tcp", listener.Addr().String())
		if err != nil {
			return err
		}
		defer client.Close()
		server, err := listener.Accept()
		if err != nil {
			return err
		}
		defer server.Close()
		if got[0], err = collect.CongestionControl(port, true); err != nil {
			return err
		}
		in(t, l, ends[1], func() (err error) {
			got[1], err = collect.CongestionControl(port, false)
			return err
		})
		return nil
	})
	return got
}

// routes describes the routes of a namespace, without their congestion control.
func routes(t *testing.T, ns *network.Namespace) (all []string) {
	t.Helper()
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := ns.Netlink.RouteList(nil, family)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range list {
			all = append(all, r.String())
		}
	}
	slices.Sort(all)
	return all
}
