// Package grammar generates packets for tests of the fast path: packets that a connection
// between pods sends and receives, and packets that are almost like them. It neither sends them
// nor predicts what should become of them: tests of fastpath/datapath run single programs on
// them, and those of fastpath compare a node with a reference node.
package grammar

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
)

// Sizes in bytes of the headers in front of a packet in a VXLAN tunnel over IPv4 (RFC 7348,
// section 5): Overhead ends before the inner Ethernet header, Head after it.
const (
	Overhead = 50
	Head     = Overhead + 14
)

const tcp, udp = 6, 17

// Packet describes a TCP or UDP packet over IP, including anything odd about it. Its addresses
// give the IP version.
type Packet struct {
	To, From       net.HardwareAddr
	Source, Target netip.AddrPort
	Protocol       uint8
	TOS, TTL       byte
	// Flags are the TCP flags.
	Flags byte
	// Fragment is the IPv4 header field of that name: flags and offset.
	Fragment uint16
	// Options is the size of the options in bytes, a multiple of 4.
	Options int
	Payload int
	// Trailing is the number of bytes after the packet. If it is negative, that many bytes are cut
	// off.
	Trailing int
	// UDPLength is how much too large the length in the UDP header is.
	UDPLength int
}

// Six reports whether it is an IPv6 packet.
func (p Packet) Six() bool { return p.Source.Addr().Is6() }

// Bytes returns the packet as an Ethernet frame. The TCP and UDP checksums are 0, because they
// are left to a device. Only UDP over IPv6, which must have a checksum, gets 0xffff.
func (p Packet) Bytes() []byte {
	l4 := 8
	if p.Protocol == tcp {
		l4 = 20
	}
	b := append(slices.Clone(p.To), p.From...)
	if p.Six() {
		b = append(append(b, 0x86, 0xdd), p.header6(l4+p.Payload)...)
	} else {
		b = append(append(b, 0x08, 0x00), p.header4(l4+p.Payload)...)
	}
	b = binary.BigEndian.AppendUint16(b, p.Source.Port())
	b = binary.BigEndian.AppendUint16(b, p.Target.Port())
	switch {
	case l4 == 20:
		b = append(b, 0, 0, 0, 1, 0, 0, 0, 1, 5<<4, p.Flags, 1, 0, 0, 0, 0, 0)
	case p.Six():
		b = binary.BigEndian.AppendUint16(b, uint16(8+p.Payload+p.UDPLength))
		b = append(b, 0xff, 0xff)
	default:
		b = binary.BigEndian.AppendUint16(b, uint16(8+p.Payload+p.UDPLength))
		b = append(b, 0, 0)
	}
	return append(b, make([]byte, p.Payload+p.Trailing)...)
}

// header4 returns the IPv4 header in front of length bytes.
func (p Packet) header4(length int) []byte {
	header := make([]byte, 20+p.Options)
	header[0], header[1] = 0x40|byte(len(header)/4), p.TOS
	binary.BigEndian.PutUint16(header[2:], uint16(len(header)+length))
	binary.BigEndian.PutUint16(header[4:], 4711)
	binary.BigEndian.PutUint16(header[6:], p.Fragment)
	header[8], header[9] = p.TTL, p.Protocol
	copy(header[12:], p.Source.Addr().AsSlice())
	copy(header[16:], p.Target.Addr().AsSlice())
	binary.BigEndian.PutUint16(header[10:], ^Sum(0, header))
	return header
}

// header6 returns the IPv6 header. Options and the fragment field are in extension headers (RFC
// 8200, section 4).
func (p Packet) header6(length int) []byte {
	next := p.Protocol
	var between []byte
	if p.Fragment&^0x4000 != 0 {
		between = binary.BigEndian.AppendUint16([]byte{next, 0}, p.Fragment<<3|p.Fragment>>13&1)
		between = append(between, 0, 0, 0, 1)
		next = 44
	}
	if n := (p.Options + 7) / 8 * 8; n > 0 {
		options := make([]byte, n)
		options[0], options[1], options[2], options[3] = next, byte(n/8-1), 1, byte(n-4) // padding
		between = append(options, between...)
		next = 60
	}
	header := []byte{0x60 | p.TOS>>4, p.TOS << 4, 0, 0}
	header = binary.BigEndian.AppendUint16(header, uint16(len(between)+length))
	header = append(header, next, p.TTL)
	return slices.Concat(header, p.Source.Addr().AsSlice(), p.Target.Addr().AsSlice(), between)
}

// TOS returns the type of service of an IPv4 packet, or the traffic class of an IPv6 packet.
func TOS(ip []byte) byte {
	if ip[0]>>4 == 6 {
		return ip[0]<<4 | ip[1]>>4
	}
	return ip[1]
}

// Sum adds bytes to a partial sum and returns the Internet checksum before its complement (RFC
// 1071).
func Sum(sum uint32, b []byte) uint16 {
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	for sum>>16 > 0 {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}

// Connection is a connection from a pod to a pod of another node, over TCP and over UDP.
type Connection struct {
	Pod, Peer netip.AddrPort
	// Front is the address that the pod connects to: the peer's own, or a service's.
	Front netip.AddrPort
	// MAC is the pod's Ethernet address, and Gateway that of its next hop.
	MAC, Gateway net.HardwareAddr
	// Outer holds the headers in front of the peer's packets on the wire, including the inner
	// Ethernet header. Fields that differ from packet to packet are 0, except a UDP checksum, if
	// there is one.
	Outer [Head]byte
	// Routed means that the wire has the packets without encapsulation: Outer is then an Ethernet header only.
	Routed bool
	// MTU is the MTU of the pod in bytes.
	MTU int
}

// Out returns a packet that the pod sends.
func (c Connection) Out(protocol uint8) Packet {
	return Packet{To: c.Gateway, From: c.MAC, Source: c.Pod, Target: c.Front, Protocol: protocol, TTL: 64, Flags: 0x10, Fragment: 0x4000, Payload: 100}
}

// In returns a packet to the pod, as it leaves the tunnel.
func (c Connection) In(protocol uint8) Packet {
	p := c.Out(protocol)
	ethernet := c.Outer[c.Start()-14:]
	p.To, p.From = ethernet[:6], ethernet[6:12]
	p.Source, p.Target = c.Peer, c.Pod
	return p
}

// Start returns the offset of the pods' packet in a frame on the wire.
func (c Connection) Start() int {
	if c.Routed {
		return 14
	}
	return Head
}

// Wrap encapsulates a packet as the peer's node does.
func (c Connection) Wrap(b []byte) []byte {
	if c.Routed {
		return b
	}
	b = append(c.Outer[:Overhead:Overhead], b...)
	if len(b) > Head+1 {
		b[15] = []byte{0, 1, 2, 2}[TOS(b[Head:])&3] // RFC 6040
	}
	binary.BigEndian.PutUint16(b[16:], uint16(len(b)-14))
	binary.BigEndian.PutUint16(b[38:], uint16(len(b)-34))
	return mend(b)
}

// Grammar generates the packets of a connection, and packets that are almost like them.
type Grammar struct {
	*rand.Rand
	Connection
	// Large makes the pod also send packets that are segmented before they reach the wire (GSO).
	Large bool
}

func (g Grammar) often() bool { return g.IntN(4) > 0 }

// headers returns the size in bytes of the IP and UDP headers.
func (g Grammar) headers() int {
	if g.Pod.Addr().Is6() {
		return 48
	}
	return 28
}

func (g Grammar) base(out bool) Packet {
	p := g.In(udp)
	if out {
		p = g.Out(udp)
	}
	if g.IntN(2) == 0 {
		p.Protocol = tcp
		p.Flags |= []byte{0, 0x08, 0x40, 0x80}[g.IntN(4)]
	}
	p.TOS = byte(g.IntN(4))
	p.Fragment = uint16(g.IntN(2)) << 14
	most := g.MTU - g.headers() // for UDP
	p.Payload = []int{0, 1, 64, 99, most - 22, most - 20, most - 12, most - 11, most, most + 1}[g.IntN(10)]
	if g.Large && out && g.IntN(16) == 0 {
		p.Payload = 2*most + g.IntN(4*most)
	}
	return p
}

// bend makes one field of a packet unusual.
func (g Grammar) bend(p *Packet) {
	port := func(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr(), uint16(g.Uint32())) }
	// Source and destination addresses get different bits flipped: otherwise a packet to an unused
	// address and a packet from it would sometimes belong to the same connection.
	address := func(a netip.AddrPort, odd int) netip.AddrPort {
		raw := a.Addr().AsSlice()
		raw[g.IntN(len(raw))] ^= 1 << (2*g.IntN(4) + odd)
		other, _ := netip.AddrFromSlice(raw)
		return netip.AddrPortFrom(other, a.Port())
	}
	mac := func() net.HardwareAddr {
		return []net.HardwareAddr{g.MAC, g.Gateway, {2, 0, 0, 0, 0, byte(g.IntN(4))}, bytes.Repeat([]byte{0xff}, 6)}[g.IntN(4)]
	}
	switch g.IntN(14) {
	case 0:
		p.To = mac()
	case 1:
		p.From = mac()
	case 2:
		p.Source = port(p.Source)
	case 3:
		p.Target = port(p.Target)
	case 4:
		p.Source = address(p.Source, 0)
	case 5:
		p.Target = address(p.Target, 1)
	case 6:
		p.Source, p.Target = p.Target, p.Source
		// Otherwise two connections could be the same one after translation.
		switch {
		case p.Source == g.Front:
			p.Source = g.Peer
		case p.Target == g.Peer:
			p.Target = g.Front
		}
	case 7:
		p.Protocol = []uint8{1, 2, 4, 6, 17, 41, 47, 50, 132, 0, 43, 44, 51, 58, 60}[g.IntN(15)]
	case 8:
		p.TOS = byte(g.Uint32())
	case 9:
		p.TTL = []byte{0, 1, 2, 63, 64, 65, 255}[g.IntN(7)]
	case 10:
		p.Flags = byte(g.Uint32())
	case 11:
		p.Fragment = uint16(1) << g.IntN(16)
	case 12:
		p.Options = 4 * g.IntN(11)
	case 13:
		p.Trailing = g.IntN(40) - min(20, p.Payload)
	}
}

// damage changes some bytes, or removes them.
func (g Grammar) damage(b []byte) []byte {
	switch g.IntN(6) {
	case 0:
		return b[:15+g.IntN(len(b)-14)]
	case 1:
		return append(b, make([]byte, g.IntN(64))...)
	case 2: // add a VLAN tag
		return slices.Concat(b[:12], []byte{0x81, 0x00, 0, byte(g.IntN(2))}, b[12:])
	case 3:
		return mend(g.flip(b))
	default:
		return g.flip(b)
	}
}

// flip flips bits of the headers.
func (g Grammar) flip(b []byte) []byte {
	for range 1 + g.IntN(3) {
		b[g.IntN(min(len(b), g.headers()+32))] ^= 1 << g.IntN(8)
	}
	return b
}

// mend corrects the checksum of an IPv4 header.
func mend(b []byte) []byte {
	if b[14]>>4 == 6 {
		return b
	}
	if n := 14 + int(b[14]&0xf)*4; n >= 34 && len(b) >= n {
		b[24], b[25] = 0, 0
		binary.BigEndian.PutUint16(b[24:], ^Sum(0, b[14:n]))
	}
	return b
}

// nest encapsulates a packet in VXLAN: of another network, to another node, or of this one.
func (g Grammar) nest(b []byte, out bool) []byte {
	p := g.base(out)
	p.Protocol, p.Payload = udp, 8+len(b)
	if !g.Routed && g.IntN(2) == 0 {
		node := func(at int) netip.Addr {
			raw := [4]byte(g.Outer[at:])
			raw[3] = byte(g.IntN(3))
			return netip.AddrFrom4(raw)
		}
		p.Source = netip.AddrPortFrom(node(26), p.Source.Port())
		p.Target = netip.AddrPortFrom(node(30), binary.BigEndian.Uint16(g.Outer[36:]))
	}
	whole := p.Bytes()
	at := len(whole) - p.Payload
	copy(whole[at:], g.Outer[42:50])
	whole[at+6] ^= byte(g.IntN(3))
	copy(whole[at+8:], b)
	return whole
}

// Packet returns a packet that the pod sends, or one to the pod as it leaves the tunnel.
func (g Grammar) Packet(out bool) []byte {
	if g.IntN(50) == 0 {
		b := make([]byte, 15+g.IntN(200))
		for i := range b {
			b[i] = byte(g.Uint32())
		}
		return b
	}
	p := g.base(out)
	for !g.often() {
		g.bend(&p)
	}
	b := p.Bytes()
	end := 14 + g.headers()
	for i := end; i < len(b); i++ {
		if p.Protocol == udp || i >= end+12 {
			b[i] = byte(i)
		}
	}
	if p.Protocol == udp && len(b) >= end {
		binary.BigEndian.PutUint16(b[end-2:], uint16(g.Uint32())) // the checksum field holds anything
	}
	if g.IntN(8) == 0 {
		b = g.nest(b, out)
	}
	if g.IntN(3) == 0 {
		b = g.damage(b)
	}
	return b
}

// Wrapped returns a packet to the pod as it is on the wire. Its outer headers may be unusual, too.
func (g Grammar) Wrapped() []byte {
	b := g.Wrap(g.Packet(false))
	if g.Routed {
		return b
	}
	if !g.often() { // marked on the way, or not set by a tunnel
		b[15] = byte(g.IntN(4))
	}
	binary.BigEndian.PutUint16(b[18:], uint16(g.Uint32()))
	binary.BigEndian.PutUint16(b[34:], uint16(g.Uint32()))
	mend(b)
	if g.IntN(2) == 0 {
		b[g.IntN(Overhead)] ^= 1 << g.IntN(8)
		if g.IntN(2) == 0 {
			mend(b)
		}
	}
	return b
}

// Segment returns a TCP segment over IPv4 without data, as a raw socket sends it.
func Segment(from, to netip.AddrPort, seq uint32, flags byte) []byte {
	b := make([]byte, 40)
	b[0], b[8], b[9] = 0x45, 64, tcp
	binary.BigEndian.PutUint16(b[2:], 40)
	copy(b[12:], from.Addr().AsSlice())
	copy(b[16:], to.Addr().AsSlice())
	binary.BigEndian.PutUint16(b[20:], from.Port())
	binary.BigEndian.PutUint16(b[22:], to.Port())
	binary.BigEndian.PutUint32(b[24:], seq)
	b[32], b[33] = 5<<4, flags
	binary.BigEndian.PutUint16(b[36:], ^Sum(uint32(tcp+20)+uint32(Sum(0, b[12:20])), b[20:]))
	return b
}

const arp, ipv6 = 0x0806, 0x86dd

// Frame returns an Ethernet frame from a source address, to the broadcast or multicast address
// of its protocol, or to an unused address.
func Frame(source net.HardwareAddr, protocol uint16, payload ...byte) []byte {
	frame := append([]byte{2, 9, 9, 9, 9, 9}, source...)
	switch protocol {
	case arp:
		copy(frame, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	case ipv6:
		copy(frame, []byte{0x33, 0x33, 0, 0, 0, 1})
	}
	frame = append(binary.BigEndian.AppendUint16(frame, protocol), payload...)
	return append(frame, make([]byte, max(0, 60-len(frame)))...)
}

// MadeUp returns an Ethernet address that nobody has, a different one for each number.
func MadeUp(n int) net.HardwareAddr {
	return binary.BigEndian.AppendUint32([]byte{2, 0x77}, uint32(n))
}
