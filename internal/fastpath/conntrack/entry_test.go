//go:build linux

package conntrack

import (
	"net/netip"
	"testing"
	"time"

	"slipstream.dev/internal/fastpath/datapath"
)

// TestTimeoutOfIdleConnection checks that the remaining timeout of an idle connection is exact to half a second, although
// conntrack rounds down the timeout that it reports.
func TestTimeoutOfIdleConnection(t *testing.T) {
	for _, tt := range []struct {
		begun uint32
		idle  time.Duration
		want  uint32
	}{
		{432_000, 1400 * time.Millisecond, 431_999}, {432_000, 1600 * time.Millisecond, 431_998}, {431_999, 1600 * time.Millisecond, 431_998},
		{300, 10 * time.Second, 290}, {300, time.Hour, 0},
	} {
		if got := (&Entry{Progress: Progress{Timeout: tt.begun}}).timeoutAfter(tt.idle, 432_000); got != tt.want {
			t.Errorf("%d s after %v idle are %d s, want %d", tt.begun, tt.idle, got, tt.want)
		}
	}
}

// TestWithout checks that without never lengthens a timeout, even for a negative time, and never returns less than 0.
func TestWithout(t *testing.T) {
	for idle, want := range map[time.Duration]uint32{-time.Second: 300, 0: 300, 1400 * time.Millisecond: 299, time.Hour: 0} {
		if is := without(300, idle); is != want {
			t.Errorf("300 s without %v: %d, want %d", idle, is, want)
		}
	}
}

// TestEntryLeftLiberal checks which entries the agent recovers, and which connections it finds in them.
func TestEntryLeftLiberal(t *testing.T) {
	address := netip.MustParseAddrPort
	pod, service, backend := address("10.0.0.2:40000"), address("10.96.0.1:80"), address("10.0.1.2:8080")
	neighbour := address("10.0.0.9:80") // another pod of the node
	links := map[netip.Addr]int{pod.Addr(): 7, neighbour.Addr(): 9}
	between := func(e *Entry, client, server netip.AddrPort) {
		e.original.from, e.original.to, e.reply.from, e.reply.to = client, server, server, client
	}
	const liberal = tcpWindowScale | tcpLiberal | tcpMaxAck
	client := datapath.Recovery{Flow: datapath.Flow{Pod: pod, Peer: service, Protocol: 6}, WirePeer: backend, Link: 7, PodScale: 7, PeerScale: 9}
	for _, tt := range []struct {
		name   string
		change func(*Entry)
		want   datapath.Recovery
	}{
		{"Service", func(*Entry) {}, client},
		{"closed", func(e *Entry) { e.State = tcpClose }, client},
		{"incoming", func(e *Entry) {
			e.original.from, e.original.to, e.reply.from, e.reply.to = backend, pod, pod, backend
		}, datapath.Recovery{Flow: datapath.Flow{Pod: pod, Peer: backend, Protocol: 6}, WirePeer: backend, Link: 7, PodScale: 9, PeerScale: 7}},
		{"masqueraded", func(e *Entry) { e.reply.to = address("192.0.2.1:40000") }, datapath.Recovery{}},
		{"host port", func(e *Entry) {
			e.original.from, e.original.to, e.reply.from, e.reply.to = backend, address("192.0.2.1:80"), pod, backend
		}, datapath.Recovery{}},
		{"no pod here", func(e *Entry) { e.original.from, e.reply.to = address("10.0.0.3:1"), address("10.0.0.3:1") }, datapath.Recovery{}},
		{"to a pod of the node", func(e *Entry) { between(e, pod, neighbour) },
			datapath.Recovery{Flow: datapath.Flow{Pod: pod, Peer: neighbour, Protocol: 6}, WirePeer: neighbour, Link: 7, PodScale: 7, PeerScale: 9}},
		{"from a pod of the node", func(e *Entry) { between(e, neighbour, pod) },
			datapath.Recovery{Flow: datapath.Flow{Pod: pod, Peer: neighbour, Protocol: 6}, WirePeer: neighbour, Link: 7, PodScale: 9, PeerScale: 7}},
		{"from a pod of the node, masqueraded", func(e *Entry) { between(e, neighbour, pod); e.reply.to = address("192.0.2.1:40000") }, datapath.Recovery{}},
		{"from a pod of the node to a Service", func(e *Entry) { between(e, neighbour, service); e.reply.from = pod },
			datapath.Recovery{Flow: datapath.Flow{Pod: neighbour, Peer: service, Protocol: 6}, WirePeer: pod, Link: 9, PodScale: 7, PeerScale: 9}},
		{"half-closed", func(e *Entry) { e.State = 4 }, datapath.Recovery{}},
		{"closed after a FIN", func(e *Entry) { e.State, e.Flags[0] = tcpClose, e.Flags[0]|tcpCloseInit }, datapath.Recovery{}},
		{"strict in a direction", func(e *Entry) { e.Flags[1] &^= tcpLiberal }, datapath.Recovery{}},
		{"picked up in mid-stream", func(e *Entry) { e.Flags[0] &^= tcpWindowScale }, datapath.Recovery{}},
		{"in a flow table of the kernel", func(e *Entry) { e.status = 1 << 14 }, datapath.Recovery{}},
	} {
		e := &Entry{Progress: Progress{State: tcpEstablished, Flags: [2]uint8{liberal, liberal}}, scale: [2]uint8{7, 9}}
		e.original.from, e.original.to, e.reply.from, e.reply.to = pod, service, backend, pod
		tt.change(e)
		got, ok := e.recovery(links)
		if !ok || !e.leftLiberal() {
			got = datapath.Recovery{}
		}
		if got != tt.want {
			t.Errorf("%s: %+v, want %+v", tt.name, got, tt.want)
		}
	}
}

// TestIdleOfEntry checks the idle time that is computed from an entry's timeout, in every TCP state.
func TestIdleOfEntry(t *testing.T) {
	for timeout, want := range map[uint32]time.Duration{432_000: 0, 431_000: 1000 * time.Second, 290: 10 * time.Second, 8: 2 * time.Second, 390: 10 * time.Second, 500_000: 0} {
		if got := (&Entry{Progress: Progress{Timeout: timeout}}).idle(timeouts{432_000, 400, 300, 10}); got != want {
			t.Errorf("a timeout of %d s is after %s idle, want %s", timeout, got, want)
		}
	}
}

// FuzzParseEntry checks that any netlink message is parsed as a conntrack entry or rejected.
func FuzzParseEntry(f *testing.F) {
	nested := func(kind byte, inner ...byte) []byte {
		return append([]byte{byte(len(inner) + 4), 0, kind, 0x80}, inner...)
	}
	tuple := func(kind byte) []byte {
		return nested(kind, append(nested(ctaTupleIP, 8, 0, ctaIPv4Src, 0, 10, 0, 0, 1), nested(ctaTupleProto, 6, 0, ctaProtoSrcPort, 0, 1, 2, 0, 0)...)...)
	}
	whole := append([]byte{2, 0, 0, 0}, tuple(ctaTupleOrig)...)
	whole = append(whole, tuple(ctaTupleReply)...)
	whole = append(whole, nested(ctaProtoInfo, nested(ctaProtoInfoTCP, 5, 0, ctaTCPState, 0, 3, 0, 0, 0, 6, 0, ctaTCPFlagsOriginal, 0, 0x23, 0, 0, 0)...)...)
	f.Add(whole)
	f.Add(whole[:9])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		is, err := parseEntry(b)
		if (is == nil) == (err == nil) {
			t.Errorf("%x is %v, error %v", b, is, err)
		}
		if len(b) < 4 && err == nil {
			t.Errorf("%x is %v", b, is)
		}
	})
}
