//go:build linux

package overlay

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// flannel's udp backend (pkg/backend/udp): its device and its port, and what it
// adds to a packet, 20 bytes of IP and 8 of UDP.
const (
	tunName     = "flannel0"
	udpPort     = 8285
	overheadUDP = 28
)

// The file descriptors that a forwarder inherits.
const (
	forwarderTUN    = 3
	forwarderSocket = 4
)

// forwarderStart bounds how long a forwarder may take to start.
const forwarderStart = 30 * time.Second

// forwarding is a forwarder's configuration.
type forwarding struct {
	Routes []forwarderRoute `json:"routes"`
	// MTU of the device.
	MTU int `json:"mtu"`
	// Keep means that the forwarder continues after the end of its standard input.
	Keep bool `json:"keep"`
}

// forwarderRoute maps a prefix of pods to their node.
type forwarderRoute struct {
	Pods netip.Prefix   `json:"pods"`
	Node netip.AddrPort `json:"node"`
}

// openTUN creates a TUN device in the thread's namespace, which exists while a process has it open.
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

// makeForwarder creates the TUN device of a node, and starts the process that forwards packets between it and a
// UDP socket. flannel's forwards only IPv4; this one also forwards IPv6.
func (h *Host) makeForwarder() error {
	f := forwarding{Keep: h.overlay.Keep}
	f.MTU, _ = h.overlay.mtu()
	var tun, socket *os.File
	if err := h.ns.Do(func() (err error) {
		if tun, err = openTUN(tunName); err != nil {
			return err
		}
		conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(h.node.Place.IPv4, udpPort)))
		if err != nil {
			return fmt.Errorf("open UDP socket: %w", err)
		}
		defer conn.Close()
		socket, err = conn.File()
		return err
	}); err != nil {
		if tun != nil {
			tun.Close()
		}
		return err
	}
	defer tun.Close()
	defer socket.Close()

	device, err := h.ns.Netlink.LinkByName(tunName)
	if err != nil {
		return fmt.Errorf("find %s: %w", tunName, err)
	}
	if err := h.ns.Netlink.LinkSetMTU(device, f.MTU); err != nil {
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
	// flannel routes the whole cluster to the device, and its proxy answers packets to unknown nodes; here the
	// kernel does.
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
	return h.startForwarder(f, tun, socket)
}

// startForwarder starts the forwarder of a node, and returns when it forwards. It runs in the node's
// namespace, so removing the lab kills it like everything else there.
func (h *Host) startForwarder(f forwarding, tun, socket *os.File) error {
	name, argv := h.node.Place.Name, h.overlay.Forwarder
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.ExtraFiles = []*os.File{tun, socket}
	// Ctrl-C in a terminal must not kill the forwarder before the lab is removed.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	var said strings.Builder
	cmd.Stderr = &said
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return errors.Join(err, stdin.Close())
	}
	if err := h.overlay.Processes.Start(h.index, cmd); err != nil {
		return errors.Join(err, stdin.Close(), stdout.Close())
	}
	err = json.NewEncoder(stdin).Encode(f)
	if err == nil {
		err = errors.Join(stdout.(*os.File).SetReadDeadline(time.Now().Add(forwarderStart)), err)
	}
	if err == nil {
		_, err = io.ReadFull(stdout, make([]byte, 1))
	}
	if err != nil {
		_ = cmd.Process.Kill() // it may have exited
		err = errors.Join(err, cmd.Wait())
		return fmt.Errorf("start forwarder of %s (%s): %w: %s", name, strings.Join(argv, " "), err, strings.TrimSpace(said.String()))
	}
	// Its standard input stays open until then, or until this process ends.
	h.overlay.Processes.Watch(cmd.Wait, func(err error) {
		h.overlay.Log.Warn("the forwarder exited: its node's pods are unreachable", "node", name, "err", err, "stderr", strings.TrimSpace(said.String()))
	})
	return nil
}

// Forward forwards packets between the TUN device and the socket that it inherits, until ctx ends or,
// unless the lab is kept, its standard input. A lab starts it as a process of its own.
//
// It works like flannel's proxy (pkg/backend/udp/proxy_amd64.c): one thread, one packet per system call,
// and no poll while packets wait. It makes raw system calls, as a C program does: they do not block, so
// Go's scheduler need not know of them.
func Forward(ctx context.Context) error {
	var f forwarding
	if err := json.NewDecoder(os.Stdin).Decode(&f); err != nil {
		return fmt.Errorf("read the forwarder's configuration (only a lab starts this command): %w", err)
	}
	for fd, what := range map[int]string{forwarderTUN: "TUN device", forwarderSocket: "socket"} {
		unix.CloseOnExec(fd)
		if err := unix.SetNonblock(fd, true); err != nil {
			return fmt.Errorf("open inherited %s: %w", what, err)
		}
	}
	wake, stop, err := os.Pipe()
	if err != nil {
		return err
	}
	defer wake.Close()
	defer context.AfterFunc(ctx, func() { stop.Close() })()
	polled := []unix.PollFd{
		{Fd: forwarderTUN, Events: unix.POLLIN},
		{Fd: forwarderSocket, Events: unix.POLLIN},
		{Fd: int32(wake.Fd())}, // hangs up when its other end is closed
	}
	if !f.Keep {
		polled = append(polled, unix.PollFd{Fd: 0})
	}
	if _, err := os.Stdout.WriteString("\n"); err != nil {
		return fmt.Errorf("report that it is ready: %w", err)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r := newRelay(forwarderTUN, forwarderSocket, f)
	for {
		if _, err := unix.Poll(polled, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for packets: %w", err)
		}
		for _, p := range polled[2:] {
			if p.Revents != 0 {
				return nil
			}
		}
		// Check at least every 1024 packets whether to end.
		for range 1024 {
			out, err := r.send()
			if err != nil {
				return err
			}
			in, err := r.receive()
			if err != nil {
				return err
			}
			if !out && !in {
				break
			}
		}
	}
}

// relay has the two ends of a forwarder.
type relay struct {
	tun, socket int
	routes      []relayRoute
	packet      []byte
}

type relayRoute struct {
	pods netip.Prefix
	node *unix.RawSockaddrInet4
}

func newRelay(tun, socket int, f forwarding) *relay {
	r := &relay{tun: tun, socket: socket, packet: make([]byte, f.MTU)}
	for _, route := range f.Routes {
		port := binary.BigEndian.AppendUint16(nil, route.Node.Port())
		r.routes = append(r.routes, relayRoute{route.Pods, &unix.RawSockaddrInet4{
			Family: unix.AF_INET, Addr: route.Node.Addr().As4(), Port: binary.NativeEndian.Uint16(port),
		}})
	}
	return r
}

// send forwards a packet from the device to the node of its destination, and reports whether there was one.
func (r *relay) send() (bool, error) {
	n, err := raw(unix.SYS_READ, r.tun, r.packet, nil)
	if err != 0 {
		return false, quiet("read from TUN device", err)
	}
	to, ok := hop(r.packet[:n])
	node := r.route(to)
	if !ok || node == nil {
		return true, nil
	}
	for {
		if _, err := raw(unix.SYS_SENDTO, r.socket, r.packet[:n], node); err != unix.EAGAIN {
			// Such as a node that is unreachable: as on a wire, the packet is lost.
			return true, nil
		}
		// flannel's socket blocks.
		if _, err := unix.Poll([]unix.PollFd{{Fd: int32(r.socket), Events: unix.POLLOUT}}, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return true, fmt.Errorf("wait for the socket: %w", err)
		}
	}
}

// receive forwards a packet from the socket to the device, and reports whether there was one.
func (r *relay) receive() (bool, error) {
	n, err := raw(unix.SYS_READ, r.socket, r.packet, nil)
	if err != 0 {
		return false, quiet("read from socket", err)
	}
	if _, ok := hop(r.packet[:n]); !ok {
		return true, nil
	}
	// The device does not accept packets other than IP: they are lost.
	if _, err := raw(unix.SYS_WRITE, r.tun, r.packet[:n], nil); err == unix.EBADFD {
		return true, fmt.Errorf("write to TUN device: %w", err)
	}
	return true, nil
}

// raw makes the system call for a packet. The descriptors do not block.
func raw(call uintptr, fd int, packet []byte, to *unix.RawSockaddrInet4) (int, unix.Errno) {
	var size uintptr
	if to != nil {
		size = unix.SizeofSockaddrInet4
	}
	n, _, errno := unix.RawSyscall6(call, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(packet))), uintptr(len(packet)), 0, uintptr(unsafe.Pointer(to)), size)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

// quiet ignores errors which say that there is no packet, or that an earlier one was lost.
func quiet(what string, err error) error {
	switch {
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR),
		errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH):
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}

// route finds the node of an address. Packets come in bursts, so the last route that matched comes first.
func (r *relay) route(to netip.Addr) *unix.RawSockaddrInet4 {
	for i := range r.routes {
		if r.routes[i].pods.Contains(to) {
			r.routes[0], r.routes[i] = r.routes[i], r.routes[0]
			return r.routes[0].node
		}
	}
	return nil
}

// hop decrements a packet's TTL and returns its destination: none if it is not IP, or its TTL has expired.
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

// probeTUN checks whether the kernel has TUN devices.
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
