//go:build linux

package fastpath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Multicast groups of NETLINK_XFRM (include/uapi/linux/xfrm.h).
const xfrmSA, xfrmPolicy = 3, 4

// changes are what the kernel announces of what could send a packet elsewhere, or end
// it. What each says does not matter: all that was seen before is void.
type changes struct {
	sockets []*nl.NetlinkSocket
	closed  atomic.Bool
	running sync.WaitGroup
	notify  func(generation uint32, devices bool)

	mu         sync.Mutex
	generation uint32
	// known is the last of what is announced again and again without having changed:
	// neighbours that were confirmed, devices that count.
	known map[string]string
}

// listen calls notify, until closed, with a new generation for each change in a network
// namespace, and whether it may be one of devices.
func listen(ns netns.NsHandle, notify func(generation uint32, devices bool)) (*changes, error) {
	c := &changes{notify: notify, generation: 1, known: make(map[string]string)}
	for protocol, groups := range map[int][]uint{
		unix.NETLINK_ROUTE: {unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_TC, unix.RTNLGRP_NEXTHOP,
			unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV4_RULE,
			unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV6_RULE},
		unix.NETLINK_NETFILTER: {unix.NFNLGRP_NFTABLES},
		unix.NETLINK_XFRM:      {xfrmSA, xfrmPolicy},
	} {
		s, err := nl.SubscribeAt(ns, netns.None(), protocol, groups...)
		if errors.Is(err, unix.EPROTONOSUPPORT) && protocol != unix.NETLINK_ROUTE {
			continue // what the kernel has not cannot change
		}
		if err != nil {
			c.close()
			return nil, fmt.Errorf("listen to what changes (netlink protocol %d): %w", protocol, err)
		}
		c.sockets = append(c.sockets, s)
		c.running.Add(1)
		go c.follow(s, protocol)
	}
	return c, nil
}

func (c *changes) close() {
	c.closed.Store(true)
	for _, s := range c.sockets {
		s.Close()
	}
	c.running.Wait()
}

func (c *changes) follow(s *nl.NetlinkSocket, protocol int) {
	defer c.running.Done()
	for {
		messages, from, err := s.Receive()
		switch {
		case err != nil && c.closed.Load():
			return
		case err != nil:
			// More came than there was room for: anything may have changed.
			c.mu.Lock()
			clear(c.known)
			c.mu.Unlock()
			c.change(true)
			continue
		case from.Pid != nl.PidKernel:
			continue
		}
		changed, devices := false, false
		for _, m := range messages {
			if protocol != unix.NETLINK_ROUTE {
				changed = true
				devices = devices || observes(protocol, m)
				continue
			}
			if c.says(m) {
				changed, devices = true, true
			}
		}
		if changed {
			c.change(devices)
		}
	}
}

// observes tells whether a message that is not of devices may be of what looks at their packets:
// chains of nftables at devices, IPsec.
func observes(protocol int, m syscall.NetlinkMessage) bool {
	if protocol != unix.NETLINK_NETFILTER {
		return true
	}
	switch m.Header.Type & 0xff {
	case unix.NFT_MSG_NEWCHAIN:
		_, ok := chainOf(m.Data)
		return ok
	case unix.NFT_MSG_DELCHAIN, unix.NFT_MSG_DELTABLE: // which do not say where it was
		return len(m.Data) > 0 && (m.Data[0] == unix.NFPROTO_NETDEV || m.Data[0] == unix.NFPROTO_INET)
	}
	return false
}

func (c *changes) change(devices bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.generation++
	c.notify(c.generation, devices)
}

// says tells whether a message has something new.
func (c *changes) says(m syscall.NetlinkMessage) bool {
	key, value, gone := digest(m.Header.Type, m.Data)
	if key == "" {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	before, known := c.known[key]
	switch {
	case gone:
		delete(c.known, key)
		return true
	case known && before == value:
		return false
	}
	c.known[key] = value
	return true
}

// States of a neighbour in which packets are sent to it at once (NUD_VALID in
// include/net/neighbour.h, less those without an address).
const usable = unix.NUD_PERMANENT | unix.NUD_NOARP | unix.NUD_REACHABLE | unix.NUD_PROBE | unix.NUD_STALE | unix.NUD_DELAY

// digest says of a message about a neighbour or a link what it is about, and all of it
// that matters to a packet. Of any other message, and one that is cut short, the key is empty.
func digest(kind uint16, data []byte) (key, value string, gone bool) {
	switch kind {
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		// struct ndmsg: family, 3 of padding, index, state, flags, type.
		if len(data) < unix.SizeofNdMsg {
			return "", "", true
		}
		attrs, err := nl.ParseRouteAttr(data[unix.SizeofNdMsg:])
		if err != nil {
			return "", "", true
		}
		state := binary.NativeEndian.Uint16(data[8:])
		var destination, address, rest string
		for _, a := range attrs {
			switch a.Attr.Type &^ unix.NLA_F_NESTED {
			case unix.NDA_DST:
				destination = string(a.Value)
			case unix.NDA_LLADDR:
				address = string(a.Value)
			case unix.NDA_CACHEINFO, unix.NDA_PROBES:
			default:
				rest += fmt.Sprintf(" %d=%x", a.Attr.Type, a.Value)
			}
		}
		key, value = destination, address
		if data[0] == unix.AF_BRIDGE {
			key, value = address, destination
		}
		// By family, device and flags: entries of a bridge and of its port are two.
		key = fmt.Sprintf("neighbour %d %x %x %x %s", data[0], data[4:8], data[10], key, rest)
		value = fmt.Sprintf("%x %t", value, state&usable != 0 || data[0] == unix.AF_BRIDGE)
		return key, value, kind == unix.RTM_DELNEIGH
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		// struct ifinfomsg: family, padding, type, index, flags, change.
		if len(data) < unix.SizeofIfInfomsg {
			return "", "", true
		}
		attrs, err := nl.ParseRouteAttr(data[unix.SizeofIfInfomsg:])
		if err != nil {
			return "", "", true
		}
		key = fmt.Sprintf("link %d %x", data[0], data[4:8])
		value = fmt.Sprintf("%x", data[8:12])
		for _, a := range attrs {
			switch a.Attr.Type &^ unix.NLA_F_NESTED {
			case unix.IFLA_IFNAME, unix.IFLA_ADDRESS, unix.IFLA_MTU, unix.IFLA_LINK, unix.IFLA_MASTER, unix.IFLA_OPERSTATE,
				unix.IFLA_LINK_NETNSID, unix.IFLA_XDP, unix.IFLA_QDISC, unix.IFLA_PROTO_DOWN:
				value += fmt.Sprintf(" %d=%x", a.Attr.Type, a.Value)
			case unix.IFLA_PROTINFO, unix.IFLA_AF_SPEC:
				// Of a bridge's port: its state, its VLANs.
				if data[0] == unix.AF_BRIDGE {
					return "", "", true
				}
			}
		}
		return key, value, kind == unix.RTM_DELLINK
	}
	return "", "", false
}
