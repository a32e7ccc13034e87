//go:build linux

package datapath

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv/grammar"
)

// TestDropForged checks that drop_forged drops a FIN or RST that conntrack would call invalid,
// whatever headers precede its TCP header, and drops nothing else.
func TestDropForged(t *testing.T) {
	f := loadForTest(t, nil)
	const acked, end, edge = 900, 1000, 70000
	const out, fin, reset = edge + 1, tcpFIN | tcpACK, tcpRST
	for _, v := range []version{four, six} {
		known := func(flow *fastpathFlow) {
			flow.setSequence(Side{end, acked, edge})
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
			{name: "FIN", flags: fin, seq: end, ack: acked},
			{name: "FIN of the peer", flags: fin, seq: end, ack: acked, in: true},
			{name: "acknowledged FIN", flags: fin, seq: 1<<32 - (0xffff - acked + 100), ack: acked, in: true},
			{name: "FIN far before the window", flags: fin, seq: 1<<32 - (0xffff - acked + 101), ack: acked, in: true, drop: true},
			{name: "FIN at the right edge of the window", flags: fin, seq: edge, ack: acked, in: true},
			{name: "FIN beyond the window", flags: fin, seq: out, ack: acked, drop: true},
			{name: "FIN of the peer beyond the window", flags: fin, seq: out, ack: acked, in: true, drop: true},
			{name: "FIN that acknowledges too much", flags: fin, seq: end, ack: edge + 1, in: true, drop: true},
			{name: "FIN that acknowledges too little", flags: fin, seq: end, ack: 1<<32 - (0xffff - acked + 1), in: true, drop: true},
			{name: "RST", flags: reset, seq: end, in: true},
			{name: "RST at the acknowledged FIN", flags: reset, seq: acked - 1, in: true},
			{name: "RST before the highest acknowledgement", flags: reset, seq: acked - 2, in: true, drop: true},
			{name: "RST with any acknowledgement", flags: reset | tcpACK, seq: end, ack: edge + 1, in: true},
			{name: "RST beyond the window", flags: reset, seq: out, in: true, drop: true},
			{name: "FIN and RST", flags: fin | reset, seq: out, ack: acked, in: true, drop: true},
			{name: "data beyond the window", flags: tcpACK, seq: out, ack: acked, in: true},
			{name: "SYN", flags: tcpSYN, seq: out, in: true},
			{name: "SYN and FIN", flags: tcpSYN | fin, seq: out, in: true},
			{name: "no sequence numbers", flags: fin, seq: out, in: true, change: func(f *fastpathFlow) { f.SeqState = 0 }},
			{name: "sequence numbers of a packet of the peer", flags: fin, seq: out, in: true, change: func(f *fastpathFlow) { f.SeqState = 1 }},
			{name: "sequence numbers of a packet of the pod", flags: fin, seq: out, in: true, drop: true, change: func(f *fastpathFlow) { f.SeqState = 2 }},
			{name: "programs missed packets of the pod", flags: fin, seq: out, in: true, change: func(f *fastpathFlow) { f.Pod.Epoch-- }},
			{name: "programs missed packets of the peer", flags: fin, seq: out, in: true, change: func(f *fastpathFlow) { f.Peer.Epoch-- }},
			{
				name: "another connection", flags: fin, seq: out, in: true,
				packet: func(p *grammar.Packet) { p.Source = netip.AddrPortFrom(p.Source.Addr(), 9) },
			},
			{
				name: "after options or extension headers", flags: fin, seq: out, ack: acked, in: true, drop: true,
				packet: func(p *grammar.Packet) { p.Options = 8 },
			},
			{
				name: "after options or extension headers, in the window", flags: fin, seq: end, ack: acked, in: true,
				packet: func(p *grammar.Packet) { p.Options = 8 },
			},
			{name: "after five extension headers", flags: fin, seq: out, in: true, drop: true, bytes: func(b []byte) []byte {
				if v == four {
					return b
				}
				return before(b, chain(unix.IPPROTO_HOPOPTS, unix.IPPROTO_DSTOPTS, unix.IPPROTO_ROUTING, unix.IPPROTO_FRAGMENT, unix.IPPROTO_AH))
			}},
			{name: "after 17 extension headers", flags: tcpACK, seq: end, in: true, drop: v == six, bytes: func(b []byte) []byte {
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
			{name: "truncated TCP header", flags: fin, seq: out, in: true, bytes: func(b []byte) []byte { return b[:v.header()+13] }},
		} {
			f.addFlow(t, v, unix.IPPROTO_TCP, func(flow *fastpathFlow) {
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
				t.Errorf("%s, %s: drop_forged returns %d, error %v, want dropped %t", v, tt.name, code, err, tt.drop)
			}
			after, err := f.Counts()
			if counted := after["forged"] > before["forged"]; err != nil || counted != tt.drop {
				t.Errorf("%s, %s: counted as forged: %t, error %v", v, tt.name, counted, err)
			}
		}
	}
}

// chain returns IPv6 extension headers, in order, each of which names the next.
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

// before inserts extension headers, each of its own kind, in front of the payload of an IPv6
// packet.
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

// TestWithoutDropForged checks that the other programs load on a kernel without eBPF for netfilter, and that the error says why
// forged packets are not dropped.
func TestWithoutDropForged(t *testing.T) {
	spec, err := loadFastpath()
	if err != nil {
		t.Fatal(err)
	}
	spec.Programs[dropForged].Instructions = asm.Instructions{asm.Return()} // it sets no return value, so every verifier rejects it
	f, err := load(spec)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.DropForged(); err == nil || !strings.Contains(err.Error(), "CONFIG_NETFILTER_BPF_LINK") {
		t.Errorf("error %v, want one that names what the kernel lacks", err)
	}
}

// BenchmarkDropForged measures drop_forged, which sees every packet that the node receives while there are flows.
func BenchmarkDropForged(b *testing.B) {
	f := loadForTest(b, nil)
	f.addFlow(b, four, unix.IPPROTO_TCP, nil)
	stranger := netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), 9)
	for _, bb := range []struct {
		name     string
		protocol uint8
		change   func(*grammar.Packet)
	}{
		{"UDP", unix.IPPROTO_UDP, func(*grammar.Packet) {}},
		{"TCP data", unix.IPPROTO_TCP, func(*grammar.Packet) {}},
		{"FIN of an unknown connection", unix.IPPROTO_TCP, func(p *grammar.Packet) { p.Flags, p.Source = tcpFIN|tcpACK, stranger }},
		{"FIN of a known connection", unix.IPPROTO_TCP, func(p *grammar.Packet) { p.Flags = tcpFIN | tcpACK }},
	} {
		b.Run(bb.name, func(b *testing.B) {
			p := inPacket(four, bb.protocol)
			bb.change(&p)
			_, took, err := f.objects.DropForged.Benchmark(p.Bytes()[14:], b.N, nil)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(took.Nanoseconds()), "ns/packet")
		})
	}
}
