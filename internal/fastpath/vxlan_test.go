//go:build linux

package fastpath_test

import (
	"net"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv/grammar"
)

// Port and VNI of flannel's VXLAN in the lab.
const vxlanPort, vni = 8472, 1

// injector sends the packets of a connection to its pod on node0, in VXLAN packets of its own.
type injector struct {
	*net.UDPConn
	inner grammar.Packet
}

func (w *world) injector(place string, p *ping) injector {
	w.Helper()
	i := injector{inner: grammar.Packet{
		To: w.device("n0", "flannel.1").Attrs().HardwareAddr, From: w.device("n1", "flannel.1").Attrs().HardwareAddr,
		Source: p.near.RemoteAddr().(*net.UDPAddr).AddrPort(), Target: p.near.LocalAddr().(*net.UDPAddr).AddrPort(),
		Protocol: unix.IPPROTO_UDP, TTL: 63, Fragment: 0x4000, Payload: 16,
	}}
	w.in(place, func() (err error) {
		i.UDPConn, err = net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.IPv4(198, 18, 0, 1), Port: vxlanPort})
		return err
	})
	w.Cleanup(func() { i.Close() })
	return i
}

func (i injector) send(t *testing.T) {
	header := []byte{8, 0, 0, 0, 0, 0, vni, 0} // RFC 7348, section 5
	if _, err := i.Write(slices.Concat(header, i.inner.Bytes())); err != nil {
		t.Errorf("send a VXLAN packet: %v", err)
	}
}

// TestInjectedVXLAN injects VXLAN packets, each with different headers, into a connection, from a pod and from the address of
// the other node. They must not fill the tables of the fast path, and a connection between other pods must stay accelerated,
// even at the NIC.
func TestInjectedVXLAN(t *testing.T) {
	const packets = 2000
	for _, tt := range []struct {
		name, from string
		change     func(i *injector, n int) error
		// most is the number of outer headers that the fast path may know, including the other node's.
		most int
	}{
		{"a pod, other MAC addresses", "n1p1", func(i *injector, n int) error {
			i.inner.From = grammar.MadeUp(n)
			return nil
		}, 1},
		{"the node, other MAC addresses", "n1", func(i *injector, n int) error {
			i.inner.From = grammar.MadeUp(n)
			return nil
		}, 1},
		{"the node, other TTLs", "n1", func(i *injector, n int) (err error) {
			option(t, i.UDPConn, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TTL, 2+n%250) })
			return err
		}, 4},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
			p := w.ping()
			p.waitAccelerated()
			p.begin()
			known := w.entries("n0", "decap_states")
			w.eventually("packets are decapsulated at the NIC", nil, func() bool { return known() == 1 })
			i := w.injector(tt.from, p)
			received, byKernel, most := w.snmp("n0p0", "Udp:", "InDatagrams"), w.decappedByKernel("n0"), 0
			pings := p.sent.Load()
			share := w.during(e, func() {
				for n := range packets {
					if err := tt.change(&i, n); err != nil {
						t.Error(err)
					}
					i.send(t)
					time.Sleep(200 * time.Microsecond)
					if n%100 == 0 {
						most = max(most, known())
					}
				}
			})
			received = w.snmp("n0p0", "Udp:", "InDatagrams") - received
			byKernel, pings = w.decappedByKernel("n0")-byKernel, p.sent.Load()-pings
			t.Logf("%d outer headers; the pod received %d datagrams, and sent %d; %d packets were decapsulated by the kernel", most, received, pings, byKernel)
			if received < packets {
				t.Errorf("the pod received %d datagrams, and %d were injected", received, packets)
			}
			if most > tt.most {
				t.Errorf("want at most %d outer headers", tt.most)
			}
			// The injected packets may slow down the connection that they are injected into, but no other.
			if others := packets + pings; byKernel > others+others/10 || share < 0.9 {
				t.Errorf("another connection was slowed down: %.2f of its packets left by the fast path", share)
			}
			if n := w.counts(0)["table-full"]; tt.most == 1 && n > 0 {
				t.Errorf("%d packets found a table full", n)
			}
			w.accelerate(e)
			w.eventually("the outer headers are forgotten", func() { w.trip(e, 10) }, func() bool { return known() == 1 })
		})
	}
}
