//go:build linux

package datapath

import (
	"encoding/binary"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv/grammar"
)

// TestRefusedPackets checks packets that take the slow path because of their headers. The flow's sequence numbers must follow
// them as conntrack does, and become unknown where the programs cannot parse the packet.
func TestRefusedPackets(t *testing.T) {
	f := loadForTest(t, nil)
	const acked, end, edge, payload = 900, 1000, 70000, 100
	const followed, ignored, unknown, deleted = "followed", "ignored", "unknown", "deleted"
	both := func(outcome string) map[bool]string { return map[bool]string{true: outcome, false: outcome} }
	podOnly := func(outcome string) map[bool]string { return map[bool]string{true: outcome, false: ignored} }
	for _, tt := range []struct {
		name   string
		only   []version
		packet func(*grammar.Packet)
		seq    uint32
		// change changes the Ethernet frame, whose TCP header is at l4.
		change func(b []byte, v version, l4 int) []byte
		want   map[bool]string // of packets from the pod, and to it
	}{
		{name: "options or extension headers", packet: func(p *grammar.Packet) { p.Options = 8 }, want: both(followed)},
		{name: "padding", change: func(b []byte, _ version, _ int) []byte { return append(b, make([]byte, 60)...) }, want: both(followed)},
		{name: "length of BIG TCP", change: bigTCP, want: both(followed)},
		{name: "last hop", packet: func(p *grammar.Packet) { p.TTL = 1 }, want: both(followed)},
		{name: "urgent data", packet: func(p *grammar.Packet) { p.Flags |= tcpURG }, want: both(followed)},
		{name: "reserved bit", change: func(b []byte, _ version, l4 int) []byte { b[l4+12] |= 1; return b }, want: both(followed)},
		{name: "options, beyond the window", packet: func(p *grammar.Packet) { p.Options = 8 }, seq: edge + 1, want: podOnly(unknown)},
		{name: "FIN after options", packet: func(p *grammar.Packet) { p.Options, p.Flags = 8, tcpFIN|tcpACK }, want: both(deleted)},
		{name: "SYN after options", packet: func(p *grammar.Packet) { p.Options, p.Flags = 8, tcpSYN }, want: podOnly(deleted)},
		{name: "FIN beyond the window", packet: func(p *grammar.Packet) { p.Flags = tcpFIN | tcpACK }, seq: edge + 1, want: podOnly(unknown)},
		{name: "no ACK", packet: func(p *grammar.Packet) { p.Flags = 0 }, want: both(ignored)},
		{name: "header longer than the packet", change: func(b []byte, _ version, l4 int) []byte { b[l4+12] = 0xf0; return b[:l4+40] }, want: both(ignored)},
		{name: "longer than it is", change: func(b []byte, _ version, _ int) []byte { return b[:len(b)-10] }, want: both(ignored)},
		{name: "first fragment", change: firstFragment, want: both(unknown)},
		{name: "first fragment, beyond the window", change: firstFragment, seq: edge + 1, want: podOnly(unknown)},
		{name: "later fragment", change: laterFragment, want: both(ignored)},
		{name: "five extension headers", only: []version{six}, change: func(b []byte, _ version, _ int) []byte {
			return insert(b, chain(unix.IPPROTO_HOPOPTS, unix.IPPROTO_DSTOPTS, unix.IPPROTO_ROUTING, unix.IPPROTO_DSTOPTS, unix.IPPROTO_AH))
		}, want: both(followed)},
		{name: "17 extension headers", only: []version{six}, change: func(b []byte, _ version, _ int) []byte {
			return insert(b, chain(slices.Repeat([]byte{unix.IPPROTO_DSTOPTS}, 17)...))
		}, want: both(ignored)},
	} {
		for _, v := range []version{four, six} {
			if tt.only != nil && !slices.Contains(tt.only, v) {
				continue
			}
			for out, want := range tt.want {
				f.addFlow(t, v, unix.IPPROTO_TCP, func(flow *fastpathFlow) { flow.setSequence(Side{end, acked, edge}) })
				p, program := inPacket(v, unix.IPPROTO_TCP), f.RedirectVXLAN
				if out {
					p, program = outPacket(v, unix.IPPROTO_TCP), f.RedirectPod
				}
				p.Payload = payload
				if tt.packet != nil {
					tt.packet(&p)
				}
				b := p.Bytes()
				l4 := len(b) - payload - 20
				seq := tt.seq
				if seq == 0 {
					seq = end
				}
				binary.BigEndian.PutUint32(b[l4+4:], seq)
				binary.BigEndian.PutUint32(b[l4+8:], acked)
				if tt.change != nil {
					b = tt.change(b, v, l4)
				}
				if code, err := program.Run(&ebpf.RunOptions{Data: b, DataOut: make([]byte, len(b)+64)}); err != nil || int32(code) != -1 {
					t.Errorf("%s, %s: the program returns %d, %v, want TCX_NEXT", v, tt.name, int32(code), err)
				}
				if is := f.outcome(t, v, out, end, payload); is != want {
					t.Errorf("%s, %s, from the pod %t: the flow is %s, want %s", v, tt.name, out, is, want)
				}
			}
		}
	}
}

// outcome describes the effect of a packet on the flow. The packet went from the pod (out) or to it, with payload bytes that
// start at the sequence number end.
func (p *Programs) outcome(t *testing.T, v version, out bool, end, payload uint32) string {
	t.Helper()
	pod, peer := v.ends()
	flow := Flow{pod, peer, unix.IPPROTO_TCP}
	n, err := p.Sequence(flow, monotonic(t))
	if err != nil {
		t.Fatal(err)
	}
	known, err := p.Known(flow)
	if err != nil {
		t.Fatal(err)
	}
	side := n.Peer
	if out {
		side = n.Pod
	}
	switch {
	case !known:
		return "deleted"
	case n == Sequence{}:
		return "unknown"
	case side.Next == end:
		return "ignored"
	case side.Next == end+payload:
		return "followed"
	}
	return "wrong"
}

// bigTCP clears the length in the IP header, as BIG TCP does for packets whose length does not fit into that field.
func bigTCP(b []byte, v version, _ int) []byte {
	at := 14 + 2
	if v == six {
		at = 14 + 4
	}
	binary.BigEndian.PutUint16(b[at:], 0)
	return b
}

// insert inserts extension headers into an Ethernet frame.
func insert(b []byte, headers [][]byte) []byte {
	return append(slices.Clone(b[:14]), before(b[14:], headers)...)
}

// firstFragment turns a packet into the first of several fragments, with the smallest possible part of the TCP header.
func firstFragment(b []byte, v version, l4 int) []byte {
	b = b[:l4+8]
	if v == six {
		binary.BigEndian.PutUint16(b[14+4:], uint16(len(b)-14-40))
		b = insert(b, chain(unix.IPPROTO_FRAGMENT))
		b[14+40+3] = 1
		return b
	}
	b[14+6] = 0x20
	binary.BigEndian.PutUint16(b[14+2:], uint16(len(b)-14))
	return b
}

// laterFragment turns a packet into a later fragment, whose payload is not a TCP header.
func laterFragment(b []byte, v version, _ int) []byte {
	if v == six {
		b = insert(b, chain(unix.IPPROTO_FRAGMENT))
		b[14+40+3] = 8
		return b
	}
	b[14+6], b[14+7] = 0, 1
	return b
}
