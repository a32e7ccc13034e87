package doctor

import (
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
