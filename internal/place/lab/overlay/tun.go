//go:build linux

package overlay

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// Device and port of flannel's backend udp (pkg/backend/udp).
const (
	tunName = "flannel0"
	udpPort = 8285
)

// forwarderRoute maps a pod prefix to its node.
type forwarderRoute struct {
	Pods netip.Prefix   `json:"pods"`
	Node netip.AddrPort `json:"node"`
}

// openTUN creates a TUN device in the thread's namespace. It exists as long as a process has it open.
func openTUN(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	request, err := unix.NewIfreq(name)
	if err == nil {
		request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("create TUN device %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// makeTUN creates the TUN device of a node, and starts the process that forwards packets between it and a UDP socket. Unlike
// flannel's, it also forwards IPv6.
func (h *Host) makeTUN() error {
	var tun *os.File
	if err := h.ns.Do(func() (err error) {
		tun, err = openTUN(tunName)
		return err
	}); err != nil {
		return err
	}
	defer tun.Close()

	device, err := h.ns.Netlink.LinkByName(tunName)
	if err != nil {
		return fmt.Errorf("find %s: %w", tunName, err)
	}
	mtu, _ := h.overlay.mtu()
	if err := h.ns.Netlink.LinkSetMTU(device, mtu); err != nil {
		return fmt.Errorf("set MTU of %s: %w", tunName, err)
	}
	if err := h.ns.SetUp(tunName); err != nil {
		return err
	}
	for _, own := range []netip.Addr{h.node.Pods4.Addr(), h.node.Pods6.Addr()} {
		if err := h.ns.AddAddress(device, netip.PrefixFrom(own, own.BitLen())); err != nil {
			return err
		}
	}
	// flannel routes the whole cluster to the device, and its proxy answers packets to unknown nodes. Here the kernel answers
	// them, because only known prefixes have a route.
	var f forwarding
	for _, n := range h.others {
		for _, p := range []netip.Prefix{n.Pods4, n.Pods6} {
			f.Routes = append(f.Routes, forwarderRoute{Pods: p, Node: netip.AddrPortFrom(n.Place.IPv4, udpPort)})
			if err := h.ns.LinkRoute(device, p); err != nil {
				return err
			}
		}
	}
	if err := h.ns.AwaitLocal(h.node.Pods6.Addr()); err != nil {
		return err
	}
	return h.startForwarder(f, tun, udpPort)
}

// packetRelay relays packets of a TUN device.
type packetRelay struct {
	tun, socket int
	routes      []relayRoute
	packet      []byte
}

type relayRoute struct {
	pods netip.Prefix
	node *unix.RawSockaddrInet4
}

func newPacketRelay(tun, socket int, f forwarding) *packetRelay {
	r := &packetRelay{tun: tun, socket: socket, packet: make([]byte, f.MTU)}
	for _, route := range f.Routes {
		r.routes = append(r.routes, relayRoute{route.Pods, sockaddr(route.Node)})
	}
	return r
}

// send implements relay, for one packet. It sends the packet to the node of its destination.
func (r *packetRelay) send() (bool, error) {
	n, err := raw(unix.SYS_READ, r.tun, r.packet, nil)
	if err != 0 {
		return false, quiet("read from TUN device", err)
	}
	to, ok := hop(r.packet[:n])
	node := r.route(to)
	if !ok || node == nil {
		return true, nil
	}
	return true, put(r.socket, r.packet[:n], node)
}

func (r *packetRelay) receive() (bool, error) {
	n, err := raw(unix.SYS_READ, r.socket, r.packet, nil)
	if err != 0 {
		return false, quiet("read from socket", err)
	}
	if _, ok := hop(r.packet[:n]); !ok {
		return true, nil
	}
	// The device accepts only IP packets; others are lost.
	if _, err := raw(unix.SYS_WRITE, r.tun, r.packet[:n], nil); err == unix.EBADFD {
		return true, fmt.Errorf("write to TUN device: %w", err)
	}
	return true, nil
}

// route finds the node of an address. Packets come in bursts, so it moves the matching route to the front.
func (r *packetRelay) route(to netip.Addr) *unix.RawSockaddrInet4 {
	for i := range r.routes {
		if r.routes[i].pods.Contains(to) {
			r.routes[0], r.routes[i] = r.routes[i], r.routes[0]
			return r.routes[0].node
		}
	}
	return nil
}

// hop decrements the TTL of a packet, and returns its destination, or none if it is not IP or its TTL has expired.
func hop(packet []byte) (to netip.Addr, ok bool) {
	switch {
	case len(packet) >= 20 && packet[0]>>4 == 4:
		if packet[8] <= 1 {
			return to, false
		}
		packet[8]--
		// Decrementing the high byte of a word increments that of the checksum (RFC 1624).
		sum := uint32(packet[10])<<8 | uint32(packet[11])
		sum += 0x100
		sum += sum >> 16
		packet[10], packet[11] = byte(sum>>8), byte(sum)
		return netip.AddrFrom4([4]byte(packet[16:20])), true
	case len(packet) >= 40 && packet[0]>>4 == 6:
		if packet[7] <= 1 {
			return to, false
		}
		packet[7]--
		return netip.AddrFrom16([16]byte(packet[24:40])), true
	}
	return to, false
}

// probeTUN tests whether the kernel has TUN devices.
func probeTUN() error {
	tun, err := openTUN("probe-tun")
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("%w: load the module (modprobe tun), or use a kernel with CONFIG_TUN (in a container: --device /dev/net/tun)", err)
	}
	if err != nil {
		return err
	}
	return tun.Close()
}
