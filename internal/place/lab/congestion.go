//go:build linux

package lab

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/place/lab/network"
)

// setCongestionControl sets the default congestion control of a namespace that already has its routes. Outside the initial
// namespace, the kernel restricts the sysctl (TCP_CONG_NON_RESTRICTED), but a route may name any congestion control.
func setCongestionControl(ns *network.Namespace, name string) error {
	if name == "" {
		return nil
	}
	err := ns.Do(func() error { return network.Sysctl("net/ipv4/tcp_congestion_control=" + name) })
	if errors.Is(err, fs.ErrPermission) {
		err = routeCongestionControl(ns, name)
	}
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("no congestion control %q (see net.ipv4.tcp_available_congestion_control): %w", name, err)
	}
	return err
}

// routeCongestionControl adds a congestion control (RTAX_CC_ALGO) to each unicast route of a namespace. Sockets on both sides
// of a connection take it from the route (tcp_ca_dst_init and tcp_ca_openreq_child).
func routeCongestionControl(ns *network.Namespace, name string) error {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := ns.Netlink.RouteList(nil, family)
		if err != nil {
			return fmt.Errorf("list routes: %w", err)
		}
		for _, r := range routes {
			if r.Type != unix.RTN_UNICAST || r.Dst != nil && r.Dst.IP.IsLinkLocalUnicast() {
				continue
			}
			r.Congctl = name
			r.Flags &= unix.RTNH_F_ONLINK // the kernel sets the other flags itself
			if err := ns.Netlink.RouteReplace(&r); err != nil {
				return fmt.Errorf("set congestion control %s of route %s: %w", name, r, err)
			}
		}
	}
	return nil
}
