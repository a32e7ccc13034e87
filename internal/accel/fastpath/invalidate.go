//go:build linux

package fastpath

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"slipstream.dev/bpf"
)

// Of a socket that announces what pods can cause, by answers of many neighbours, say, no more than
// hearMost messages are heard in each hearWithin. Then the kernel waits, for as long at most; what
// it has no room for meanwhile is lost, which has all that was seen be void.
const eventsMax, eventsWithin = 500, 50 * time.Millisecond

// Multicast groups of NETLINK_XFRM (include/uapi/linux/xfrm.h).
const xfrmSA, xfrmPolicy = 3, 4

// invalidator are what the kernel announces of what could send a packet elsewhere, or end it. Of
// neighbours and links it matters what is said; of all else that something is: all that was seen
// before is void.
type invalidator struct {
	filter  *bpf.Neighbours
	sockets []*nl.NetlinkSocket
	closed  atomic.Bool
	running sync.WaitGroup
	notify  func(generation uint32, devices bool)

	mu         sync.Mutex
	generation uint32
	// links is the last of what was announced of each, as they are announced again and again
	// without having changed, when a device counts for one.
	links      map[string]string
	neighbours *neighbours
	// lost counts how often more was announced than could be heard.
	lost int
}

// newInvalidator calls notify, until closed, with a new generation for each change in a network
// namespace, and whether it may be one of devices.
func newInvalidator(ns netns.NsHandle, notify func(generation uint32, devices bool)) (c *invalidator, err error) {
	c = &invalidator{notify: notify, generation: 1, links: make(map[string]string)}
	defer func() {
		if err != nil {
			c.close()
			err = fmt.Errorf("listen to what changes: %w", errors.Join(err, c.release()))
			c = nil
		}
	}()
	if c.filter, err = bpf.LoadNeighbours(); err != nil {
		return c, err
	}
	c.neighbours = newNeighbours(c.filter)
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
			return c, fmt.Errorf("netlink protocol %d: %w", protocol, err)
		}
		c.sockets = append(c.sockets, s)
		if protocol == unix.NETLINK_ROUTE {
			if err := c.filter.Filter(s.GetFd()); err != nil {
				return c, err
			}
		}
		c.running.Go(func() { c.follow(s, protocol) })
	}
	return c, nil
}

// close has it listen no more.
func (c *invalidator) close() {
	c.closed.Store(true)
	for _, s := range c.sockets {
		s.Close()
	}
	c.running.Wait()
}

// release comes after close, and after the last look.
func (c *invalidator) release() error {
	if c.filter == nil {
		return nil
	}
	return c.filter.Close()
}

func (c *invalidator) follow(s *nl.NetlinkSocket, protocol int) {
	heard, since := 0, time.Now()
	for {
		if heard == eventsMax && protocol == unix.NETLINK_ROUTE {
			time.Sleep(eventsWithin - time.Since(since))
		}
		if heard == eventsMax || time.Since(since) > eventsWithin {
			heard, since = 0, time.Now()
		}
		heard++
		messages, from, err := s.Receive()
		switch {
		case err != nil && c.closed.Load():
			return
		case err != nil:
			// More came than there was room for: anything may have changed.
			c.lose(protocol)
			continue
		case from.Pid != nl.PidKernel:
			continue
		}
		c.hear(protocol, messages, time.Now())
	}
}

// hear goes by what is announced.
func (c *invalidator) hear(protocol int, messages []syscall.NetlinkMessage, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var void, devices bool
	for _, m := range messages {
		v, d := c.says(protocol, m, now)
		void, devices = void || v, devices || d
	}
	c.tell(void, devices)
}

// lose does without what was announced and not heard.
func (c *invalidator) lose(protocol int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if protocol == unix.NETLINK_ROUTE {
		c.lost++
		clear(c.links)
		c.neighbours.lose()
	}
	c.tell(true, protocol == unix.NETLINK_ROUTE)
}

// void makes void all that was seen.
func (c *invalidator) void() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tell(true, false)
}

func (c *invalidator) tell(void, devices bool) {
	if void {
		c.generation++
	}
	if void || devices {
		c.notify(c.generation, devices)
	}
}

// says tells whether by a message something that was seen may not be so any more, and whether the
// devices are to be looked at.
func (c *invalidator) says(protocol int, m syscall.NetlinkMessage, now time.Time) (void, devices bool) {
	if protocol != unix.NETLINK_ROUTE {
		return true, observes(protocol, m)
	}
	switch m.Header.Type {
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		return c.neighbours.says(m.Header.Type == unix.RTM_DELNEIGH, m.Data, now)
	case unix.RTM_GETNEIGH:
		return false, false // the kernel asks whether anybody knows one
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		key, value := linkOf(m.Data)
		if before, known := c.links[key]; known && before == value && m.Header.Type == unix.RTM_NEWLINK {
			return false, false
		}
		delete(c.links, key)
		if key != "" && m.Header.Type == unix.RTM_NEWLINK {
			c.links[key] = value
		}
	}
	return true, true
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

// known are the neighbours that packets are sent to at once. Where not all were heard of, list
// tells of them.
func (c *invalidator) known(list func() ([]netlink.Neigh, error)) ([]netlink.Neigh, error) {
	c.mu.Lock()
	complete, lost := c.neighbours.complete, c.lost
	c.mu.Unlock()
	var more []netlink.Neigh
	if !complete {
		var err error
		if more, err = list(); err != nil {
			return nil, err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !complete {
		c.neighbours.find(more, time.Now())
		c.neighbours.complete = c.neighbours.complete && c.lost == lost
	}
	return c.neighbours.list(time.Now()), nil
}

// own has set tell the programs of a node's owners, less those that are not admitted, and returns
// the links that have none for now. All that is announced of owners before, after and meanwhile is
// gone by: what was seen of those that are taken back is void, as it is not heard of them again.
func (c *invalidator) own(n *node, set func([]bpf.LinkMAC) error) (restless []int, err error) {
	c.mu.Lock()
	n.owners, restless = c.neighbours.admit(n.owners, time.Now())
	c.neighbours.expect(n.owners)
	c.mu.Unlock()
	if err := set(n.owners); err != nil {
		return restless, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tell(c.neighbours.settle(*n, time.Now()), false)
	return restless, nil
}

// restless tells whether any links have no owners for now, or addresses are not heard of.
func (c *invalidator) restless() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.neighbours.changed.any() || c.neighbours.moved.any()
}

// linkOf says of a message about a link which it is, and all of it that matters to a packet. Of
// one that is cut short, and one of a bridge's port, its VLANs and its state, it does not say which.
func linkOf(data []byte) (key, value string) {
	// struct ifinfomsg: family, padding, type, index, flags, change.
	if len(data) < unix.SizeofIfInfomsg {
		return "", ""
	}
	value = fmt.Sprintf("%x", data[8:12])
	port := false
	err := attributes(data[unix.SizeofIfInfomsg:], func(kind uint16, is []byte) {
		switch kind {
		case unix.IFLA_IFNAME, unix.IFLA_ADDRESS, unix.IFLA_MTU, unix.IFLA_LINK, unix.IFLA_MASTER, unix.IFLA_OPERSTATE,
			unix.IFLA_LINK_NETNSID, unix.IFLA_XDP, unix.IFLA_QDISC, unix.IFLA_PROTO_DOWN:
			value += fmt.Sprintf(" %d=%x", kind, is)
		case unix.IFLA_PROTINFO, unix.IFLA_AF_SPEC:
			port = port || data[0] == unix.AF_BRIDGE
		}
	})
	if err != nil || port {
		return "", ""
	}
	return fmt.Sprintf("%d %x", data[0], data[4:8]), value
}
