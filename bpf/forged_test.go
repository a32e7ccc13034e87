//go:build linux

package bpf

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/grammar"
)

// TestGuard has a packet be dropped that would end a connection which it is not of, whatever is in
// front of its TCP header, and no other.
func TestGuard(t *testing.T) {
	f := loadForTest(t, nil)
	const acked, end, edge = 900, 1000, 70000
	const out, fin, reset = edge + 1, tcpFIN | tcpACK, tcpRST
	for _, v := range []version{four, six} {
		known := func(flow *fastpathFlow) {
			flow.Out.RcvNxt, flow.In.RcvNxt, flow.Out.SndNxt, flow.In.SndNxt, flow.Out.WindowEnd, flow.In.WindowEnd = acked, acked, end, end, edge, edge
		}
		for _, tt := range []struct {
			name     string
			flags    byte
			seq, ack uint32
			in, drop bool
			change   func(*fastpathFlow)
			packet   func(*grammar.Packet)
			bytes    func(l3 []byte) []byte
		}{
			{name: "an end", flags: fin, seq: end, ack: acked},
			{name: "the peer's end", flags: fin, seq: end, ack: acked, in: true},
			{name: "an end that was acknowledged", flags: fin, seq: 1<<32 - (0xffff - acked + 100), ack: acked, in: true},
			{name: "an end of long ago", flags: fin, seq: 1<<32 - (0xffff - acked + 101), ack: acked, in: true, drop: true},
			{name: "an end at the window's end", flags: fin, seq: edge, ack: acked, in: true},
			{name: "an end out of the window", flags: fin, seq: out, ack: acked, drop: true},
			{name: "the peer's out of the window", flags: fin, seq: out, ack: acked, in: true, drop: true},
			{name: "an end that acknowledges too much", flags: fin, seq: end, ack: edge + 1, in: true, drop: true},
			{name: "an end that acknowledges what is long past", flags: fin, seq: end, ack: 1<<32 - (0xffff - acked + 1), in: true, drop: true},
			{name: "a reset", flags: reset, seq: end, in: true},
			{name: "a reset of what has ended", flags: reset, seq: acked - 1, in: true},
			{name: "a reset of what was acknowledged", flags: reset, seq: acked - 2, in: true, drop: true},
			{name: "a reset whatever it acknowledges", flags: reset | tcpACK, seq: end, ack: edge + 1, in: true},
			{name: "a reset out of the window", flags: reset, seq: out, in: true, drop: true},
			{name: "an end and a reset", flags: fin | reset, seq: out, ack: acked, in: true, drop: true},
			{name: "data out of the window", flags: tcpACK, seq: out, ack: acked, in: true},
			{name: "what opens", flags: tcpSYN, seq: out, in: true},
			{name: "what opens and ends", flags: tcpSYN | fin, seq: out, in: true},
			{name: "numbers are not known", flags: fin, seq: out, in: true, change: func(f *fastpathFlow) { f.SeqState = 0 }},
			{name: "numbers are of the peer's packet", flags: fin, seq: out, in: true, change: func(f *fastpathFlow) { f.SeqState = 1 }},
			{name: "numbers are of the pod's packet", flags: fin, seq: out, in: true, change: func(f *fastpathFlow) { f.SeqState = 2 }},
			{name: "not all that the pod sent was seen", flags: fin, seq: out, in: true, change: func(f *fastpathFlow) { f.Out.Epoch-- }},
			{name: "not all that the peer sent was seen", flags: fin, seq: out, in: true, change: func(f *fastpathFlow) { f.In.Epoch-- }},
			{
				name: "another connection", flags: fin, seq: out, in: true,
				packet: func(p *grammar.Packet) { p.Source = netip.AddrPortFrom(p.Source.Addr(), 9) },
			},
			{
				name: "options or headers are in front", flags: fin, seq: out, ack: acked, in: true, drop: true,
				packet: func(p *grammar.Packet) { p.Options = 8 },
			},
			{
				name: "they are, and it is an end", flags: fin, seq: end, ack: acked, in: true,
				packet: func(p *grammar.Packet) { p.Options = 8 },
			},
			{name: "many headers are in front", flags: fin, seq: out, in: true, drop: true, bytes: func(b []byte) []byte {
				if v == four {
					return b
				}
				return before(b, chain(unix.IPPROTO_HOPOPTS, unix.IPPROTO_DSTOPTS, unix.IPPROTO_ROUTING, unix.IPPROTO_FRAGMENT, unix.IPPROTO_AH))
			}},
			{name: "too many headers are in front", flags: tcpACK, seq: end, in: true, drop: v == six, bytes: func(b []byte) []byte {
				if v == four {
					return b
				}
				return before(b, chain(slices.Repeat([]byte{unix.IPPROTO_DSTOPTS}, 17)...))
			}},
			{name: "a later fragment", flags: fin, seq: out, in: true, bytes: func(b []byte) []byte {
				if v == four {
					b[7] = 1
					return b
				}
				b = before(b, chain(unix.IPPROTO_FRAGMENT))
				b[40+3] = 8
				return b
			}},
			{name: "it is cut off", flags: fin, seq: out, in: true, bytes: func(b []byte) []byte { return b[:v.header()+13] }},
		} {
			f.know(t, v, unix.IPPROTO_TCP, func(flow *fastpathFlow) {
				known(flow)
				if tt.change != nil {
					tt.change(flow)
				}
			})
			p := outPacket(v, unix.IPPROTO_TCP)
			if tt.in {
				p = inPacket(v, unix.IPPROTO_TCP)
			}
			p.Flags = tt.flags
			if tt.packet != nil {
				tt.packet(&p)
			}
			b := p.Bytes()[14:]
			l4 := len(b) - p.Payload - 20
			binary.BigEndian.PutUint32(b[l4+4:], tt.seq)
			binary.BigEndian.PutUint32(b[l4+8:], tt.ack)
			if tt.bytes != nil {
				b = tt.bytes(b)
			}
			before, err := f.Counts()
			if err != nil {
				t.Fatal(err)
			}
			code, err := f.objects.DropForged.Run(&ebpf.RunOptions{Data: b})
			if err != nil || code == 0 != tt.drop {
				t.Errorf("%s, %s: it returns %d, error %v, want it dropped: %t", v, tt.name, code, err, tt.drop)
			}
			after, err := f.Counts()
			if counted := after["forged"] > before["forged"]; err != nil || counted != tt.drop {
				t.Errorf("%s, %s: counted as forged: %t, error %v", v, tt.name, counted, err)
			}
		}
	}
}

// chain are extension headers of IPv6, in turn, that say what follows.
func chain(kinds ...byte) (headers [][]byte) {
	for _, kind := range kinds {
		header := make([]byte, 24)
		header[0], header[1] = kind, 2
		switch kind {
		case unix.IPPROTO_FRAGMENT:
			header = header[:8]
			header[1] = 0
		case unix.IPPROTO_AH:
			header[1] = 4
		}
		headers = append(headers, header)
	}
	return headers
}

// before puts headers, which have their own kinds, in front of what a packet of IPv6 has.
func before(l3 []byte, headers [][]byte) []byte {
	b := slices.Clone(l3[:40])
	next := &b[6]
	last := *next
	rest := l3[40:]
	var between []byte
	for _, h := range headers {
		*next = h[0]
		between = append(between, h...)
		next = &between[len(between)-len(h)]
		*next = last
	}
	binary.BigEndian.PutUint16(b[4:], uint16(len(between)+len(rest)))
	return slices.Concat(b, between, rest)
}
