package netns

import "github.com/vishvananda/netlink"

// IsDefaultRoute reports whether a route takes packets for any address.
func IsDefaultRoute(r netlink.Route) bool {
	if r.Dst == nil {
		return true
	}
	ones, _ := r.Dst.Mask.Size()
	return ones == 0
}

// RouteLinks returns the indexes of the links that a route sends packets over: one, or one for each of its next hops.
func RouteLinks(r netlink.Route) (links []int) {
	if r.LinkIndex != 0 {
		links = append(links, r.LinkIndex)
	}
	for _, hop := range r.MultiPath {
		links = append(links, hop.LinkIndex)
	}
	return links
}
