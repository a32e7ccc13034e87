//go:build linux

package fastpath_test

import (
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/accel/fastpath"
)

// TestForgotten has a connection end that conntrack is told to forget, where a rule lets established
// ones pass to a pod, and no new one. What the pod sends by itself is allowed, so that its answers
// to packets which are still carried must not have conntrack know the connection anew.
func TestForgotten(t *testing.T) {
	for _, with := range []string{"without", "with"} {
		t.Run(with, func(t *testing.T) {
			w := newWorld(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
			if with == "with" {
				w.start()
			}
			e := w.connect().back()
			w.trip(e, 10)
			if with == "with" {
				w.warm(e)
			}
			w.restore("n1", "iptables-nft", `*filter
-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A FORWARD -d 10.244.1.2 -j DROP
COMMIT
`)
			if with == "with" {
				w.warm(e)
			}
			time.Sleep(settled) // nothing is on its way
			w.in("n1", func() error { return forget(pod(1, 0)) })
			set, last := time.Now(), time.Duration(0)
			for time.Since(set) < within+settled {
				if e.trip(settled) != nil {
					break
				}
				last = time.Since(set)
			}
			t.Logf("answers for %v", last)
			if last > within {
				t.Errorf("its messages were answered for %v", last)
			}
		})
	}
}

// TestGone has conntrack forget a connection whose other end is gone, and with it what it sent last,
// as soon as it would without the fast path: not after the five days of one that is idle.
func TestGone(t *testing.T) {
	defer fastpath.ForgetAfter(fastpath.ForgetAfter(4))
	const unacknowledged = 300 // nf_conntrack_proto_tcp.c
	w, e := carrying(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
	w.in("n1p0", func() error {
		return netlink.RouteAdd(&netlink.Route{Dst: prefix(pod(0, 0), 32), Type: unix.RTN_BLACKHOLE})
	})
	if _, err := e.Write(make([]byte, 64)); err != nil {
		t.Fatal(err)
	}
	w.eventually("it is remembered for minutes", func() { time.Sleep(50 * time.Millisecond) }, func() bool {
		return w.conntrack("n0", e).Timeout <= unacknowledged && w.conntrack("n1", e).Timeout <= unacknowledged
	})
	w.eventually("conntrack checks windows", func() { time.Sleep(50 * time.Millisecond) }, func() bool {
		return (w.conntrack("n0", e).Flags[0]|w.conntrack("n1", e).Flags[0])&flagLiberal == 0
	})
}

// TestZoneComes has a connection be left to the slow path when a rule has its packets be tracked in
// another zone: conntrack has an entry of it in each, and the one that is looked up is not the one
// that sees them.
func TestZoneComes(t *testing.T) {
	for _, program := range []string{"iptables-nft", "iptables-legacy"} {
		t.Run(program, func(t *testing.T) {
			w, e := carrying(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
			if !w.has(program) {
				return
			}
			w.restore("n0", program, zoned)
			for came := time.Now(); time.Since(came) < within; {
				w.trip(e, 10)
			}
			if fast := w.roundTrips(e, 0, 100); fast > 0 {
				t.Errorf("%d packets of 200 are carried by what conntrack knows in another zone", fast)
			}
		})
	}
}
