//go:build linux

package lab

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/target/lab/network"
)

// setCongestionControl gives a namespace, whose routes are made, a congestion control that every
// program in it uses. The kernel lets a namespace other than the initial one choose among some
// only (TCP_CONG_NON_RESTRICTED); a route may name any of them.
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

// routeCongestionControl adds a congestion control (RTAX_CC_ALGO) to each route of a namespace that
// leads to others. The kernel takes it for the sockets of both sides where they connect
// (tcp_ca_dst_init and tcp_ca_openreq_child).
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
			r.Flags &= unix.RTNH_F_ONLINK // the rest is the kernel's to say
			if err := ns.Netlink.RouteReplace(&r); err != nil {
				return fmt.Errorf("set congestion control %s of route %s: %w", name, r, err)
			}
		}
	}
	return nil
}
