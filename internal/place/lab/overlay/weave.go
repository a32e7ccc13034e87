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

// Weave Net without its fast datapath: its bridge, the veth from it to the process (net/bridge.go), the port, and
// the headers of a datagram without encryption (router/sleeve.go, router/crypto.go). A datagram begins with the
// name of the node that sends it, a frame with the names of the two nodes and its length.
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

// Further figures of Weave: how many frames it forwards before it looks at anything else, and the buffer of the
// capture in bytes. It forgets a MAC address after a time; here they are few, and start anew when they are not.
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

// makeCapture joins the bridge of a node to a process that exchanges its frames with those of the other nodes. As
// the pods of all nodes are in one network, the node routes no packets between them.
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
	// The device belongs to the process: the node must not answer what arrives there.
	if err := h.ns.Netlink.LinkSetARPOff(capture); err != nil {
		return fmt.Errorf("set ARP of %s off: %w", weaveCapture, err)
	}
	var socket *os.File
	if err := h.ns.Do(func() (err error) {
		if err := errors.Join(
			network.Sysctl("net/ipv6/conf/"+weaveCapture+"/disable_ipv6=1"),
			wholePackets(weaveBridge),
			h.ns.SetUp(weaveCapture), // before the socket, which would remember that the device was down
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

// wholePackets makes the kernel compute the checksums of what it sends by a device, and so segment it, as Weave does
// for its bridge and the containers: a packet socket gets the frames as they are on the device.
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

// mac is a MAC address, or the name of a node: that of its bridge.
type mac [nodeName]byte

// frameRelay relays frames of a device. Like a switch, it learns from their senders which node has which address.
type frameRelay struct {
	capture, socket int
	name            mac
	peers           []framePeer
	// owners of MAC addresses: the index of a peer, or here.
	owners map[mac]int
	// frame has room for one byte more than the MTU allows, so that a larger frame shows.
	frame    []byte
	received []byte
}

// here owns the MAC addresses of the node and its pods.
const here = -1

// framePeer is another node, and the datagram to it that is being filled.
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

// send forwards the frames that wait at the device. Those to one node share a datagram while they fit.
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

// take adds a frame of the device to the datagram to the node that has its destination. If that is unknown or a group,
// all nodes get it.
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
	return nil // the bridge flooded it, and its destination has it
}

// learn notes who has the sender of a frame.
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

// add adds a frame to the datagram to a peer, which it sends before that if there is no room.
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

// flush sends the datagram to a peer, if there is one.
func (r *frameRelay) flush(p *framePeer) error {
	if len(p.datagram) == 0 {
		return nil
	}
	err := put(r.socket, p.datagram, p.node)
	p.datagram = p.datagram[:0]
	return err
}

// receive forwards the frames of the datagrams that wait at the socket.
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

// deliver forwards the frames of a datagram to the device, unless no node of the lab sent it.
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

// unpack returns the frames to a node, up to one that is not whole.
func unpack(frames []byte, to mac) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for len(frames) >= frameHeader {
			receiver, size := mac(frames[nodeName:]), int(binary.BigEndian.Uint16(frames[2*nodeName:]))
			frames = frames[frameHeader:]
			if size < ethernetHeader || size > len(frames) {
				return
			}
			// Weave relays frames to nodes that their sender does not reach. In a lab it reaches all.
			if receiver == to && !yield(frames[:size]) {
				return
			}
			frames = frames[size:]
		}
	}
}

// probeCapture checks whether the kernel has packet sockets.
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
