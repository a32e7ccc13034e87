//go:build linux

package overlay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/ethtool"
	"slipstream.dev/internal/place/lab/network"
)

// Weave Net without its fast datapath: its bridge, the veth pair from it to the process (net/bridge.go), the port, and the
// headers of an unencrypted datagram (router/sleeve.go, router/crypto.go). A datagram begins with the name of the sending node,
// and each frame in it with the names of both nodes and its length.
const (
	weaveBridge    = "weave"
	weaveVeth      = "vethwe-bridge"
	weaveCapture   = "vethwe-pcap"
	weavePort      = 6783
	nodeName       = 6
	frameHeader    = 2*nodeName + 2
	ethernetHeader = 14
	overheadWeave  = udpHeaders + nodeName + frameHeader + ethernetHeader
)

// Further constants of Weave: how many frames it forwards before it polls again, and the buffer of the capture in bytes. Weave
// forgets a MAC address after a time. This forwarder forgets all if there are more than macsKnown.
const (
	frameBurst    = 100
	captureBuffer = 8 << 20
	macsKnown     = 1 << 14
)

// forwarderPeer is another node.
type forwarderPeer struct {
	Name net.HardwareAddr `json:"name"`
	Node netip.AddrPort   `json:"node"`
}

// makeCapture connects the bridge of a node to a process that exchanges frames with those of the other nodes. The pods of all
// nodes are in one subnet, so no node routes packets between them.
func (h *Host) makeCapture() error {
	bridge, err := h.ns.Netlink.LinkByName(weaveBridge)
	if err != nil {
		return fmt.Errorf("find bridge %s: %w", weaveBridge, err)
	}
	veth := netlink.NewVeth(network.LinkAttrs(weaveVeth))
	veth.MTU, _ = h.overlay.mtu()
	veth.MasterIndex = bridge.Attrs().Index
	veth.PeerName = weaveCapture
	if err := h.ns.Netlink.LinkAdd(veth); err != nil {
		return fmt.Errorf("add %s: %w", weaveVeth, err)
	}
	capture, err := h.ns.Netlink.LinkByName(weaveCapture)
	if err != nil {
		return fmt.Errorf("find %s: %w", weaveCapture, err)
	}
	// The device belongs to the process: the node must not answer packets there.
	if err := h.ns.Netlink.LinkSetARPOff(capture); err != nil {
		return fmt.Errorf("set ARP of %s off: %w", weaveCapture, err)
	}
	var socket *os.File
	if err := h.ns.Do(func() (err error) {
		if err := errors.Join(
			network.Sysctl("net/ipv6/conf/"+weaveCapture+"/disable_ipv6=1"),
			wholePackets(weaveBridge),
			h.ns.SetUp(weaveCapture), // before the socket is opened, whose first read would return ENETDOWN otherwise
			h.ns.Settle(weaveVeth, weaveCapture),
		); err != nil {
			return err
		}
		socket, err = openCapture(capture.Attrs().Index)
		return err
	}); err != nil {
		return err
	}
	defer socket.Close()
	f := forwarding{Name: bridgeMAC(h.node, weaveBridge)}
	for _, n := range h.others {
		f.Peers = append(f.Peers, forwarderPeer{bridgeMAC(n, weaveBridge), netip.AddrPortFrom(n.Place.IPv4, weavePort)})
	}
	return h.startForwarder(f, socket, weavePort)
}

// wholePackets makes the kernel compute checksums of packets before they reach a device, and so segment them. Weave does that
// for its bridge and containers, because a packet socket receives frames as they are on the device.
func wholePackets(device string) error {
	e, err := ethtool.Open()
	if err != nil {
		return err
	}
	defer e.Close()
	return e.Change(device, map[string]bool{"tx-checksum-ip-generic": false})
}

// openCapture opens a packet socket that receives and sends the frames of a device.
func openCapture(device int) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open packet socket: %w", err)
	}
	all := binary.NativeEndian.Uint16([]byte{unix.ETH_P_ALL >> 8, unix.ETH_P_ALL})
	if err := errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, captureBuffer),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: device}),
	); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("capture frames of device %d: %w", device, err)
	}
	return os.NewFile(uintptr(fd), weaveCapture), nil
}

// mac is a MAC address. That of a node's bridge is the name of the node.
type mac [nodeName]byte

// frameRelay relays frames. Like a switch, it learns from their source addresses which node has which MAC address.
type frameRelay struct {
	capture, socket int
	name            mac
	peers           []framePeer
	// owners maps MAC addresses to the index of a peer, or to here.
	owners map[mac]int
	// frame has one byte more than the MTU allows, so that a larger frame is detected.
	frame    []byte
	received []byte
}

// here is the owner of the MAC addresses of the node and its pods.
const here = -1

// framePeer is another node. datagram is being filled with frames for it.
type framePeer struct {
	name     mac
	node     *unix.RawSockaddrInet4
	datagram []byte
}

func newFrameRelay(capture, socket int, f forwarding) *frameRelay {
	most := f.MTU + overheadWeave - udpHeaders
	r := &frameRelay{
		capture: capture, socket: socket, name: mac(f.Name), owners: make(map[mac]int),
		frame: make([]byte, f.MTU+ethernetHeader+1), received: make([]byte, most+1),
	}
	for _, p := range f.Peers {
		r.peers = append(r.peers, framePeer{mac(p.Name), sockaddr(p.Node), make([]byte, 0, most)})
	}
	return r
}

// send implements relay. Frames to the same node share a datagram while they fit.
func (r *frameRelay) send() (some bool, err error) {
	for range frameBurst {
		n, errno := raw(unix.SYS_READ, r.capture, r.frame, nil)
		if errno != 0 {
			err = quiet("read from packet socket", errno)
			break
		}
		some = true
		if err = r.take(r.frame[:n]); err != nil {
			break
		}
	}
	for i := range r.peers {
		err = errors.Join(err, r.flush(&r.peers[i]))
	}
	return some, err
}

// take adds a frame from the device to the datagram for the node that owns its destination, or to those for all nodes if the
// destination is unknown or a group.
func (r *frameRelay) take(frame []byte) error {
	if len(frame) < ethernetHeader || len(frame) == len(r.frame) {
		return nil
	}
	r.learn(frame, here)
	owner, known := r.owners[mac(frame)]
	switch {
	case !known:
		var err error
		for i := range r.peers {
			err = errors.Join(err, r.add(&r.peers[i], frame))
		}
		return err
	case owner != here:
		return r.add(&r.peers[owner], frame)
	}
	return nil // the bridge flooded the frame, so its destination has it already
}

// learn records the owner of a frame's source address.
func (r *frameRelay) learn(frame []byte, owner int) {
	sender := mac(frame[6:])
	if group := sender[0]&1 != 0; group {
		return
	}
	if len(r.owners) == macsKnown {
		clear(r.owners)
	}
	r.owners[sender] = owner
}

// add adds a frame to the datagram for a peer. If there is no room, it first sends the datagram.
func (r *frameRelay) add(p *framePeer, frame []byte) error {
	var err error
	if len(p.datagram)+frameHeader+len(frame) > cap(p.datagram) {
		err = r.flush(p)
	}
	if len(p.datagram) == 0 {
		p.datagram = append(p.datagram, r.name[:]...)
	}
	p.datagram = append(p.datagram, r.name[:]...)
	p.datagram = append(p.datagram, p.name[:]...)
	p.datagram = binary.BigEndian.AppendUint16(p.datagram, uint16(len(frame)))
	p.datagram = append(p.datagram, frame...)
	return err
}

// flush sends the datagram for a peer, if it has frames.
func (r *frameRelay) flush(p *framePeer) error {
	if len(p.datagram) == 0 {
		return nil
	}
	err := put(r.socket, p.datagram, p.node)
	p.datagram = p.datagram[:0]
	return err
}

func (r *frameRelay) receive() (some bool, err error) {
	for range frameBurst {
		n, errno := raw(unix.SYS_READ, r.socket, r.received, nil)
		if errno != 0 {
			return some, quiet("read from socket", errno)
		}
		some = true
		if err := r.deliver(r.received[:n]); err != nil {
			return some, err
		}
	}
	return some, nil
}

// deliver forwards the frames of a datagram to the device, if it comes from a node of the lab.
func (r *frameRelay) deliver(datagram []byte) error {
	if len(datagram) < nodeName {
		return nil
	}
	sender := mac(datagram)
	peer := slices.IndexFunc(r.peers, func(p framePeer) bool { return p.name == sender })
	if peer < 0 {
		return nil
	}
	for frame := range unpack(datagram[nodeName:], r.name) {
		r.learn(frame, peer)
		if err := put(r.capture, frame, nil); err != nil {
			return err
		}
	}
	return nil
}

// unpack returns the frames for a node, up to the first truncated one.
func unpack(frames []byte, to mac) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for len(frames) >= frameHeader {
			receiver, size := mac(frames[nodeName:]), int(binary.BigEndian.Uint16(frames[2*nodeName:]))
			frames = frames[frameHeader:]
			if size < ethernetHeader || size > len(frames) {
				return
			}
			// Weave also relays frames to nodes that their sender cannot reach. In a lab, every node reaches all others.
			if receiver == to && !yield(frames[:size]) {
				return
			}
			frames = frames[size:]
		}
	}
}

// probeCapture tests whether the kernel has packet sockets.
func probeCapture() error {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return network.Missing("packet sockets", "CONFIG_PACKET", "af_packet", err)
	}
	if err != nil {
		return fmt.Errorf("open packet socket: %w", err)
	}
	return unix.Close(fd)
}
