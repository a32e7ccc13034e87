//go:build linux

package conntrack

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// TCP flags (RFC 9293, section 3.1) and options (section 3.2; RFC 2018 and RFC 7323).
const (
	synFlag, ackFlag                          = 0x02, 0x10
	noOption, scaleOption, sackPermitted byte = 1, 3, 4
)

// options returns the SYN options that conntrack reads, given the flags and window scale of an entry.
func options(flags, scale uint8) (b []byte) {
	if flags&tcpSACKPermitted != 0 {
		b = append(b, noOption, noOption, sackPermitted, 2)
	}
	if flags&tcpWindowScale != 0 {
		b = append(b, noOption, scaleOption, 3, scale)
	}
	return b
}

// segment is a TCP segment without data.
type segment struct {
	from, to netip.AddrPort
	seq, ack uint32
	flags    byte
	window   uint16
	options  []byte
}

// bytes returns the packet with its IP header.
func (s segment) bytes() []byte {
	length := 20 + len(s.options)
	var b []byte
	if s.from.Addr().Is6() {
		b = []byte{0x60, 0, 0, 0, 0, byte(length), unix.IPPROTO_TCP, 64}
	} else {
		b = []byte{0x45, 0, 0, byte(20 + length), 0, 1, 0, 0, 64, unix.IPPROTO_TCP, 0, 0}
	}
	b = append(b, s.from.Addr().AsSlice()...)
	b = append(b, s.to.Addr().AsSlice()...)
	b = binary.BigEndian.AppendUint16(b, s.from.Port())
	b = binary.BigEndian.AppendUint16(b, s.to.Port())
	b = binary.BigEndian.AppendUint32(b, s.seq)
	b = binary.BigEndian.AppendUint32(b, s.ack)
	b = append(b, byte(length/4)<<4, s.flags)
	b = binary.BigEndian.AppendUint16(b, s.window)
	b = append(b, 0, 0, 0, 0)
	b = append(b, s.options...)
	tcp := b[len(b)-length:]
	addresses := append(s.from.Addr().AsSlice(), s.to.Addr().AsSlice()...)
	binary.BigEndian.PutUint16(tcp[16:], checksum(addresses, []byte{0, unix.IPPROTO_TCP, 0, byte(length)}, tcp))
	if s.from.Addr().Is4() {
		binary.BigEndian.PutUint16(b[10:], checksum(b[:20]))
	}
	return b
}

// checksum returns the Internet checksum (RFC 1071) of parts with even lengths.
func checksum(parts ...[]byte) uint16 {
	var sum uint32
	for _, b := range parts {
		for i := 0; i < len(b); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(b[i:]))
		}
	}
	sum = sum>>16 + sum&0xffff
	return ^uint16(sum>>16 + sum)
}
