package doctor

import (
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"slipstream.dev/internal/testenv"
)

// TestListenBesideTraffic checks that the packets of an overlay do not displace the datagrams of a probe: a raw socket that nobody
// reads meanwhile still has these.
func TestListenBesideTraffic(t *testing.T) {
	testenv.EnterNamespace(t)
	run(t, "ip link set lo up")
	for _, address := range []string{"127.0.0.1", "::1"} {
		to := netip.AddrPortFrom(netip.MustParseAddr(address), 8472)
		device, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(to))
		if err != nil {
			t.Fatal(err)
		}
		defer device.Close()
		key := newKey()
		raw, err := listenRaw(to.Addr(), key)
		if err != nil {
			t.Fatal(err)
		}
		defer raw.Close()
		overlay, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
		if err != nil {
			t.Fatal(err)
		}
		defer overlay.Close()
		for range 5000 {
			if _, err := overlay.Write(datagram(to.Addr(), newKey(), 1, 1400)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := SendDatagrams(to, key, 1, []int{1000}); err != nil {
			t.Fatal(err)
		}
		if err := raw.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			t.Fatal(err)
		}
		p := Port{port: 8472, key: key, raw: true, received: make(map[int]*Received)}
		p.more = sync.NewCond(&p.mu)
		b := make([]byte, largest)
		for range 2 + tries { // each twice, the last three times
			n, _, err := raw.ReadFrom(b)
			if err != nil {
				t.Fatalf("%s: %v", address, err)
			}
			p.add(b[:n])
		}
		if got := p.received[1]; got == nil || !got.Complete || len(got.Sizes) != 1 {
			t.Errorf("%s: received %+v", address, got)
		}
	}
}

// TestRouteMTU checks that the MTU of a route is the one that somebody configured, and not the one that the kernel learned.
func TestRouteMTU(t *testing.T) {
	n := newNode(t)
	n.sh(`ip route add 203.0.113.0/24 via 10.77.0.2; ip route add 203.0.113.9 via 10.77.0.2 mtu 1400
		in_other ip link add d0 mtu 1300 type veth peer name d1; in_other ip link set d0 up; in_other ip link set d1 up; in_other ip route add 203.0.113.0/24 dev d0`)
	for _, c := range []struct{ to, want string }{
		{"10.77.0.2:9", "e0 1500 invalid IP 0 1500"},
		{"203.0.113.8:9", "e0 1500 10.77.0.2 0 1300"},
		{"203.0.113.9:9", "e0 1500 10.77.0.2 1400 1300"},
	} {
		send := func() (Sent, error) { return SendDatagrams(netip.MustParseAddrPort(c.to), newKey(), 1, []int{1400}) }
		if _, err := send(); err != nil { // the kernel learns the path MTU
			t.Fatal(err)
		}
		testenv.Retry(t, 3, func() error { // an answer may come after the last datagram
			s, err := send()
			if got := fmt.Sprintf("%s %d %s %d %d", s.Device, s.DeviceMTU, s.Gateway, s.RouteMTU, s.ToldMTU); err != nil || got != c.want {
				return fmt.Errorf("to %s: %s, %v, want %s", c.to, got, err, c.want)
			}
			return nil
		})
	}
}
