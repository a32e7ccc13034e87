//go:build linux

package fastpath_test

import (
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv/grammar"
)

// TestLocal checks that connections between two pods of a node take the fast path both ways, whichever pod has the smaller address, and
// that their data arrives. The pods are on a bridge, or the node routes between them. No other device of the node sees the packets.
func TestLocal(t *testing.T) {
	t.Parallel()
	for _, shape := range tunnels {
		t.Run(shape, func(t *testing.T) {
			t.Parallel()
			w := newWorldOf(t, shape, spec.OffloadFull, true) // with IPv4 as in all worlds
			w.local = true
			w.start()
			for version, six := range versions {
				for name, front := range map[string]front{"direct": direct, "Service": byService} {
					if six && name == "Service" {
						continue // the fast path does not translate IPv6
					}
					for from, pods := range []string{"to the larger address", "to the smaller address"} {
						w.six = six
						w.sub(version+" "+name+" "+pods, func() { w.checkLocal(from, front) })
					}
				}
			}
		})
	}
}

// checkLocal checks a connection from one of the pods to the other.
func (w *world) checkLocal(from int, front front) {
	before := w.counts(0)
	e := w.connectOf(from, front)
	w.stream(e)
	w.accelerate(e.back())
	w.wantKind(0, "local", e)
	c := w.counts(0)
	w.Logf("%v", c)
	// Until there is a flow, a backend's packets are sampled under its own address; NAT translates that address.
	for why, most := range map[string]uint64{"table-full": 0, "rewritten": 3, "csum-unverified": 0, "exceeds-mtu": 0, "mismatch": 0} {
		if n := c[why] - before[why]; n > most {
			w.Errorf("%d packets counted as %s", n, why)
		}
	}
	if n := w.roundTrips(e, 0, 200); n < 350 {
		w.Errorf("of 400 packets %d took the fast path", n)
	}
}

// TestLocalOneWay checks that datagrams between two pods of a node take the fast path even if only the first one is answered. If they are
// for a Service, no packet has the address of the pod that gets them until the node has translated it.
func TestLocalOneWay(t *testing.T) {
	t.Parallel()
	for _, shape := range tunnels {
		for name, front := range map[string]front{"direct": direct, "Service": byService} {
			t.Run(shape+" "+name, func(t *testing.T) {
				t.Parallel()
				w := newLocalWorld(t, shape, false)
				w.start()
				w.checkOneWay(front, func() {})
			})
		}
		t.Run(shape+" from a busy pod", func(t *testing.T) {
			t.Parallel()
			w := newWorldOfPods(t, shape, spec.OffloadFull, 3)
			w.start()
			e := w.connect().back()
			w.accelerate(e)
			w.local = true
			w.checkOneWay(direct, func() { w.trip(e, 10) })
		})
	}
}

// checkOneWay sends datagrams, and answers only the first: conntrack must see a reply. It calls meanwhile again and again. If the node
// then forgets the MAC addresses of both pods, it must resolve them again.
func (w *world) checkOneWay(front front, meanwhile func()) {
	near, far := w.datagramPair(front)
	send := func() {
		if _, err := near.Write([]byte("datagram")); err != nil {
			w.Fatal(err)
		}
	}
	w.exchange(near, far, 1)
	if err := near.SetDeadline(time.Time{}); err != nil {
		w.Fatal(err)
	}
	accelerated := func(what string) {
		before := w.counts(0)["fast-out-local"]
		w.eventually(what, func() {
			meanwhile()
			before = w.counts(0)["fast-out-local"]
			for range 200 {
				send()
			}
		}, func() bool { return w.counts(0)["fast-out-local"] >= before+190 })
	}
	accelerated("the datagrams take the fast path")
	w.in("n0", func() error {
		all, err := netlink.NeighList(0, netlink.FAMILY_V4)
		for _, n := range all {
			if (n.IP.Equal(w.pod(0, 0).AsSlice()) || n.IP.Equal(w.pod(0, 1).AsSlice())) && err == nil {
				err = netlink.NeighDel(&n)
			}
		}
		return err
	})
	accelerated("the datagrams take the fast path again")
}

// TestSpoofedSender sends from many made-up MAC addresses on an accelerated connection between pods of a node, from either end. These
// packets must not fill the table of pods' links.
func TestSpoofedSender(t *testing.T) {
	t.Parallel()
	w := newLocalWorld(t, spec.ShapeFlannel, false)
	w.start()
	near, far := w.datagramPair(direct)
	for _, hostile := range []string{"n0p0", w.farPod()} {
		w.sub(hostile, func() {
			before := w.counts(0)["fast-out-local"]
			w.eventually("the datagrams take the fast path", func() { w.exchange(near, far, 100) },
				func() bool { return w.counts(0)["fast-out-local"] > before+200 })
			w.sendSpoofed(hostile, near.LocalAddr(), far.LocalAddr())
		})
	}
}

// exchange sends datagrams one after another, and waits for the answer to each.
func (w *world) exchange(near, far *net.UDPConn, datagrams int) {
	w.Helper()
	buf := make([]byte, 64)
	for range datagrams {
		deadline := time.Now().Add(patience)
		err := errors.Join(near.SetDeadline(deadline), far.SetDeadline(deadline))
		_, sent := near.Write([]byte("datagram"))
		n, from, received := far.ReadFromUDPAddrPort(buf)
		_, answered := far.WriteToUDPAddrPort(buf[:n], from)
		_, got := near.Read(buf)
		if err := errors.Join(err, sent, received, answered, got); err != nil {
			w.Fatal(err)
		}
	}
}

// sendSpoofed sends datagrams of a connection from made-up MAC addresses in the pod at its near or its far end.
func (w *world) sendSpoofed(hostile string, near, far net.Addr) {
	const podLinks = 4096 // POD_LINKS of bpf/fastpath/index.h
	packet := grammar.Packet{
		Source: near.(*net.UDPAddr).AddrPort(), Target: far.(*net.UDPAddr).AddrPort(),
		Protocol: unix.IPPROTO_UDP, TTL: 64, Payload: 8,
	}
	to := w.farPod()
	if hostile == to {
		to = "n0p0"
		packet.Source, packet.Target = packet.Target, packet.Source
	}
	w.in(to, func() error {
		l, err := netlink.LinkByName("eth0")
		if err == nil {
			packet.To = l.Attrs().HardwareAddr
		}
		return err
	})
	before, tap := w.counts(0), w.tap(hostile, "eth0")
	for i := range 3 * podLinks {
		packet.From = grammar.MadeUp(i)
		tap.send(packet.Bytes())
	}
	now := w.counts(0)
	if n := now["mismatch"] - before["mismatch"]; n < podLinks {
		w.Errorf("only %d packets did not match", n)
	}
	if n := now["table-full"] - before["table-full"]; n > 0 {
		w.Errorf("the table was full for %d packets", n)
	}
}

// TestLocalDrop checks that whatever makes the node drop what one of its pods sends to another also stops the fast path between them: at
// once if the kernel announces the change, within a second if not.
func TestLocalDrop(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, shape   string
		six, notified bool
		drop          func(*world)
	}{
		{"a rule, bridged", spec.ShapeFlannel, false, true, func(w *world) { w.drop("n0") }},
		{"a rule, bridged IPv6", spec.ShapeFlannel, true, true, func(w *world) { w.drop("n0") }},
		{"a rule, routed", spec.ShapeCalico, false, true, func(w *world) { w.drop("n0") }},
		{"a route", spec.ShapeCalico, false, true, func(w *world) {
			w.in("n0", func() error {
				return netlink.RouteReplace(&netlink.Route{Dst: prefix(pod(0, 1), 32), Type: unix.RTN_BLACKHOLE})
			})
		}},
		{"a link that goes down", spec.ShapeFlannel, false, true, func(w *world) {
			w.in("n0", func() error {
				l, err := netlink.LinkByName("cni0")
				if err != nil {
					return err
				}
				return netlink.LinkSetDown(l)
			})
		}},
		{"no forwarding", spec.ShapeCalico, false, false, func(w *world) {
			w.in("n0", func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0) })
		}},
		{"an isolated port", spec.ShapeFlannel, false, false, func(w *world) {
			w.in("n0", func() error {
				links, err := netlink.LinkList()
				for _, l := range links {
					if l.Type() == "veth" && l.Attrs().MasterIndex != 0 && err == nil {
						err = netlink.LinkSetIsolated(l, true)
					}
				}
				return err
			})
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			delivered := func() time.Duration {
				w := newWorldOf(t, tt.shape, spec.OffloadFull, tt.six)
				w.local = true
				took, _ := deliveredAfter(t, w, tt.drop)
				return took
			}
			if tt.notified {
				promptly(t, tt.name, delivered)
			} else if took := delivered(); took > within {
				t.Errorf("packets were delivered for %s, want at most %s", took, within)
			}
		})
	}
}
