//go:build linux

package fastpath

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath/datapath"
	"slipstream.dev/internal/netns"
)

// Pods can cause any number of notifications, for example by answering for many neighbours.
// So receive handles at most eventsMax messages of NETLINK_ROUTE in each eventsWithin. If the
// socket's buffer overruns meanwhile, the lost notifications invalidate all flows.
const eventsMax, eventsWithin = 500, 50 * time.Millisecond

// Multicast groups of NETLINK_XFRM (include/uapi/linux/xfrm.h).
const xfrmSA, xfrmPolicy = 3, 4

// invalidator subscribes to the netlink notifications of everything that can reroute or drop a packet. Every notification,
// except for irrelevant changes of neighbours and links, starts a new generation, which invalidates all flows.
type invalidator struct {
	filter  *datapath.NeighbourFilter
	sockets []*nl.NetlinkSocket
	closed  atomic.Bool
	running sync.WaitGroup
	notify  func(generation uint32, devices bool)

	mu         sync.Mutex
	generation uint32
	// links holds the relevant attributes of each link's last notification: the kernel also sends notifications in which none
	// of these has changed.
	links      map[string]string
	neighbours *neighbours
	// overruns counts how often notifications were lost.
	overruns int
}

// newInvalidator calls notify for each relevant change in a network namespace, until close. notify
// receives the generation, and whether the devices must be scanned.
func newInvalidator(ns netns.Handle, notify func(generation uint32, devices bool)) (c *invalidator, err error) {
	c = &invalidator{notify: notify, generation: 1, links: make(map[string]string)}
	defer func() {
		if err != nil {
			c.close()
			err = fmt.Errorf("subscribe to netlink notifications: %w", errors.Join(err, c.release()))
			c = nil
		}
	}()
	if c.filter, err = datapath.LoadNeighbourFilter(); err != nil {
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
		s, err := nl.SubscribeAt(ns, netns.None, protocol, groups...)
		if errors.Is(err, unix.EPROTONOSUPPORT) && protocol != unix.NETLINK_ROUTE {
			continue // the kernel lacks the subsystem, so nothing in it can change
		}
		if err != nil {
			return c, fmt.Errorf("netlink protocol %d: %w", protocol, err)
		}
		c.sockets = append(c.sockets, s)
		if protocol == unix.NETLINK_ROUTE {
			if err := c.filter.Attach(s.GetFd()); err != nil {
				return c, err
			}
		}
		// close closes the descriptor of s. This one stays valid until receive returns.
		fd, err := unix.FcntlInt(uintptr(s.GetFd()), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return c, os.NewSyscallError("fcntl", err)
		}
		c.running.Go(func() { c.receive(s, fd, protocol) })
	}
	return c, nil
}

func (c *invalidator) close() {
	c.closed.Store(true)
	for _, s := range c.sockets {
		s.Close()
	}
	c.running.Wait()
}

// release frees the filter. It must come after close and after the last sync, which uses the filter.
func (c *invalidator) release() error {
	if c.filter == nil {
		return nil
	}
	return c.filter.Close()
}

// receive handles the notifications of a socket until close. After its buffer has overrun (ENOBUFS), the kernel drops every
// further notification until the buffer is empty, and reports no second error (netlink_overrun in net/netlink/af_netlink.c).
// So receive empties it first, and only then handles the loss: a scan that began earlier might miss what the kernel dropped
// meanwhile. Emptying takes about a millisecond.
func (c *invalidator) receive(s *nl.NetlinkSocket, fd, protocol int) {
	defer unix.Close(fd)
	received, since, emptying := 0, time.Now(), false
	for {
		if received == eventsMax && protocol == unix.NETLINK_ROUTE {
			time.Sleep(eventsWithin - time.Since(since))
		}
		if received == eventsMax || time.Since(since) > eventsWithin {
			received, since = 0, time.Now()
			if emptying {
				c.overrun(protocol) // notifications come so fast that the buffer does not become empty
			}
		}
		received++
		var messages []syscall.NetlinkMessage
		from := new(unix.SockaddrNetlink)
		var err error
		if emptying {
			_, _, err = unix.Recvfrom(fd, nil, unix.MSG_DONTWAIT)
		} else {
			messages, from, err = s.Receive()
		}
		switch {
		case c.closed.Load():
			return
		case emptying && errors.Is(err, unix.EAGAIN):
			c.overrun(protocol)
			emptying = false
		case err != nil:
			emptying = true
		case emptying, from.Pid != nl.PidKernel:
		default:
			c.handle(protocol, messages, time.Now())
		}
	}
}

// handle applies a batch of notifications.
func (c *invalidator) handle(protocol int, messages []syscall.NetlinkMessage, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var invalidated, devices bool
	for _, m := range messages {
		i, d := c.apply(protocol, m, now)
		invalidated, devices = invalidated || i, devices || d
	}
	c.publish(invalidated, devices)
}

// overrun handles the loss of notifications. Any of them may have concerned a device: between many nftables rules, there may
// have been a new chain at a device.
func (c *invalidator) overrun(protocol int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if protocol == unix.NETLINK_ROUTE {
		c.overruns++
		clear(c.links)
		c.neighbours.overrun()
	}
	c.publish(true, true)
}

func (c *invalidator) invalidate() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.publish(true, false)
}

// publish starts a new generation if flows are invalidated, and calls notify if anything changed.
func (c *invalidator) publish(invalidated, devices bool) {
	if invalidated {
		c.generation++
	}
	if invalidated || devices {
		c.notify(c.generation, devices)
	}
}

// apply applies a notification. It returns whether it invalidates flows, and whether the devices must
// be scanned.
func (c *invalidator) apply(protocol int, m syscall.NetlinkMessage, now time.Time) (invalidated, devices bool) {
	if protocol != unix.NETLINK_ROUTE {
		return true, concernsObserver(protocol, m)
	}
	switch m.Header.Type {
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		return c.neighbours.apply(m.Header.Type == unix.RTM_DELNEIGH, m.Data, now)
	case unix.RTM_GETNEIGH:
		return false, false // the kernel asks user space to resolve one (app_solicit); nothing has changed
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		key, value := parseLink(m.Data)
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

// concernsObserver reports whether a notification of nftables or IPsec may concern an observer: a
// chain or flowtable of nftables at a device, or an IPsec policy.
func concernsObserver(protocol int, m syscall.NetlinkMessage) bool {
	if protocol != unix.NETLINK_NETFILTER {
		return true
	}
	switch m.Header.Type & 0xff {
	case unix.NFT_MSG_NEWCHAIN:
		_, ok := chainOf(m.Data)
		return ok
	case unix.NFT_MSG_NEWFLOWTABLE, unix.NFT_MSG_DELFLOWTABLE:
		return true
	case unix.NFT_MSG_DELCHAIN, unix.NFT_MSG_DELTABLE: // these do not name the hook
		return len(m.Data) > 0 && (m.Data[0] == unix.NFPROTO_NETDEV || m.Data[0] == unix.NFPROTO_INET)
	}
	return false
}

// known returns the usable neighbours. The first time, and after an overrun, it calls list to complete them.
func (c *invalidator) known(list func() ([]netlink.Neigh, error)) ([]netlink.Neigh, error) {
	c.mu.Lock()
	complete, overruns := c.neighbours.complete, c.overruns
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
		c.neighbours.merge(more, time.Now())
		c.neighbours.complete = c.neighbours.complete && c.overruns == overruns
	}
	return c.neighbours.list(time.Now()), nil
}

// setLinkMACs calls set to write the admitted owners of a node to the programs' map, and returns the throttled links, which
// have no owners for now. No notification about an old or new owner may be missed: prepare adds the new owners before the
// write, and commit removes the old ones after it. Removing an owner invalidates flows, because the filter drops later
// notifications about it.
func (c *invalidator) setLinkMACs(n *node, set func([]datapath.LinkMAC) error) (throttled []int, err error) {
	c.mu.Lock()
	n.owners, throttled = c.neighbours.admit(n.owners, time.Now())
	c.neighbours.prepare(n.owners)
	c.mu.Unlock()
	if err := set(n.owners); err != nil {
		return throttled, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.publish(c.neighbours.commit(*n, time.Now()), false)
	return throttled, nil
}

// throttled reports whether any link or address is throttled.
func (c *invalidator) throttled() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.neighbours.changed.anyExceeded() || c.neighbours.moved.anyExceeded()
}

// parseLink returns a key for the link of a notification, and all attributes that matter to a packet. The key is empty if the
// message is truncated or is about the state or VLANs of a bridge port: these always count as a change.
func parseLink(data []byte) (key, value string) {
	// struct ifinfomsg: family, padding, type, index, flags, change.
	if len(data) < unix.SizeofIfInfomsg {
		return "", ""
	}
	value = fmt.Sprintf("%x", data[8:12])
	port := false
	err := netns.Attributes(data[unix.SizeofIfInfomsg:], func(kind uint16, is []byte) {
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
