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

// The file descriptors that a forwarder inherits.
const (
	forwarderDevice = 3
	forwarderSocket = 4
)

// forwarderStart limits how long a forwarder may take to start.
const forwarderStart = 30 * time.Second

// forwarding is a forwarder's configuration.
type forwarding struct {
	// Routes are those of packets, for the relay of a TUN device.
	Routes []forwarderRoute `json:"routes,omitempty"`
	// Name and Peers, the node and the other nodes, are for the relay of frames.
	Name  net.HardwareAddr `json:"name,omitempty"`
	Peers []forwarderPeer  `json:"peers,omitempty"`
	// MTU is that of the device.
	MTU int `json:"mtu"`
	// Keep means that the forwarder continues after its standard input has ended.
	Keep bool `json:"keep"`
}

// udpHeaders is the size of the headers of UDP over IPv4: 20 and 8 bytes.
const udpHeaders = 28

// startForwarder starts a node's forwarder between a device and a UDP port, and returns once it forwards. It runs in the node's
// namespace, so removing the lab kills it like everything else there.
func (h *Host) startForwarder(f forwarding, device *os.File, port uint16) error {
	f.MTU, _ = h.overlay.mtu()
	f.Keep = h.overlay.Keep
	socket, err := h.listen(port)
	if err != nil {
		return err
	}
	defer socket.Close()
	name, argv := h.node.Place.Name, h.overlay.Forwarder
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.ExtraFiles = []*os.File{device, socket}
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
	// cmd.Wait closes its standard input, which otherwise ends with this process.
	h.overlay.Processes.Watch(cmd.Wait, func(err error) {
		h.overlay.Log.Warn("the forwarder exited: its node's pods are unreachable", "node", name, "err", err, "stderr", strings.TrimSpace(said.String()))
	})
	return nil
}

// listen opens a UDP socket on a port of the node's address.
func (h *Host) listen(port uint16) (socket *os.File, err error) {
	err = h.ns.Do(func() error {
		conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(h.node.Place.IPv4, port)))
		if err != nil {
			return fmt.Errorf("open UDP socket: %w", err)
		}
		defer conn.Close()
		socket, err = conn.File()
		return err
	})
	return socket, err
}

// Forward forwards packets between the TUN device or packet socket and the UDP socket that it inherits, until ctx ends or,
// unless the lab is kept, standard input does. A lab starts it as a process of its own.
//
// It works like flannel's proxy (pkg/backend/udp/proxy_amd64.c): one thread, one packet per system call, and no poll while
// packets wait. It makes raw system calls, which do not block, so that Go's scheduler need not know about them.
func Forward(ctx context.Context) error {
	var f forwarding
	if err := json.NewDecoder(os.Stdin).Decode(&f); err != nil {
		return fmt.Errorf("read the forwarder's configuration (only a lab starts this command): %w", err)
	}
	for fd, what := range map[int]string{forwarderDevice: "device", forwarderSocket: "socket"} {
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
		{Fd: forwarderDevice, Events: unix.POLLIN},
		{Fd: forwarderSocket, Events: unix.POLLIN},
		{Fd: int32(wake.Fd())}, // POLLHUP when its other end is closed
	}
	if !f.Keep {
		polled = append(polled, unix.PollFd{Fd: 0})
	}
	if _, err := os.Stdout.WriteString("\n"); err != nil {
		return fmt.Errorf("report that it is ready: %w", err)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var r relay = newPacketRelay(forwarderDevice, forwarderSocket, f)
	if f.Name != nil {
		r = newFrameRelay(forwarderDevice, forwarderSocket, f)
	}
	for {
		if _, err := unix.Poll(polled, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for packets: %w", err)
		}
		for _, p := range polled[2:] {
			if p.Revents != 0 {
				return nil
			}
		}
		// Check at least every 1024 rounds whether to stop.
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

// relay moves packets between the device and the socket of a forwarder.
type relay interface {
	// send forwards packets from the device, and reports whether there were any.
	send() (bool, error)
	// receive forwards packets from the socket, and reports whether there were any.
	receive() (bool, error)
}

// sockaddr converts an address for the kernel.
func sockaddr(a netip.AddrPort) *unix.RawSockaddrInet4 {
	port := binary.BigEndian.AppendUint16(nil, a.Port())
	return &unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: a.Addr().As4(), Port: binary.NativeEndian.Uint16(port)}
}

// put sends a packet, and waits while the socket is full, as a blocking socket would. On other errors, such as an unreachable
// node, the packet is lost, as on a wire.
func put(socket int, packet []byte, to *unix.RawSockaddrInet4) error {
	for {
		if _, err := raw(unix.SYS_SENDTO, socket, packet, to); err != unix.EAGAIN {
			return nil
		}
		if _, err := unix.Poll([]unix.PollFd{{Fd: int32(socket), Events: unix.POLLOUT}}, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for the socket: %w", err)
		}
	}
}

// raw makes a system call for a packet. The file descriptors are non-blocking.
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

// quiet ignores the errors that mean that there is no packet, or that an earlier one was lost.
func quiet(what string, err error) error {
	switch {
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR),
		errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH):
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}
