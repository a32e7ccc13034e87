//go:build linux

package overlay

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv/grammar"
)

// FuzzHop checks that hop keeps a valid checksum valid, and rejects what is not a packet.
func FuzzHop(f *testing.F) {
	a := netip.MustParseAddrPort
	f.Add(grammar.Segment(a("10.244.0.2:1"), a("10.244.1.2:2"), 1, 0))
	f.Add(append([]byte{0x60, 0, 0, 0, 0, 0, 59, 64}, make([]byte, 32)...))
	carries := grammar.Segment(a("10.244.0.2:1"), a("10.244.1.2:2"), 1, 0)
	carries[10] = 0xff
	f.Add(carries)
	f.Add([]byte{0x45})
	f.Fuzz(func(t *testing.T, packet []byte) {
		before := bytes.Clone(packet)
		to, ok := hop(packet)
		switch {
		case !ok:
			if !bytes.Equal(before, packet) {
				t.Errorf("changed %x to %x, and is not to be forwarded", before, packet)
			}
		case to.Is4():
			if !bytes.Equal(to.AsSlice(), before[16:20]) || packet[8] != before[8]-1 {
				t.Errorf("%x to %s becomes %x", before, to, packet)
			}
			// With a valid checksum, the sum over the header is 0. Ones' complement has two representations of 0, but a header
			// that is not all zeros yields only one of them.
			if grammar.Sum(0, before[:20]) != grammar.Sum(0, packet[:20]) {
				t.Errorf("sum of %x is %#x, then %#x", before[:20], grammar.Sum(0, before[:20]), grammar.Sum(0, packet[:20]))
			}
		case !bytes.Equal(to.AsSlice(), before[24:40]) || packet[7] != before[7]-1:
			t.Errorf("%x to %s becomes %x", before, to, packet)
		}
	})
}

// TestRelayRoute checks that a route is found whichever was found before it.
func TestRelayRoute(t *testing.T) {
	r := newPacketRelay(-1, -1, forwarding{MTU: 1472, Routes: []forwarderRoute{
		{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParseAddrPort("198.18.0.2:8285")},
		{netip.MustParsePrefix("10.244.2.0/24"), netip.MustParseAddrPort("198.18.0.3:8285")},
		{netip.MustParsePrefix("fd00::/64"), netip.MustParseAddrPort("198.18.0.4:8285")},
	}})
	port := binary.NativeEndian.Uint16([]byte{8285 >> 8, 8285 & 0xff}) // as it goes out
	for range 2 {
		for to, want := range map[string]byte{"10.244.1.9": 2, "10.244.2.1": 3, "fd00::7": 4, "10.244.3.1": 0, "::ffff:10.244.1.9": 0} {
			node := r.route(netip.MustParseAddr(to))
			if want == 0 && node != nil || want != 0 && (node == nil || node.Addr[3] != want || node.Port != port) {
				t.Errorf("%s is on %v, want 198.18.0.%d", to, node, want)
			}
		}
	}
}

// TestRelaySend checks that a relay sends a packet to the node of its pod, and continues after a packet to an unknown address.
func TestRelaySend(t *testing.T) {
	tun, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(tun[0])
	defer unix.Close(tun[1])
	other, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(socket)
	r := newPacketRelay(tun[0], socket, forwarding{MTU: 1472, Routes: []forwarderRoute{
		{netip.MustParsePrefix("10.244.1.0/24"), other.LocalAddr().(*net.UDPAddr).AddrPort()},
	}})
	if did, err := r.send(); did || err != nil {
		t.Errorf("without a packet: %t, %v", did, err)
	}
	var packet []byte
	for _, to := range []string{"10.244.2.2:1", "10.244.1.2:1"} {
		packet = grammar.Segment(netip.MustParseAddrPort("10.244.0.2:1"), netip.MustParseAddrPort(to), 1, 0)
		if _, err := unix.Write(tun[1], packet); err != nil {
			t.Fatal(err)
		}
		if did, err := r.send(); !did || err != nil {
			t.Errorf("a packet to %s: %t, %v", to, did, err)
		}
	}
	if err := other.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 2000)
	if n, err := other.Read(got); err != nil || !bytes.Equal(got[16:n], packet[16:]) { // the addresses, and what follows
		t.Errorf("the node gets %x, %v, want %x", got[:n], err, packet)
	}
}
