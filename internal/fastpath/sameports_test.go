//go:build linux

package fastpath_test

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/spec"
)

// TestNewConnectionBetweenSamePorts ends an accelerated connection by an RST and opens another between the same ports. What the
// agent still does for the first must not affect the second, however late it does that.
func TestNewConnectionBetweenSamePorts(t *testing.T) {
	t.Parallel()
	for name, front := range map[string]front{"direct": direct, "to a Service": byService} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, spec.ShapeFlannel, spec.OffloadFull)
			w.dropInvalid("n0")
			synAcks := w.handleQueue("n1", 100)
			w.restore("n1", "iptables-nft", "*mangle\n-A POSTROUTING -p tcp --tcp-flags SYN,ACK SYN,ACK -j NFQUEUE --queue-num 100\nCOMMIT\n")
			agent := w.startAgent("n0")
			dial := w.fixedPorts(front)
			for i := range 4 {
				old := dial()
				w.eventually("the connection is accelerated", nil, func() bool { return w.slowPackets(old, 100) < 20 })
				w.suspend(agent)
				if err := old.Conn.(*net.TCPConn).SetLinger(0); err != nil {
					t.Fatal(err)
				}
				old.Close() // sends an RST
				// The agent handles the RST after the new connection's handshake, or between its SYN and its SYN-ACK.
				between := i%2 == 1
				synAcks.holds.Store(between)
				before := synAcks.queued.Load()
				opened := make(chan echo, 1)
				go func() { defer close(opened); opened <- dial() }()
				if between {
					w.eventually("the SYN is answered", nil, func() bool { return synAcks.queued.Load() > before })
					w.resume(agent)
					w.eventually("the agent has handled the RST", nil, func() bool { return w.conntrack("n0", old).State != stateEstablished })
					synAcks.holds.Store(false)
				}
				e, ok := <-opened
				if !ok {
					t.FailNow()
				}
				w.trip(e, 1)
				w.resume(agent)
				w.eventually("conntrack checks windows of the new connection, which is open", nil, func() bool {
					is := w.conntrack("n0", e)
					return is.State == stateEstablished && (is.Flags[0]|is.Flags[1])&flagLiberal == 0
				})
				// The agent handles events in order: once it has handled those of the new connection, it has handled that of the
				// RST.
				w.eventually("the new connection is accelerated", nil, func() bool { return w.slowPackets(e, 100) < 20 })
				if is := w.conntrack("n0", e); is.State != stateEstablished || is.Timeout <= closeTimeout {
					t.Errorf("conntrack has the new connection as %+v", is)
				}
				_ = e.SetDeadline(time.Now().Add(patience))
				if _, err := e.far.Write([]byte("hello")); err != nil {
					t.Fatal(err)
				}
				if _, err := io.ReadFull(e, make([]byte, 5)); err != nil {
					t.Fatal(err)
				}
				_ = e.Conn.(*net.TCPConn).SetLinger(0)
				e.Close()
			}
		})
	}
}

// fixedPorts returns a function that opens connections between the same ports, one after another, whose far ends echo.
func (w *world) fixedPorts(front front) func() echo {
	w.Helper()
	const port = 45678
	var listener net.Listener
	w.in("n1p0", func() (err error) {
		listener, err = net.Listen("tcp", ":0")
		return err
	})
	w.Cleanup(func() { listener.Close() })
	to := front(w, unix.IPPROTO_TCP, netip.AddrPortFrom(w.pod(1, 0), uint16(listener.Addr().(*net.TCPAddr).Port)))
	return func() (e echo) {
		w.Helper()
		w.in("n0p0", func() error {
			d := net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{Port: port}, KeepAlive: -1}
			near, err := d.Dial("tcp", to.String())
			if err != nil {
				return err
			}
			far, err := listener.Accept()
			e = echo{Conn: near, far: far}
			return err
		})
		w.Cleanup(func() { _ = errors.Join(e.Close(), e.far.Close()) })
		return e.back()
	}
}
