//go:build linux

package overlay

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv/grammar"
)

// switched is three nodes whose forwarders exchange frames, with the far ends of their devices.
type switched struct {
	relays  []*frameRelay
	devices []int
}

const switchedMTU = 1438

func newSwitched(t *testing.T) *switched {
	t.Helper()
	const nodes = 3
	s := &switched{}
	var sockets []int
	var peers []forwarderPeer
	for i := range nodes {
		socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(socket) })
		if err := unix.Bind(socket, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
			t.Fatal(err)
		}
		at, err := unix.Getsockname(socket)
		if err != nil {
			t.Fatal(err)
		}
		sockets = append(sockets, socket)
		peers = append(peers, forwarderPeer{grammar.MadeUp(100 + i), netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(at.(*unix.SockaddrInet4).Port))})
	}
	for i := range nodes {
		device, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(device[0]); unix.Close(device[1]) })
		f := forwarding{Name: peers[i].Name, MTU: switchedMTU}
		for j, p := range peers {
			if j != i {
				f.Peers = append(f.Peers, p)
			}
		}
		s.relays = append(s.relays, newFrameRelay(device[0], sockets[i], f))
		s.devices = append(s.devices, device[1])
	}
	return s
}

// pass sends frames to the device of a node, and returns which frames and how many datagrams arrive at each node.
func (s *switched) pass(t *testing.T, node int, frames ...[]byte) (arrived [3][][]byte, datagrams [3]int) {
	t.Helper()
	for _, frame := range frames {
		if _, err := unix.Write(s.devices[node], frame); err != nil {
			t.Fatal(err)
		}
	}
	if did, err := s.relays[node].send(); !did || err != nil {
		t.Fatalf("send: %t, %v", did, err)
	}
	for i, r := range s.relays {
		for {
			n, err := unix.Read(r.socket, r.received)
			if errors.Is(err, unix.EAGAIN) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			datagrams[i]++
			if err := r.deliver(r.received[:n]); err != nil {
				t.Fatal(err)
			}
		}
		for buf := make([]byte, 2000); ; {
			n, err := unix.Read(s.devices[i], buf)
			if err != nil {
				break
			}
			arrived[i] = append(arrived[i], bytes.Clone(buf[:n]))
		}
	}
	return arrived, datagrams
}

var (
	podA, podB, everybody = grammar.MadeUp(1), grammar.MadeUp(2), net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
)

func frame(to, from net.HardwareAddr, payload int) []byte {
	f := append(bytes.Clone(to), from...)
	return append(append(f, 8, 0), make([]byte, payload)...)
}

// TestFrameRelayLearns checks that forwarders act as a switch: a frame to a group or an unknown address goes to every node, and
// a frame to a learned address only to its node.
func TestFrameRelayLearns(t *testing.T) {
	s := newSwitched(t)
	for _, step := range []struct {
		what  string
		node  int
		frame []byte
		want  [3]int
	}{
		{"a broadcast", 0, frame(everybody, podA, 28), [3]int{0, 1, 1}},
		{"to an unknown address", 0, frame(podB, podA, 28), [3]int{0, 1, 1}},
		{"the answer", 1, frame(podA, podB, 28), [3]int{1, 0, 0}},
		{"to an address that answered", 0, frame(podB, podA, 28), [3]int{0, 1, 0}},
		{"to an address of the same node", 0, frame(podA, grammar.MadeUp(3), 28), [3]int{}},
		{"to one that moved", 2, frame(everybody, podB, 28), [3]int{1, 1, 0}},
		{"to where it is now", 0, frame(podB, podA, 28), [3]int{0, 0, 1}},
		{"from a group", 0, frame(podB, everybody, 28), [3]int{0, 0, 1}},
		{"a broadcast again", 0, frame(everybody, podA, 28), [3]int{0, 1, 1}},
	} {
		arrived, _ := s.pass(t, step.node, step.frame)
		for i := range arrived {
			if len(arrived[i]) != step.want[i] || len(arrived[i]) == 1 && !bytes.Equal(arrived[i][0], step.frame) {
				t.Errorf("%s: node %d gets %x, want %d of %x", step.what, i, arrived[i], step.want[i], step.frame)
			}
		}
	}
}

// TestFrameRelayShares checks that frames share a datagram up to the NIC's MTU.
func TestFrameRelayShares(t *testing.T) {
	for what, c := range map[string]struct {
		payloads []int
		want     int
	}{
		"small ones":               {[]int{52, 52, 52}, 1},
		"a full one":               {[]int{switchedMTU}, 1},
		"full ones":                {[]int{switchedMTU, switchedMTU}, 2},
		"two that just fit":        {[]int{705, 705}, 1},
		"two that just do not fit": {[]int{705, 706}, 2},
		"one that is too large":    {[]int{52, switchedMTU + 1, 52}, 1},
		"one that is no frame":     {[]int{52, -1, 52}, 1},
	} {
		s := newSwitched(t)
		s.pass(t, 1, frame(everybody, podB, 28))
		var frames, want [][]byte
		for _, payload := range c.payloads {
			f := frame(podB, podA, max(payload, 0))
			if payload < 0 {
				f = f[:ethernetHeader-1]
			}
			frames = append(frames, f)
			if payload >= 0 && payload <= switchedMTU {
				want = append(want, f)
			}
		}
		arrived, datagrams := s.pass(t, 0, frames...)
		if datagrams[1] != c.want || datagrams[2] != 0 {
			t.Errorf("%s: %v datagrams, want %d to node 1", what, datagrams, c.want)
		}
		if len(arrived[1]) != len(want) {
			t.Fatalf("%s: %d frames arrive, want %d", what, len(arrived[1]), len(want))
		}
		for i := range want {
			if !bytes.Equal(arrived[1][i], want[i]) {
				t.Errorf("%s: frame %d is %x, want %x", what, i, arrived[1][i], want[i])
			}
		}
	}
}

// TestFrameRelayForgets checks that a forwarder knows a limited number of addresses.
func TestFrameRelayForgets(t *testing.T) {
	r := newFrameRelay(-1, -1, forwarding{Name: podA, MTU: switchedMTU})
	for i := range macsKnown + 10 {
		r.learn(frame(everybody, grammar.MadeUp(i), 0), here)
	}
	if n := len(r.owners); n > macsKnown {
		t.Errorf("knows %d addresses, want at most %d", n, macsKnown)
	}
}

// FuzzUnpack checks that unpack returns only whole frames for the node, in order, whatever a datagram contains.
func FuzzUnpack(f *testing.F) {
	to := mac(podA)
	pack := func(receiver mac, size int, b []byte) []byte {
		p := append(make([]byte, nodeName), receiver[:]...)
		return append(binary.BigEndian.AppendUint16(p, uint16(size)), b...)
	}
	whole := frame(podB, podA, 3)
	f.Add(append(pack(to, len(whole), whole), pack(mac(podB), len(whole), whole)...))
	f.Add(pack(to, len(whole)+1, whole))
	f.Add(pack(to, 0, nil))
	f.Add(pack(to, ethernetHeader-1, whole))
	f.Fuzz(func(t *testing.T, frames []byte) {
		end := 0
		for got := range unpack(frames, to) {
			start := cap(frames) - cap(got) // got is a part of frames
			if len(got) < ethernetHeader || start < end+frameHeader {
				t.Fatalf("%d bytes at %d of %x, after %d", len(got), start, frames, end)
			}
			header := pack(to, len(got), nil)[nodeName:]
			if !bytes.Equal(frames[start-len(header):start], header) {
				t.Fatalf("%x at %d of %x has no header %x", got, start, frames, header)
			}
			end = start + len(got)
		}
	})
}
