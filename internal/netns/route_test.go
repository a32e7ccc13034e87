package netns

import (
	"net"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
)

func TestRoutes(t *testing.T) {
	subnet := func(ones, bits int) *net.IPNet {
		return &net.IPNet{IP: make(net.IP, bits/8), Mask: net.CIDRMask(ones, bits)}
	}
	for name, tt := range map[string]struct {
		route netlink.Route
		usual bool
		links []int
	}{
		"no destination": {netlink.Route{LinkIndex: 2}, true, []int{2}},
		"0.0.0.0/0":      {netlink.Route{Dst: subnet(0, 32), LinkIndex: 2}, true, []int{2}},
		"::/0":           {netlink.Route{Dst: subnet(0, 128), LinkIndex: 2}, true, []int{2}},
		"a subnet":       {netlink.Route{Dst: subnet(24, 32), LinkIndex: 2}, false, []int{2}},
		"several paths":  {netlink.Route{MultiPath: []*netlink.NexthopInfo{{LinkIndex: 3}, {LinkIndex: 2}}}, true, []int{3, 2}},
	} {
		if got := IsDefaultRoute(tt.route); got != tt.usual {
			t.Errorf("%s: IsDefaultRoute is %v", name, got)
		}
		if got := RouteLinks(tt.route); !slices.Equal(got, tt.links) {
			t.Errorf("%s: RouteLinks is %v, want %v", name, got, tt.links)
		}
	}
}
