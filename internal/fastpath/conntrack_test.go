//go:build linux

package fastpath_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/fastpath"
	"slipstream.dev/internal/fastpath/conntrack"
	"slipstream.dev/internal/fastpath/datapath"
	"slipstream.dev/internal/place/lab/overlay"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/testenv/grammar"
)

const (
	// Conntrack's default timeouts (nf_conntrack_proto_tcp.c, nf_conntrack_proto_udp.c), in seconds.
	establishedTimeout, unacknowledgedTimeout, closeTimeout, unrepliedTimeout = 432_000, 300, 10, 30
	// Its states and flags (nf_conntrack_tcp.h).
	stateEstablished, stateCloseWait, stateClose = 3, 5, 8
	flagLiberal, flagUnacknowledged              = 0x08, 0x10
	tcpRST, tcpSYN                               = 0x04, 0x02
	settled                                      = 300 * time.Millisecond // longer than a delayed acknowledgement
	sysctlUnacknowledged, sysctlPMTU             = "net/netfilter/nf_conntrack_tcp_timeout_unacknowledged", "ipv4/route/mtu_expires"
)

// conntrack returns a node's conntrack entry of a connection that the pod of n0 opened.
func (w *world) conntrack(node string, e echo) (t conntrack.Progress) {
	w.Helper()
	near := e.Conn
	if node == "n1" {
		near = e.far
	}
	w.in(node, func() (err error) {
		t, err = progress(flowOf(near))
		return err
	})
	return t
}

// progress returns the conntrack entry of a connection in the thread's network namespace, or zero if there is none.
func progress(f datapath.Flow) (p conntrack.Progress, err error) {
	is, err := conntrack.Find(f)
	if is != nil {
		p = is.Progress
	}
	return p, err
}

func (w *world) trip(e echo, n int) {
	w.Helper()
	for range n {
		if err := e.trip(patience); err != nil {
			w.Fatal(err)
		}
	}
}

// TestConntrackMatchesReference compares conntrack entries of accelerated connections with what they were before acceleration.
// Timeouts must match at any time; states and flags once the connection is idle or the fast path has stopped.
func TestConntrackMatchesReference(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		front front
		six   bool
		// local means that the peer is a pod of the same node.
		local bool
		// pickedUp means that conntrack has picked up the connection in mid-stream.
		pickedUp bool
		talk     func(*world, echo)
	}{
		{name: "round trips", front: direct, talk: func(w *world, e echo) { w.trip(e, 2000) }},
		{name: "round trips to a Service", front: byService, talk: func(w *world, e echo) { w.trip(e, 2000) }},
		{name: "round trips over IPv6", front: direct, six: true, talk: func(w *world, e echo) { w.trip(e, 2000) }},
		{name: "round trips to a pod of the node", front: direct, local: true, talk: func(w *world, e echo) { w.trip(e, 2000) }},
		{name: "round trips to a Service and a pod of the node", front: byService, local: true, talk: func(w *world, e echo) { w.trip(e, 2000) }},
		{name: "more than a gigabyte to a pod of the node", front: direct, local: true, talk: func(w *world, e echo) { w.transfer(e, 3<<29); w.trip(e, 10) }},
		{name: "picked up in the middle", front: direct, pickedUp: true, talk: func(w *world, e echo) { w.transfer(e, 1<<28); w.trip(e, 1000) }},
		{name: "more than a gigabyte", front: direct, talk: func(w *world, e echo) {
			w.transfer(e, 3<<29)
			w.trip(e, 10) // otherwise the last acknowledgement may advertise an old window
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorldOf(t, spec.ShapeFlannel, spec.OffloadFull, tt.six)
			w.local = tt.local
			e := w.connectBy(tt.front).back()
			e.noKeepalive(t)
			nodes := w.nodes()
			for _, node := range nodes {
				if tt.pickedUp {
					w.in(node, func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
				}
			}
			acknowledged := func() bool {
				return !slices.ContainsFunc(nodes, func(node string) bool {
					is := w.conntrack(node, e)
					return (is.Flags[0]|is.Flags[1])&flagUnacknowledged != 0
				})
			}
			w.trip(e, 100)
			time.Sleep(settled)
			w.eventually("no data is unacknowledged", nil, acknowledged)
			was := map[string]conntrack.Progress{}
			for _, node := range nodes {
				was[node] = w.conntrack(node, e)
				if was[node].State != stateEstablished {
					t.Fatalf("%s has %+v without the fast path", node, was[node])
				}
			}
			same := func(when string) {
				t.Helper()
				for _, node := range nodes {
					is := w.conntrack(node, e)
					if is.State != was[node].State || is.Flags != was[node].Flags {
						t.Errorf("%s: %s has %+v, without the fast path %+v", when, node, is, was[node])
					}
				}
			}
			checkTimeout := func(when string, since time.Time) {
				t.Helper()
				for _, node := range nodes {
					most := establishedTimeout - int(time.Since(since)/time.Second)
					is := w.conntrack(node, e)
					least := establishedTimeout - int(time.Since(since)/time.Second)
					if int(is.Timeout) < least-2 || int(is.Timeout) > most+1 || (is.Flags[0]|is.Flags[1])&flagUnacknowledged != 0 {
						t.Errorf("%s: timeout on %s is %d s, want %d: %+v", when, node, is.Timeout, most, is)
					}
				}
			}
			w.start()
			w.accelerate(e)
			tt.talk(w, e)
			last := time.Now()
			if fast := w.counts(0)["fast-out"]; fast < 1000 {
				t.Fatalf("only %d packets took the fast path", fast)
			}
			time.Sleep(settled)
			// A busy agent takes longer to clear the flag; it releases an idle connection after 2.5 s.
			for time.Since(last) < 2*time.Second && !acknowledged() {
				time.Sleep(10 * time.Millisecond)
			}
			checkTimeout("accelerated", last)
			w.eventually("conntrack checks windows", nil, func() bool {
				return !slices.ContainsFunc(nodes, func(node string) bool { return w.conntrack(node, e).Flags != was[node].Flags })
			})
			same("idle")
			checkTimeout("idle", last)

			// The connection continues and is accelerated again, and then the fast path stops cleanly.
			w.accelerate(e)
			tt.talk(w, e)
			last = time.Now()
			w.stop(0)
			w.stop(1)
			same("stopped")
			checkTimeout("stopped", last)
			w.trip(e, 100)
			time.Sleep(settled)
			w.eventually("no data is unacknowledged", nil, acknowledged)
			same("slow path again")
		})
	}
}

// TestResyncWithClosedWindow checks a resynchronisation during a zero window. An accelerated connection must not keep the short
// timeout that conntrack uses for zero windows, because conntrack does not see the packets that would lift it.
func TestResyncWithClosedWindow(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	e.noKeepalive(t)
	w.trip(e, 100)
	time.Sleep(settled)
	n, err := w.paths[0].SequenceNumbers(flowOf(e.Conn))
	if err != nil {
		t.Fatal(err)
	}
	n.Peer.Edge, n.Pod.Edge = n.Pod.Expects, n.Peer.Expects
	if err := w.paths[0].ResyncAccelerated(flowOf(e.Conn), n); err != nil {
		t.Fatal(err)
	}
	if is := w.conntrack("n0", e); is.State != stateEstablished || is.Timeout < establishedTimeout-10 {
		t.Errorf("conntrack has %+v", is)
	}
}

// TestAckedEntryKeepsTimeout sends a packet on the slow path whose acknowledgement takes the fast path. The agent must undo
// both effects on conntrack: the flag of unacknowledged data, and the short timeout, because the connection may be idle from
// then on. A connection that closes meanwhile keeps the timeout of its state.
func TestAckedEntryKeepsTimeout(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	e.noKeepalive(t)
	flow := flowOf(e.Conn)
	shorten := func() {
		w.in("n0", func() error { return conntrack.SetTimeout(flow, 5) })
	}
	shorten()
	if err := w.paths[0].Handle(datapath.EventAcked, flow); err != nil {
		t.Fatal(err)
	}
	if is := w.conntrack("n0", e); is.Timeout < establishedTimeout-10 || is.Timeout > establishedTimeout {
		t.Errorf("conntrack has %+v", is)
	}
	if err := e.Conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	// The acknowledgement of the FIN is the last packet.
	w.eventually("the FIN is acknowledged", nil, func() bool { return w.conntrack("n0", e).State == stateCloseWait })
	shorten()
	w.in("n0", func() error { return conntrack.RestoreTimeout(flow, 0) })
	if is := w.conntrack("n0", e); is.Timeout > closeTimeout {
		t.Errorf("closing: conntrack has %+v", is)
	}
}

// TestEventAfterRelease handles an event after its connection has left the fast path. The conntrack entry must not become
// liberal again: nothing would reset it.
func TestEventAfterRelease(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	e.noKeepalive(t)
	f, flow := w.paths[0], flowOf(e.Conn)
	strict := func() bool { is := w.conntrack("n0", e); return (is.Flags[0]|is.Flags[1])&flagLiberal == 0 }
	handle := func(when string) {
		t.Helper()
		if err := f.Handle(datapath.EventLiberal, flow); err != nil {
			t.Errorf("%s: %v", when, err)
		}
		if !strict() {
			t.Errorf("%s: conntrack does not check windows", when)
		}
	}
	w.eventually("conntrack checks windows", nil, strict)
	w.eventually("the flow is deleted", nil, func() bool {
		known, _, err := f.Connections()
		return err == nil && known == 0
	})
	handle("idle")
	w.accelerate(e)
	w.stop(0)
	handle("stopped")
}

// noKeepalive stops a connection from sending while it is idle.
func (e echo) noKeepalive(t *testing.T) {
	t.Helper()
	for _, c := range []net.Conn{e.Conn, e.far} {
		if err := c.(*net.TCPConn).SetKeepAlive(false); err != nil {
			t.Fatal(err)
		}
	}
}

// transfer sends size bytes from the pod of n0 and reads them back.
func (w *world) transfer(e echo, size int64) {
	w.Helper()
	sent := make(chan error, 1)
	go func() {
		_, err := io.CopyN(e.Conn, zeros{}, size)
		sent <- err
	}()
	if err := e.SetDeadline(time.Now().Add(2 * patience)); err != nil {
		w.Fatal(err)
	}
	if _, err := io.CopyN(io.Discard, e.Conn, size); err != nil {
		w.Fatal(err)
	}
	if err := <-sent; err != nil {
		w.Fatal(err)
	}
}

// zeros is an endless reader.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

// TestIdleConnectionSurvivesAgentKill checks that the entry of a connection to a Service does not
// expire after the agent is killed, although entries with unacknowledged data expire early here.
func TestIdleConnectionSurvivesAgentKill(t *testing.T) {
	t.Parallel()
	ofEachKind(t, idleConnectionSurvivesAgentKill)
}

func idleConnectionSurvivesAgentKill(w *world) {
	for _, node := range []string{"n0", "n1"} {
		w.sysctl(node, sysctlUnacknowledged, "2")
	}
	agent := w.startAgent("n0")
	e := w.connectBy(byService).back()
	w.eventually("the connection is accelerated", nil, func() bool { return w.isFast(e) })
	w.trip(e, 2000)
	// The last packet that conntrack sees each way is unacknowledged. The agent takes a moment, longer on a busy machine, to
	// clear the flag that these packets leave.
	w.eventually("no data is unacknowledged", func() { w.trip(e, 1) }, func() bool {
		is := w.conntrack("n0", e)
		return (is.Flags[0]|is.Flags[1])&flagUnacknowledged == 0
	})
	if err := agent.Process.Kill(); err != nil {
		w.Fatal(err)
	}
	_ = agent.Wait()
	time.Sleep(settled)
	w.trip(e, 100)
	// A new entry would lead to another backend, which does not know this connection.
	byService(w, unix.IPPROTO_TCP, netip.AddrPortFrom(pod(1, 1), 9))
	time.Sleep(4 * time.Second)
	if is := w.conntrack("n0", e); is.State != stateEstablished || is.Timeout < establishedTimeout-10 {
		w.Errorf("conntrack has %+v", is)
	}
	if err := e.trip(3 * time.Second); err != nil {
		w.Errorf("round trip after 4 s: %v", err)
	}
}

// TestForgedFINBetweenAgents checks that the agent moves conntrack back to ESTABLISHED if another
// pod has forged a FIN between the death of one agent and the start of the next. A connection that
// its pod has really closed, so that only the peer still sends, stays closed.
func TestForgedFINBetweenAgents(t *testing.T) {
	t.Parallel()
	ofEachKind(t, forgedFINBetweenAgents)
}

func forgedFINBetweenAgents(w *world) {
	agent := w.startAgent("n0")
	forged := []echo{w.connect().back(), w.connectBy(byService).back()}
	for _, e := range forged {
		w.eventually("the connection is accelerated", nil, func() bool { return w.isFast(e) })
	}
	ended := w.connect()
	go func() { _, _ = io.Copy(io.Discard, ended) }()
	// isFast counts packets of the whole node, so the peer of this connection must send rarely.
	send := func() {
		if _, err := ended.far.Write(make([]byte, 64<<10)); err != nil {
			w.Fatal(err)
		}
	}
	w.eventually("the stream is accelerated", send, func() bool {
		is := w.conntrack("n0", ended)
		return (is.Flags[0]&is.Flags[1])&flagLiberal != 0
	})
	if err := agent.Process.Kill(); err != nil {
		w.Fatal(err)
	}
	_ = agent.Wait()
	for _, e := range forged {
		forge := w.forger(w.otherPods()[0], e)
		w.eventually("conntrack accepts the forged FIN", func() { forge(rand.Uint32(), 0x11) }, func() bool {
			return w.conntrack("n0", e).State != stateEstablished
		})
	}
	if err := ended.Conn.(*net.TCPConn).CloseWrite(); err != nil {
		w.Fatal(err)
	}
	w.eventually("conntrack sees the FIN", nil, func() bool {
		return w.conntrack("n0", ended).State != stateEstablished
	})

	w.startAgent("n0")
	for _, e := range forged {
		for range 10 {
			send()
		}
		w.eventually("the connection is accelerated again", nil, func() bool { return w.isFast(e) })
		if is := w.conntrack("n0", e); is.State != stateEstablished || is.Timeout < establishedTimeout-10 {
			w.Errorf("conntrack has %+v", is)
		}
	}
	for range 10 {
		send()
	}
	if is := w.conntrack("n0", ended); is.State == stateEstablished {
		w.Errorf("conntrack has %+v of a half-closed connection", is)
	}
}

// isFast reports whether node0 accelerates a connection, whichever process runs the fast path.
func (w *world) isFast(e echo) bool {
	w.Helper()
	before := w.slow()
	w.trip(e, 100)
	return w.slow()-before < 20
}

// forger returns a function that sends packets from a place with the addresses and ports of a connection.
func (w *world) forger(place string, e echo) (send func(seq uint32, flags byte)) {
	w.Helper()
	fd := -1
	w.in(place, func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		return err
	})
	w.Cleanup(func() { _ = unix.Close(fd) })
	from, to := e.LocalAddr().(*net.TCPAddr).AddrPort(), e.RemoteAddr().(*net.TCPAddr).AddrPort()
	return func(seq uint32, flags byte) {
		w.Helper()
		if err := unix.Sendto(fd, grammar.Segment(from, to, seq, flags), 0, &unix.SockaddrInet4{Addr: to.Addr().As4()}); err != nil {
			w.Fatal(err)
		}
	}
}

// TestForgedFINAndRST forges FINs and RSTs in another pod, which knows the ports of a connection but not its sequence numbers.
// The connection must stay ESTABLISHED in conntrack, however much data has been accelerated, and even while it is idle. No
// programs are attached to the other pod's link.
func TestForgedFINAndRST(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		kind  string
		flags []byte
		talk  func(*world, echo)
	}{
		{"RST", "vxlan", []byte{tcpRST}, func(w *world, e echo) { w.trip(e, 2000) }},
		{"RST after two gigabytes", "vxlan", []byte{tcpRST}, func(w *world, e echo) { w.transfer(e, 2<<30) }},
		{"FIN", "vxlan", []byte{0x11}, func(w *world, e echo) { w.trip(e, 500) }},
		// Once a connection is closing, conntrack accepts an RST with any sequence number.
		{"FIN and RST", "vxlan", []byte{0x11, tcpRST}, func(w *world, e echo) { w.trip(e, 500) }},
		{"FIN and RST in a node", "local", []byte{0x11, tcpRST}, func(w *world, e echo) { w.transfer(e, 2<<30) }},
		{"FIN and RST in a node that routes", "local routed", []byte{0x11, tcpRST}, func(w *world, e echo) { w.trip(e, 500) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := worldOf[tt.kind](t)
			w.start()
			e := w.connect().back()
			w.accelerate(e)
			e.noKeepalive(t)
			tt.talk(w, e)
			for n, place := range w.otherPods() {
				before := w.counts(n)["forged"]
				forge := w.forger(place, e)
				sequence, err := w.paths[0].SequenceNumbers(flowOf(e.Conn))
				if err != nil {
					t.Fatal(err)
				}
				const times = 64
				for range times {
					wrong := sequence.Pod.Next + 1<<30 + rand.Uint32N(1<<31) // outside any window
					for _, flags := range tt.flags {
						forge(wrong, flags)
					}
				}
				w.eventually("the forged packets are counted", nil, func() bool {
					return int(w.counts(n)["forged"]-before) == times*len(tt.flags)
				})
			}
			for _, node := range w.nodes() {
				// The last data may count as unacknowledged until the connection is idle.
				if is := w.conntrack(node, e); is.State != stateEstablished || is.Timeout < unacknowledgedTimeout-10 {
					t.Errorf("%s has %+v", node, is)
				}
			}
			w.trip(e, 100)
		})
	}
}

// TestResyncBesideForgedPackets checks that a connection's entry becomes strict again when the fast path ends, although another
// pod forges packets all the time. A forged packet amid the packets of a resynchronisation makes conntrack ignore the rest of
// them.
func TestResyncBesideForgedPackets(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	forge := w.forger("n0p1", e)
	for range 5 {
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			for {
				select {
				case <-stop:
					return
				default:
					forge(rand.Uint32(), 0x10)
				}
			}
		}()
		w.stop(0)
		close(stop)
		<-stopped
		if is := w.conntrack("n0", e); is.State != stateEstablished || (is.Flags[0]|is.Flags[1])&flagLiberal != 0 {
			t.Fatalf("conntrack has %+v", is)
		}
		w.trip(e, 10)
		w.startOn(0)
		w.accelerate(e)
	}
}

// TestRSTInWindow forges an RST in the window, which conntrack accepts. The open connection must not keep the timeout of a
// closed one, so the next packet takes the slow path: it may be the last for longer than that timeout.
func TestRSTInWindow(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	e.noKeepalive(t)
	w.sysctl("n1p0", "net/ipv4/tcp_invalid_ratelimit", "0")
	forge := w.forger("n0p1", e)
	for range 5 {
		sequence, err := w.paths[0].SequenceNumbers(flowOf(e.Conn))
		if err != nil {
			t.Fatal(err)
		}
		before := w.snmp("n1p0", "TcpExt:", "TCPChallengeACK")
		forge(sequence.Pod.Next+1000, tcpRST)
		w.eventually("the pod has got the RST", nil, func() bool { return w.snmp("n1p0", "TcpExt:", "TCPChallengeACK") > before })
		w.trip(e, 1)
		for _, node := range []string{"n0", "n1"} {
			if is := w.conntrack(node, e); is.State != stateEstablished || is.Timeout <= closeTimeout {
				t.Errorf("%s has %+v", node, is)
			}
		}
		w.eventually("the connection is accelerated again", nil, func() bool { return w.isFast(e) })
	}
}

// TestRSTAfterRestart checks the same right after one agent was killed and another has started. The killed agent has left its
// entries liberal, so conntrack accepts RSTs outside the window too.
func TestRSTAfterRestart(t *testing.T) {
	t.Parallel()
	w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
	agent := w.startAgent("n0")
	e := w.connect().back()
	forge := w.forger("n0p1", e)
	for range 3 {
		w.eventually("the connection is accelerated", nil, func() bool { return w.isFast(e) })
		if err := agent.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = agent.Wait()
		agent = w.startAgent("n0")
		w.eventually("the connection is accelerated again", nil, func() bool { return w.isFast(e) })
		for range 16 {
			forge(rand.Uint32(), tcpRST)
		}
		w.trip(e, 20)
		if is := w.conntrack("n0", e); is.State != stateEstablished || is.Timeout <= closeTimeout {
			t.Errorf("conntrack has %+v", is)
		}
	}
}

// TestForgedRSTInPages checks that a forged RST is dropped even if the skb's linear part ends with the IP header, so that the
// TCP header is in a page fragment. The pod sends it through a packet socket, in a frame larger than a page.
func TestForgedRSTInPages(t *testing.T) {
	t.Parallel()
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	tap := w.tap("n0p1", "eth0")
	var gateway net.HardwareAddr
	var veth int
	w.in("n0p1", func() error {
		l, err := netlink.LinkByIndex(tap.index)
		if err != nil {
			return err
		}
		veth = l.Attrs().ParentIndex
		return errors.Join(netlink.LinkSetMTU(l, 9000), unix.SetsockoptInt(tap.fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1))
	})
	w.in("n0", func() error {
		bridge, err := netlink.LinkByName("cni0")
		if err != nil {
			return err
		}
		gateway = bridge.Attrs().HardwareAddr
		return netlink.LinkSetMTU(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: veth}}, 9000)
	})
	rst := grammar.Packet{
		To: gateway, From: grammar.MadeUp(1), Protocol: unix.IPPROTO_TCP, TTL: 64, Flags: tcpRST, Payload: 5000,
		Source: e.LocalAddr().(*net.TCPAddr).AddrPort(), Target: e.RemoteAddr().(*net.TCPAddr).AddrPort(),
	}
	frame := append(make([]byte, binary.Size(vnet{})), rst.Bytes()...) // no offload
	before := w.counts(0)["forged"]
	w.eventually("the forged packet is counted", func() {
		if err := unix.Sendto(tap.fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: tap.index, Halen: 6}); err != nil {
			t.Fatal(err)
		}
	}, func() bool { return w.counts(0)["forged"] > before })
	w.trip(e, 100)
	if is := w.conntrack("n0", e); is.State != stateEstablished {
		t.Errorf("conntrack has %+v", is)
	}
}

// TestForgedPackets checks that a connection stays accelerated, and ESTABLISHED in conntrack, while
// another pod forges a SYN, FIN, RST or other packets fifty times a second.
func TestForgedPackets(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"vxlan", "local"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			w := worldOf[kind](t)
			w.start()
			for name, flags := range map[string]byte{
				"SYN": tcpSYN, "RST": tcpRST, "FIN": 0x11, "ACK": 0x10, "URG": 0x30, "no flags": 0,
			} {
				w.sub(name, func() { w.checkBesideForged(flags) })
			}
		})
	}
}

// checkBesideForged checks a connection while another pod, which has accelerated connections too, forges its packets.
func (w *world) checkBesideForged(flags byte) {
	e := w.connect().back()
	w.accelerate(e)
	near, ways := 1, uint64(1) // sent counts both directions of local connections
	if w.local {
		near, ways = 2, 2
	}
	w.accelerate(w.connectFrom(near, 1, direct).back())
	forge := w.forger(w.otherPods()[0], e)
	// A busy machine may delay a round for so long that the flow expires, so take the median of the rounds.
	const rounds, trips = 50, 20
	var fast []int
	pause := time.NewTicker(20 * time.Millisecond)
	defer pause.Stop()
	for range rounds {
		<-pause.C
		forge(rand.Uint32(), flags)
		before := w.sent()
		w.trip(e, trips)
		fast = append(fast, int((w.sent()-before)/ways))
	}
	slices.Sort(fast)
	if fast[rounds/2] < trips-1 {
		w.Errorf("of %d packets a round took the fast path: %v; then %v", trips, fast, w.counts(0))
	}
	w.eventually("conntrack has the connection as established", func() { w.trip(e, 1) }, func() bool {
		is := w.conntrack("n0", e)
		return is.State == stateEstablished && is.Timeout > 300
	})
}

// TestRouteMTU checks that packets which the kernel would fragment do not take the fast path: the
// route to the other node has its own MTU, configured, or learned from ICMP.
func TestRouteMTU(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, shape string
		narrow      func(*world)
	}{
		{"of the NIC", spec.ShapeFlannel, func(w *world) { w.in("n0", func() error { return setRouteMTU(false, 1300) }) }},
		{"through a gateway", overlay.ShapeRouted, func(w *world) { w.in("n0", func() error { return setRouteMTU(true, 1300) }) }},
		{"learnt", spec.ShapeFlannel, func(w *world) { w.learnPMTU("n0", 1300) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, tt.shape, spec.OffloadFull)
			w.startOn(0)
			near := w.datagrams()
			if tt.shape == overlay.ShapeRouted { // otherwise the kernel does not fragment, but answers by ICMP
				option(t, near, func(fd int) error {
					return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DONT)
				})
			}
			go func() { _, _ = io.Copy(io.Discard, near) }()
			small, large := make([]byte, 64), make([]byte, 1390)
			send := func(b []byte, n int) (accelerated uint64) {
				t.Helper()
				before := w.counts(0)["fast-out"]
				for range n {
					if _, err := near.Write(b); err != nil {
						t.Fatal(err)
					}
				}
				return w.counts(0)["fast-out"] - before
			}
			w.eventually("large packets take the fast path", func() { send(small, 20) }, func() bool { return send(large, 20) >= 19 })
			tt.narrow(w)
			w.eventually("small packets take the fast path", func() { send(small, 20) }, func() bool { return send(small, 20) >= 19 })
			time.Sleep(600 * time.Millisecond) // routes are read twice a second
			send(small, 20)
			fragments := w.fragments("n0")
			if n := send(large, 100); n > 0 {
				t.Errorf("%d of 100 packets larger than the route's MTU took the fast path", n)
			}
			w.eventually("the kernel makes 200 fragments of 100 packets", nil, func() bool { return w.fragments("n0")-fragments >= 200 })
			testenv.Retry(t, 3, func() error {
				if n := send(small, 100); n < 90 {
					return fmt.Errorf("%d of 100 packets within the MTU took the fast path", n)
				}
				return nil
			})
		})
	}
}

// setRouteMTU sets the MTU of the route to the other node, or of those through it.
func setRouteMTU(gateway bool, mtu int) error {
	routes, err := netlink.RouteList(nil, unix.AF_INET)
	for _, r := range routes {
		if gateway && r.Gw != nil || !gateway && r.Dst != nil && r.Dst.String() == "198.18.0.0/24" {
			r.MTU = mtu
			err = errors.Join(err, netlink.RouteReplace(&r))
		}
	}
	return err
}

// learnPMTU makes a node learn a path MTU to the other node, from ICMP.
func (w *world) learnPMTU(node string, mtu uint16) {
	w.Helper()
	// ICMP "fragmentation needed" quotes the packet (RFC 792, RFC 1191).
	quoted := make([]byte, 36)
	quoted[0], quoted[8], quoted[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(quoted[2:], 1468)
	copy(quoted[12:], []byte{198, 18, 0, 1})
	copy(quoted[16:], []byte{198, 18, 0, 2})
	binary.BigEndian.PutUint16(quoted[20:], 50000)
	binary.BigEndian.PutUint16(quoted[22:], 8472)
	binary.BigEndian.PutUint16(quoted[24:], 1448)
	quoted[28], quoted[34] = 0x08, 1 // the VXLAN header: flags and VNI
	b := append([]byte{3, 4, 0, 0, 0, 0, byte(mtu >> 8), byte(mtu)}, quoted...)
	binary.BigEndian.PutUint16(b[2:], ^grammar.Sum(0, b))
	w.in("n1", func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, b, 0, &unix.SockaddrInet4{Addr: [4]byte{198, 18, 0, 1}})
	})
}

func (w *world) fragments(node string) (n int) {
	w.Helper()
	w.in(node, func() error {
		b, err := os.ReadFile("/proc/thread-self/net/snmp")
		var names []string
		for line := range strings.Lines(string(b)) {
			fields := strings.Fields(line)
			if fields[0] == "Ip:" && names == nil {
				names = fields
			} else if fields[0] == "Ip:" {
				n, err = strconv.Atoi(fields[slices.Index(names, "FragCreates")])
			}
		}
		return err
	})
	return n
}

// dropInvalid makes a node drop packets that conntrack calls invalid, as kube-proxy does.
func (w *world) dropInvalid(node string) {
	w.rules(node, func(conn *nftables.Conn) {
		table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "invalid"})
		chain := conn.AddChain(&nftables.Chain{Table: table, Name: "forward", Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter})
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Ct{Register: 1, Key: expr.CtKeySTATE},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(expr.CtStateBitINVALID), Xor: make([]byte, 4)},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
			&expr.Verdict{Kind: expr.VerdictDrop},
		}})
	})
}

// resyncPrograms returns the IDs of the links by which this process has attached drop_resync.
func resyncPrograms(t *testing.T) (ids []string) {
	t.Helper()
	all, err := filepath.Glob("/proc/self/fdinfo/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range all {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // the descriptor is closed
		}
		fields := make(map[string]string)
		for line := range strings.Lines(string(b)) {
			key, value, _ := strings.Cut(line, ":")
			fields[key] = strings.TrimSpace(value)
		}
		if fields["link_type"] != "netfilter" {
			continue
		}
		id, err := strconv.Atoi(fields["prog_id"])
		if err != nil {
			t.Fatal(err)
		}
		p, err := ebpf.NewProgramFromID(ebpf.ProgramID(id))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(p.String(), "drop_resync") {
			ids = append(ids, fields["link_id"])
		}
		p.Close()
	}
	slices.Sort(ids)
	return ids
}

// TestResyncProgramStays checks that drop_resync stays attached while connections are known, whether or not one is resynchronised:
// whenever it is detached, the kernel drops the packets that wait in an NFQUEUE. It is detached after the last connection.
func TestResyncProgramStays(t *testing.T) { // not parallel: it looks at the programs of the whole process
	w, e := accelerated(t, spec.ShapeFlannel, spec.OffloadFull)
	for range 3 * fastpath.SweepInterval / time.Second {
		for began := time.Now(); time.Since(began) < time.Second; time.Sleep(10 * time.Millisecond) {
			w.trip(e, 1)
		}
	}
	was := resyncPrograms(t)
	idle := w.connect().back()
	w.accelerate(idle)
	w.eventually("the idle connection is forgotten", func() { w.trip(e, 1) }, func() bool {
		known, _, err := w.paths[0].Connections()
		return err == nil && known == 1
	})
	is := resyncPrograms(t)
	if len(was) == 0 || !slices.Equal(was, is) {
		t.Errorf("drop_resync was attached by links %v, and is by %v", was, is)
	}
	e.Close()
	e.far.Close()
	idle.Close()
	idle.far.Close()
	w.eventually("drop_resync is detached", nil, func() bool { return len(resyncPrograms(t)) == 0 })
}
