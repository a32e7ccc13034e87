//go:build linux

package fastpath_test

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/bpf"
	"slipstream.dev/internal/accel/fastpath"
)

// tracks tells whether conntrack of node0 knows a connection.
func (w *world) tracks(c net.Conn) (known bool) {
	w.Helper()
	address := func(a net.Addr) netip.AddrPort {
		ap := netip.MustParseAddrPort(a.String())
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	}
	flow := bpf.Flow{Pod: address(c.LocalAddr()), Peer: address(c.RemoteAddr()), Protocol: unix.IPPROTO_TCP}
	if c.LocalAddr().Network() == "udp" {
		flow.Protocol = unix.IPPROTO_UDP
	}
	w.in("n0", func() error {
		is, err := fastpath.Conntrack(flow)
		known = is != fastpath.Tracked{} // UDP has nothing but its time-out, in full seconds
		return err
	})
	return known
}

// TestTimeouts has conntrack forget a connection when it would without the fast path, though it
// misses most packets; not know it again by itself; and the connection go on when it is used again.
func TestTimeouts(t *testing.T) {
	// The agent tells conntrack of what is idle when that has forgotten it.
	defer fastpath.ForgetAfter(fastpath.ForgetAfter(5))
	var known [2]map[string]time.Duration
	t.Run("twins", func(t *testing.T) {
		for i, name := range []string{"without", "with"} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t, v1alpha1.ShapeFlannel, v1alpha1.OffloadFull)
				known[i] = w.timeouts(i > 0)
			})
		}
	})
	for name, want := range known[0] {
		is, forgotten := known[1][name]
		t.Logf("%s: known for %v, without the fast path for %v", name, is, want)
		// Conntrack does not see the last packets.
		if !forgotten || is < want-time.Second || is > want+time.Second {
			t.Errorf("%s: known for %v (forgotten %t), without the fast path for %v", name, is, forgotten, want)
		}
	}
}

// timeouts tells for how long conntrack knows connections that are used for a while.
func (w *world) timeouts(carried bool) (known map[string]time.Duration) {
	w.Helper()
	const stream, long, short = "TCP", "UDP that lasted for two seconds", "UDP that did not"
	for _, key := range []string{"tcp_timeout_established", "udp_timeout", "udp_timeout_stream"} {
		w.sysctl("n0", "net/netfilter/nf_conntrack_"+key, "2")
	}
	if carried {
		w.start()
	}
	e := w.connect().back()
	e.quiet(w.T)
	conns := map[string]net.Conn{stream: e, long: w.datagrams()}
	last := make(map[string]time.Time)
	use := func(name string) {
		w.Helper()
		c := conns[name]
		_ = c.SetDeadline(time.Now().Add(patience))
		if _, err := c.Write(make([]byte, 64)); err != nil {
			w.Fatalf("%s: %v", name, err)
		}
		if _, err := c.Read(make([]byte, 64)); err != nil {
			w.Fatalf("%s: %v", name, err)
		}
		last[name] = time.Now()
	}
	for began := time.Now(); time.Since(began) < 2400*time.Millisecond; {
		if conns[short] == nil && time.Since(began) > 1500*time.Millisecond {
			conns[short] = w.datagrams()
		}
		for name := range conns {
			use(name)
		}
	}
	if carried {
		if _, fast, err := w.paths[0].Connections(); err != nil || fast != len(conns) {
			w.Errorf("%d of %d connections are carried: %v", fast, len(conns), err)
		}
	}
	known = make(map[string]time.Duration)
	for began := time.Now(); time.Since(began) < 5*time.Second; time.Sleep(20 * time.Millisecond) {
		for name, c := range conns {
			_, forgotten := known[name]
			if tracks := w.tracks(c); !forgotten && !tracks {
				known[name] = time.Since(last[name])
			} else if forgotten && tracks {
				w.Fatalf("%s is known again after %v", name, time.Since(last[name]))
			}
		}
	}
	for name := range conns {
		use(name)
	}
	return known
}
