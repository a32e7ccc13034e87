//go:build linux

package fastpath_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath/conntrack"
	"slipstream.dev/internal/fastpath/datapath"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

func flowOf(c net.Conn) datapath.Flow {
	address := func(a net.Addr) netip.AddrPort {
		ap := netip.MustParseAddrPort(a.String())
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	}
	protocol := uint8(unix.IPPROTO_TCP)
	if c.LocalAddr().Network() == "udp" {
		protocol = unix.IPPROTO_UDP
	}
	return datapath.Flow{Pod: address(c.LocalAddr()), Peer: address(c.RemoteAddr()), Protocol: protocol}
}

// isTracked reports whether conntrack on node0 has an entry of a connection.
func (w *world) isTracked(c net.Conn) (known bool) {
	w.Helper()
	w.in("n0", func() error {
		is, err := conntrack.Find(flowOf(c))
		known = is != nil
		return err
	})
	return known
}

// TestConntrackTimeouts checks that conntrack entries expire when they would without the fast path,
// although conntrack misses most packets; that an expired entry does not come back by itself; and
// that the connection continues when it is used again.
func TestConntrackTimeouts(t *testing.T) {
	t.Parallel()
	var known [2]map[string][2]time.Duration
	t.Run("reference", func(t *testing.T) {
		for i, name := range []string{"without", "with"} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
				known[i] = w.timeouts(i > 0)
			})
		}
	})
	for name, want := range known[0] {
		is, expired := known[1][name]
		t.Logf("%s: expired after %v, without the fast path after %v", name, is, want)
		// Conntrack does not see the last packets.
		if !expired || is[1] < want[0]-time.Second || is[0] > want[1]+time.Second {
			t.Errorf("%s: expired after %v (%t), without the fast path after %v", name, is, expired, want)
		}
	}
}

// timeouts uses connections for a while, and returns how long their entries then last: between when each was last seen, and
// when it was first missing.
func (w *world) timeouts(accelerated bool) (known map[string][2]time.Duration) {
	w.Helper()
	const stream, long, short = "TCP", "UDP for two seconds", "UDP for less"
	for _, key := range []string{"tcp_timeout_established", "udp_timeout", "udp_timeout_stream"} {
		w.sysctl("n0", "net/netfilter/nf_conntrack_"+key, "2")
	}
	if accelerated {
		w.start()
	}
	e := w.connect().back()
	e.noKeepalive(w.T)
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
	if accelerated {
		w.eventually("both connections are accelerated", func() {
			for name := range conns {
				use(name)
			}
		}, func() bool { return w.fastNow(0) == len(conns) })
	}
	useAll := func() {
		for name := range conns {
			use(name)
		}
	}
	for began := time.Now(); time.Since(began) < 2400*time.Millisecond; useAll() {
		if conns[short] == nil && time.Since(began) > 700*time.Millisecond {
			conns[short] = w.datagrams()
		}
	}
	if accelerated {
		w.eventually("all connections are accelerated", useAll, func() bool { return w.fastNow(0) == len(conns) })
	}
	known = make(map[string][2]time.Duration)
	seen := make(map[string]time.Duration)
	for began := time.Now(); time.Since(began) < 5*time.Second; time.Sleep(20 * time.Millisecond) {
		for name, c := range conns {
			_, expired := known[name]
			at := time.Since(last[name])
			if isTracked := w.isTracked(c); !expired && !isTracked {
				known[name] = [2]time.Duration{seen[name], time.Since(last[name])}
			} else if !expired {
				seen[name] = at
			} else if expired && isTracked {
				w.Fatalf("%s has an entry again after %v", name, time.Since(last[name]))
			}
		}
	}
	for name := range conns {
		use(name)
	}
	return known
}

// TestIdleAfterFewPackets checks that a connection that is idle soon after it became accelerated leaves the conntrack entry as it
// was, and that its server may be the next to send: if the programs had missed acknowledgements, conntrack would call that packet
// invalid.
func TestIdleAfterFewPackets(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	w.dropInvalid("n0")
	w.dropInvalid("n1")
	w.start()
	message := make([]byte, 100)
	send := func(from, to net.Conn) {
		t.Helper()
		_ = to.SetReadDeadline(time.Now().Add(patience))
		if _, err := from.Write(message); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(to, message); err != nil {
			t.Fatal(err)
		}
	}
	var all []echo
	for _, front := range []front{direct, byService} {
		for range 4 {
			e := w.connectBy(front)
			w.eventually("conntrack does not check windows", func() { send(e, e.far); send(e.far, e) }, func() bool {
				return w.conntrack("n0", e).Flags[0]&flagLiberal != 0
			})
			all = append(all, e)
		}
	}
	for _, e := range all {
		w.eventually("conntrack checks windows", nil, func() bool {
			return (w.conntrack("n0", e).Flags[0]|w.conntrack("n1", e).Flags[0])&flagLiberal == 0
		})
		send(e.far, e)
	}
}

// TestStopAfterFewPackets checks that conntrack checks the windows of a connection after the fast path has stopped, although one
// of its last packets made the connection accelerated.
func TestStopAfterFewPackets(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	w.startOn(0)
	for _, front := range []front{direct, byService} {
		for range 8 {
			e := w.connectBy(front).back()
			w.eventually("conntrack does not check windows", func() { w.trip(e, 1) }, func() bool {
				return w.conntrack("n0", e).Flags[0]&flagLiberal != 0
			})
			w.restart(0)
			if flags := w.conntrack("n0", e).Flags; (flags[0]|flags[1])&flagLiberal != 0 {
				t.Errorf("conntrack does not check windows: flags %#x", flags)
			}
		}
	}
}

// TestUnackedEntryExpires checks that the entry of a connection whose peer has disappeared, with
// data unacknowledged, expires as early as it would without the fast path, and not after the five
// days of an idle connection.
func TestUnackedEntryExpires(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	w.in("n1p0", func() error {
		return netlink.RouteAdd(&netlink.Route{Dst: prefix(pod(0, 0), 32), Type: unix.RTN_BLACKHOLE})
	})
	if _, err := e.Write(make([]byte, 64)); err != nil {
		t.Fatal(err)
	}
	w.eventually("the timeouts are of unacknowledged data", nil, func() bool {
		return w.conntrack("n0", e).Timeout <= unacknowledgedTimeout && w.conntrack("n1", e).Timeout <= unacknowledgedTimeout
	})
	w.eventually("conntrack checks windows", nil, func() bool {
		return (w.conntrack("n0", e).Flags[0]|w.conntrack("n1", e).Flags[0])&flagLiberal == 0
	})
}

// zoneRules puts all packets on node0 into a conntrack zone.
const zoneRules = "*raw\n-A PREROUTING -j CT --zone 5\nCOMMIT\n"

// TestConntrackZone checks that connections in a conntrack zone take the slow path.
func TestConntrackZone(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	w.restore("n0", "iptables-nft", zoneRules)
	w.startOn(0)
	e := w.connect().back()
	w.eventually("packets are counted as untracked", func() { w.trip(e, 10) }, func() bool { return w.counts(0)["untracked"] > 5 })
	if c := w.counts(0); c["fast-out"]+c["fast-in"] > 0 {
		t.Errorf("packets took the fast path: %v", c)
	}
}

// TestConntrackZoneAdded checks that a connection returns to the slow path when a new rule moves
// its packets to another conntrack zone. Conntrack then has an entry in each zone, and the programs
// look up the one that no longer sees the packets.
func TestConntrackZoneAdded(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"iptables-nft", "iptables-legacy"} {
		t.Run(program, func(t *testing.T) {
			t.Parallel()
			w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
			if !w.has(program) {
				return
			}
			w.restore("n0", program, zoneRules)
			for came := time.Now(); time.Since(came) < within; {
				w.trip(e, 10)
			}
			if fast := w.roundTrips(e, 0, 100); fast > 0 {
				t.Errorf("%d packets of 200 took the fast path by an entry in another zone", fast)
			}
		})
	}
}

// Conntrack's status bits IPS_SEEN_REPLY, IPS_ASSURED and IPS_CONFIRMED (nf_conntrack_common.h).
const statusReplied, statusAssured, statusConfirmed = 1 << 1, 1 << 2, 1 << 3

// addEntries adds conntrack entries to node0, between one address and many others, until enough returns true. It calls enough
// after every 256 entries.
func (w *world) addEntries(protocol byte, address netip.Addr, status uint32, enough func(n int) (bool, error), more ...*nl.RtAttr) {
	w.Helper()
	// All requests share one message, in which each replaces the address other.
	own, other := address.AsSlice(), []byte{203, 0, 113, 77}
	r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8, unix.NLM_F_CREATE) // IPCTNL_MSG_CT_NEW
	r.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET, Version: nl.NFNETLINK_V0})
	for kind, addresses := range map[int][2][]byte{nl.CTA_TUPLE_ORIG: {own, other}, nl.CTA_TUPLE_REPLY: {other, own}} {
		tuple := nl.NewRtAttr(kind|unix.NLA_F_NESTED, nil)
		ip := tuple.AddRtAttr(nl.CTA_TUPLE_IP|unix.NLA_F_NESTED, nil)
		ip.AddRtAttr(nl.CTA_IP_V4_SRC, addresses[0])
		ip.AddRtAttr(nl.CTA_IP_V4_DST, addresses[1])
		proto := tuple.AddRtAttr(nl.CTA_TUPLE_PROTO|unix.NLA_F_NESTED, nil)
		proto.AddRtAttr(nl.CTA_PROTO_NUM, []byte{protocol})
		proto.AddRtAttr(nl.CTA_PROTO_SRC_PORT, []byte{0, 9})
		proto.AddRtAttr(nl.CTA_PROTO_DST_PORT, []byte{0, 9})
		r.AddData(tuple)
	}
	r.AddData(nl.NewRtAttr(nl.CTA_STATUS, binary.BigEndian.AppendUint32(nil, status)))
	r.AddData(nl.NewRtAttr(nl.CTA_TIMEOUT, binary.BigEndian.AppendUint32(nil, 600)))
	for _, a := range more {
		r.AddData(a)
	}
	one := r.Serialize()
	w.in("n0", func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for n := 0; ; {
			if done, err := enough(n); done || err != nil {
				return err
			}
			var batch []byte
			for range 256 {
				n++
				address := binary.BigEndian.AppendUint32(nil, 0x64400000+uint32(n)) // of 100.64.0.0/10
				batch = append(batch, bytes.ReplaceAll(one, other, address)...)
			}
			if err := unix.Sendto(fd, batch, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
				return err
			}
		}
	})
}

// conntrackNumber reads a number of conntrack in the calling thread's network namespace.
func conntrackNumber(key string) (n int, err error) {
	b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_" + key)
	if err == nil {
		_, err = fmt.Sscan(string(b), &n)
	}
	return n, err
}

// fillConntrack fills conntrack of node0 with entries. Conntrack evicts them for new ones unless
// they are assured.
func (w *world) fillConntrack(assured bool) {
	w.Helper()
	status := uint32(statusReplied | statusConfirmed)
	if assured {
		status |= statusAssured
	}
	w.addEntries(unix.IPPROTO_UDP, netip.MustParseAddr("198.51.100.1"), status, func(n int) (bool, error) {
		limit, err := conntrackNumber("max")
		if err != nil {
			return false, err
		}
		is, err := conntrackNumber("count")
		if err == nil && is < limit && n >= 2*limit {
			err = fmt.Errorf("conntrack does not fill up: %d of %d", is, limit)
		}
		return is >= limit, err
	})
}

// TestFullConntrackTable checks that connections in a full conntrack table stay accelerated, and
// that new connections get through, and are accelerated, if conntrack evicts entries for them.
func TestFullConntrackTable(t *testing.T) {
	for _, tt := range []struct {
		name    string
		assured bool
		fresh   string
	}{
		{"evicted", false, through},
		{"assured", true, silence},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
			// Entries of VXLAN packets are never assured. If the kernel evicts one from a full table, it drops these packets, with
			// the fast path or without. So the test does not track them.
			w.restore("n0", "iptables-nft", "*raw\n-A PREROUTING -p udp --dport 8472 -j CT --notrack\n-A OUTPUT -p udp --dport 8472 -j CT --notrack\nCOMMIT\n")
			w.start()
			e := w.connect().back()
			w.accelerate(e)
			c := w.dialogue()
			c.waitAccelerated(e)
			// Conntrack would evict the datagrams' entry too, until it has seen them for two seconds.
			w.eventually("the datagrams' entry is assured", nil, func() bool {
				return w.conntrack("n0", echo{Conn: c.datagrams}).Timeout > unrepliedTimeout
			})
			// Conntrack may evict an entry of IGMP, which is not assured either, and then has room for a new connection.
			testenv.Retry(t, 3, func() error {
				w.fillConntrack(tt.assured)
				if fresh := c.fresh(tt.fresh); fresh != tt.fresh {
					return fmt.Errorf("a new connection sees %s, want %s", fresh, tt.fresh)
				}
				return nil
			})
			for began := time.Now(); time.Since(began) < within; { // until flows would have expired
				w.trip(e, 100)
			}
			c.waitAccelerated(e)
			if tt.fresh == through {
				w.accelerate(w.connectOf(1, direct).back())
			}
		})
	}
}
