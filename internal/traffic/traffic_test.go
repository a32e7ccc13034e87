package traffic

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
)

// ends returns both ends of spec over loopback, connected.
func ends(t *testing.T, spec Spec) (client, server *End) {
	t.Helper()
	s, err := Listen(spec, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), 0))
	if err != nil {
		t.Fatal(err)
	}
	return join(t, spec, s, s.Addr())
}

// join connects a client to a server at an address, and returns both ends.
func join(t *testing.T, spec Spec, s *Server, at netip.AddrPort) (client, server *End) {
	t.Helper()
	client, err := Dial(t.Context(), spec, at)
	if err != nil {
		t.Fatal(err)
	}
	return client, accept(t, s)
}

// accept gives up after 10 s, so that a client that the server never sees fails one test instead of hanging all.
func accept(t *testing.T, s *Server) *End {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	end, err := s.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return end
}

// bothWays runs body for ends with blocking calls, and for ends on an event loop.
func bothWays(t *testing.T, body func(t *testing.T, loop bool)) {
	for _, loop := range []bool{false, true} {
		t.Run(fmt.Sprintf("loop=%t", loop), func(t *testing.T) { body(t, loop) })
	}
}

// pair runs both ends of spec over loopback for a window of d.
func pair(t *testing.T, ctx context.Context, spec Spec, ip string, d time.Duration) (client, server record.Endpoint, err error) {
	t.Helper()
	s, err := Listen(spec, netip.AddrPortFrom(netip.MustParseAddr(ip), 0))
	if err != nil {
		t.Fatal(err)
	}
	ce, err := Dial(ctx, spec, s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer ce.Close()
	se := accept(t, s)
	defer se.Close()
	return runPair(ctx, ce, se, d)
}

func runPair(ctx context.Context, ce, se *End, d time.Duration) (client, server record.Endpoint, err error) {
	return runPairBehind(ctx, ce, se, d, 0)
}

// runPairBehind runs a pair whose client has a clock that is behind by this much.
func runPairBehind(ctx context.Context, ce, se *End, d, behind time.Duration) (client, server record.Endpoint, err error) {
	start := Now() + int64(5*time.Millisecond)
	from := start + int64(50*time.Millisecond)
	w := Window{Start: start, From: from, To: from + int64(d)}
	ignore := func(Progress) {}
	serr := make(chan error, 1)
	go func() {
		var err error
		server, err = se.Run(ctx, w, ignore)
		serr <- err
	}()
	later := int64(behind)
	client, err = ce.Run(ctx, Window{Start: w.Start + later, From: w.From + later, To: w.To + later}, ignore)
	return client, server, errors.Join(err, <-serr)
}

// TestClientBehind checks that a server answers until the client is done, even if the client's window begins later: over TCP
// even if the client pauses between messages, over UDP even if it is still sending when the server's window ends.
func TestClientBehind(t *testing.T) {
	for name, tt := range map[string]struct {
		udp    bool
		rate   int
		behind time.Duration
	}{"TCP": {false, 10, 400 * time.Millisecond}, "UDP": {true, 1000, 100 * time.Millisecond}} {
		t.Run(name, func(t *testing.T) {
			bothWays(t, func(t *testing.T, loop bool) {
				ce, se := ends(t, Spec{Kind: UnderLoad, UDP: tt.udp, Size: 64, Connections: 1, Rate: tt.rate, EventLoop: loop})
				defer ce.Close()
				defer se.Close()
				client, _, err := runPairBehind(t.Context(), ce, se, 200*time.Millisecond, tt.behind)
				if err != nil || client.Messages == 0 || client.Lost > 0 {
					t.Errorf("%d messages, %d lost: %v", client.Messages, client.Lost, err)
				}
			})
		})
	}
}

// TestServerDoneBefore checks that a client that sends messages of the window late may find its server stopped.
func TestServerDoneBefore(t *testing.T) {
	bothWays(t, func(t *testing.T, loop bool) {
		// The rate cannot be kept, so the client sends after the window too.
		ce, se := ends(t, Spec{Kind: UnderLoad, UDP: true, Size: 64, Connections: 1, Rate: 100_000_000, EventLoop: loop})
		defer ce.Close()
		start := Now()
		w := Window{start, start, start + int64(100*time.Millisecond)}
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = se.Run(ctx, w, func(Progress) {})
			se.Close()
		}()
		time.AfterFunc(120*time.Millisecond, stop)
		client, err := ce.Run(t.Context(), w, func(Progress) {})
		if err != nil || client.Messages == 0 {
			t.Errorf("%d messages: %v", client.Messages, err)
		}
		<-ended
	})
}

func TestPairs(t *testing.T) {
	for _, kind := range []string{Stream, PingPong, UnderLoad, Connect} {
		for _, udp := range []bool{false, true} {
			if udp && kind == Connect {
				continue
			}
			for _, ip := range []string{"127.0.0.1", "::1"} {
				for _, connections := range []int{1, 3} {
					for _, loop := range []bool{false, true} {
						if loop && (kind == Connect || ip != "127.0.0.1") {
							continue
						}
						spec := Spec{Kind: kind, UDP: udp, Size: 1200, Connections: connections, Rate: 2000, EventLoop: loop}
						t.Run(fmt.Sprintf("%s/udp=%t/%s/%d/loop=%t", kind, udp, ip, connections, loop), func(t *testing.T) { testPair(t, spec, ip) })
					}
				}
			}
		}
	}
}

func testPair(t *testing.T, spec Spec, ip string) {
	const window = 200 * time.Millisecond
	client, server, err := pair(t, t.Context(), spec, ip, window)
	if err != nil {
		t.Fatal(err)
	}
	if server.Bytes == 0 || server.Messages == 0 {
		t.Errorf("the server saw nothing: %+v", server)
	}
	for name, e := range map[string]record.Endpoint{"client": client, "server": server} {
		if off := e.Seconds - window.Seconds(); off < -0.06 || off > 0.06 {
			t.Errorf("%s: window of %.3f s, want %.3f", name, e.Seconds, window.Seconds())
		}
		if e.CPUSeconds <= 0 {
			t.Errorf("%s: no CPU time", name)
		}
		// A thread that waits for a message sleeps once, unless the message is there already.
		if spec.Kind == PingPong && (e.Sleeps == 0 || e.Sleeps > e.Messages+e.Messages/4+10) {
			t.Errorf("%s: %d sleeps in %d round trips", name, e.Sleeps, e.Messages)
		}
	}
	if spec.Kind == Stream {
		return
	}
	h, err := record.DecodeHistogram(client.Latency)
	if err != nil {
		t.Fatal(err)
	}
	if spec.Kind == UnderLoad {
		want := float64(spec.Rate) * window.Seconds() * float64(spec.Connections)
		if n := float64(h.TotalCount() + int64(client.Lost)); n < 0.98*want || n > 1.02*want {
			t.Errorf("%.0f messages were due, want %.0f", n, want)
		}
		return
	}
	// A round trip across an edge of the window counts in only one of the two figures.
	diff := int64(client.Messages) - h.TotalCount()
	if diff < -2*int64(spec.Connections) || diff > 2*int64(spec.Connections) {
		t.Errorf("%d round trips, %d latencies", client.Messages, h.TotalCount())
	}
	// One connection spends its time in round trips.
	if mean := h.Mean() / 1e9 * float64(client.Messages) / float64(spec.Connections); mean < 0.7*client.Seconds || mean > 1.1*client.Seconds {
		t.Errorf("latencies add up to %.3f s of %.3f s", mean, client.Seconds)
	}
}

// TestEverywhere checks that a server that listens on all addresses answers each client from the address that the client used.
func TestEverywhere(t *testing.T) {
	for _, c := range [][2]string{{"0.0.0.0", "127.0.0.1"}, {"0.0.0.0", "127.0.0.2"}, {"::", "::1"}, {"::", "127.0.0.3"}} {
		for _, udp := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/%s/udp=%t", c[0], c[1], udp), func(t *testing.T) {
				spec := Spec{Kind: PingPong, UDP: udp, Size: 64, Connections: 3}
				s, err := Listen(spec, netip.AddrPortFrom(netip.MustParseAddr(c[0]), 0))
				if err != nil {
					t.Fatal(err)
				}
				client, server := join(t, spec, s, netip.AddrPortFrom(netip.MustParseAddr(c[1]), s.Addr().Port()))
				client.Close()
				server.Close()
			})
		}
	}
}

// TestCollect checks that every datagram counts once, and a hello never.
func TestCollect(t *testing.T) {
	spec := Spec{Kind: Stream, UDP: true, Size: 64, Connections: 1}
	c := conn{arrivals: new(arrivals)}
	r := &run{Window: Window{From: 1, To: 1 << 62}, clock: newClock()}
	client, server := ends(t, spec)
	defer client.Close()
	defer server.Close()
	c.fd = server.conns[0].fd
	deliver := func(b []byte) {
		if _, err := send(client.conns[0].fd, b); err != nil {
			t.Fatal(err)
		}
	}
	deliver([]byte(Spec{}.hello()))
	msg := make([]byte, 64)
	for _, number := range []uint64{1, 2, 5, 4, 4, 9} {
		putHeader(msg, number, true, 1)
		deliver(msg)
	}
	done := make(chan error)
	go func() { done <- spec.collect(&c, r) }()
	for deadline := time.Now().Add(10 * time.Second); c.messages.Load() < 5 && time.Now().Before(deadline); {
		runtime.Gosched()
	}
	r.stopped.Store(true)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if c.messages.Load() != 5 || c.bytes.Load() != 5*64 || c.arrivals.arrived != 5 || c.arrivals.reordered != 1 || c.arrivals.duplicates != 1 {
		t.Errorf("%d messages, %d bytes, %+v", c.messages.Load(), c.bytes.Load(), c.arrivals.counts)
	}
}

func TestFaults(t *testing.T) {
	spec := Spec{Kind: Stream, Size: 1 << 10, Connections: 1}
	t.Run("nobody listens", func(t *testing.T) {
		if _, err := Dial(t.Context(), spec, netip.MustParseAddrPort("127.0.0.1:1")); err == nil {
			t.Error("connected to a closed port")
		}
	})
	t.Run("cancelled while it waits for a client", func(t *testing.T) {
		s, err := Listen(spec, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), 0))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := s.Accept(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("cancelled in mid-run", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		begin := time.Now()
		_, _, err := pair(t, ctx, spec, "127.0.0.1", time.Hour)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		if took := time.Since(begin); took > 5*time.Second {
			t.Errorf("took %s to stop", took)
		}
	})
	t.Run("no such congestion control", func(t *testing.T) {
		bad := spec
		bad.CongestionControl = "nonesuch"
		if _, err := Listen(bad, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), 0)); err == nil {
			t.Error("accepted")
		}
	})
	t.Run("client gone", func(t *testing.T) {
		s, err := Listen(spec, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), 0))
		if err != nil {
			t.Fatal(err)
		}
		c, err := Dial(t.Context(), spec, s.Addr())
		if err != nil {
			t.Fatal(err)
		}
		end := accept(t, s)
		defer end.Close()
		c.Close()
		now := Now()
		if _, err := end.Run(t.Context(), Window{now, now, now + int64(10*time.Second)}, func(Progress) {}); err == nil {
			t.Error("a client that left looks like a good run")
		}
	})
}

// TestReset checks a client that resets its connection. A ping-pong may end like that after the window; within the window it is
// a failure.
func TestReset(t *testing.T) {
	spec := Spec{Kind: PingPong, Size: 64, Connections: 1}
	looped := Spec{Kind: PingPong, Size: 64, Connections: 1, EventLoop: true}
	for name, role := range map[string]func(*conn, *run) error{
		"echo": spec.echo,
		"sink": spec.sink,
		"loop": func(c *conn, r *run) error { return looped.share([]*conn{c}, false)(r) },
	} {
		for _, within := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/within=%t", name, within), func(t *testing.T) {
				client, server := ends(t, spec)
				defer server.Close()
				if err := unix.SetsockoptLinger(client.conns[0].fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
					t.Fatal(err)
				}
				client.Close()
				now := Now()
				r := &run{Window: Window{From: 1, To: now - 1}, clock: clock{base: time.Now(), mono: now}}
				if within {
					r.To = now + int64(time.Minute)
				}
				err := role(server.conns[0], r)
				if within != errors.Is(err, unix.ECONNRESET) || !within && err != nil {
					t.Errorf("got %v", err)
				}
			})
		}
	}
}

// TestNoDelay checks that only ends that wait for answers disable Nagle's algorithm.
func TestNoDelay(t *testing.T) {
	for kind, want := range map[string]int{Stream: 0, PingPong: 1, UnderLoad: 1} {
		client, server := ends(t, Spec{Kind: kind, Size: 64, Connections: 1})
		for side, end := range map[string]*End{"client": client, "server": server} {
			got, err := unix.GetsockoptInt(end.conns[0].fd, unix.IPPROTO_TCP, unix.TCP_NODELAY)
			if err != nil {
				t.Fatal(err)
			}
			if got != want {
				t.Errorf("%s's %s: TCP_NODELAY %d, want %d", kind, side, got, want)
			}
			end.Close()
		}
	}
}

// TestSendsNoZeros checks that a client has written every page of the buffer that it sends.
func TestSendsNoZeros(t *testing.T) { bothWays(t, testSendsNoZeros) }

func testSendsNoZeros(t *testing.T, loop bool) {
	for _, kind := range []string{Stream, PingPong, UnderLoad} {
		t.Run(kind, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			spec := Spec{Kind: kind, Size: 64 << 10, Connections: 1, Rate: 100, EventLoop: loop}
			end, err := Dial(t.Context(), spec, netip.MustParseAddrPort(l.Addr().String()))
			if err != nil {
				t.Fatal(err)
			}
			defer end.Close()
			var sent bytes.Buffer
			received := make(chan error, 1)
			go func() {
				c, err := l.Accept()
				if err == nil {
					_ = c.SetDeadline(time.Now().Add(10 * time.Second))
					_, err = io.CopyN(&sent, c, int64(spec.Size))
					c.Close()
				}
				received <- err
			}()
			now := Now()
			_, _ = end.Run(t.Context(), Window{now, now, now + int64(time.Second)}, func(Progress) {}) // its peer leaves
			if err := <-received; err != nil {
				t.Fatal(err)
			}
			if bytes.Contains(sent.Bytes(), make([]byte, 1<<10)) {
				t.Error("1,024 zeros in a row")
			}
		})
	}
}

// TestClosed checks a server that closes its connection. After the window, a client that still waits for a message ends without
// an error, because part of the message may have been lost. Within the window, the close is a failure.
func TestClosed(t *testing.T) { bothWays(t, testClosed) }

func testClosed(t *testing.T, loop bool) {
	spec := Spec{Kind: PingPong, Size: 64, Connections: 1, EventLoop: loop}
	for _, within := range []bool{false, true} {
		client, server := ends(t, spec)
		defer client.Close()
		server.Close()
		now := Now()
		r := &run{Window: Window{From: 1, To: now - 1}, clock: clock{base: time.Now(), mono: now}}
		if within {
			r.To = now + int64(time.Minute)
		}
		if err := client.threads[0](r); within != (err != nil) {
			t.Errorf("within the window %t: got %v", within, err)
		}
	}
}

// TestSendFails checks that a sender under load fails if a send fails within the window. After the window, its server may have
// stopped, and what was not sent is counted.
func TestSendFails(t *testing.T) {
	spec := Spec{Kind: UnderLoad, Size: 64, Connections: 1, Rate: 1000}
	for window, fails := range map[time.Duration]bool{-time.Millisecond: false, time.Minute: true} {
		client, server := ends(t, spec)
		defer client.Close()
		defer server.Close()
		shutdownWrite(client.conns[0].fd)
		now := Now()
		r := &run{Window: Window{Start: now - int64(time.Second), From: now - int64(time.Second), To: now + int64(window)}, clock: newClock()}
		var p pace
		if err := spec.pace(client.conns[0].fd, r, &p); fails != (err != nil) || fails != (p.behind == 0) {
			t.Errorf("a window that ends in %s: %v, %d messages behind", window, err, p.behind)
		}
	}
}

// TestClientReadsLate checks that a client that reads nothing until after the window still gets an answer to everything that it
// has sent.
func TestClientReadsLate(t *testing.T) { bothWays(t, testClientReadsLate) }

func testClientReadsLate(t *testing.T, loop bool) {
	const size = 1 << 10
	client, server := ends(t, Spec{Kind: UnderLoad, Size: size, Connections: 1, EventLoop: loop})
	defer client.Close()
	start := Now()
	w := Window{start, start, start + int64(500*time.Millisecond)}
	ended := make(chan error, 1)
	go func() {
		_, err := server.Run(t.Context(), w, func(Progress) {})
		server.Close()
		ended <- err
	}()
	fd := client.conns[0].fd
	sent := 0
	for stalled := 0; stalled < 3; stalled++ { // until the server takes no more; a signal ends a call too
		n, err := send(fd, make([]byte, size))
		if err != nil && !errors.Is(err, errStalled) {
			t.Fatal(err)
		}
		if sent += n; n > 0 {
			stalled = 0
		}
	}
	if err := SleepUntil(t.Context(), w.To+int64(3*stallCheck)); err != nil {
		t.Fatal(err)
	}
	for got, buf := 0, make([]byte, 1<<20); got < sent/size*size; {
		n, err := receive(fd, buf)
		if errors.Is(err, errStalled) {
			continue
		}
		if got += n; err != nil || n == 0 {
			t.Fatalf("%d of %d bytes, then %v", got, sent, err)
		}
	}
	shutdownWrite(fd)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestClosedEarly checks that a stream that ends within the window has failed, with blocking calls and on an event loop.
func TestClosedEarly(t *testing.T) { bothWays(t, testClosedEarly) }

func testClosedEarly(t *testing.T, loop bool) {
	client, server := ends(t, Spec{Kind: Stream, Size: 64, Connections: 2, EventLoop: loop})
	defer server.Close()
	client.Close()
	now := Now()
	r := &run{Window: Window{From: 1, To: now + int64(time.Minute)}, clock: clock{base: time.Now(), mono: now}}
	if err := server.threads[0](r); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %v", err)
	}
}

// TestLostMessages checks the counts of a client whose server answers nine of ten datagrams.
func TestLostMessages(t *testing.T) { bothWays(t, testLostMessages) }

func testLostMessages(t *testing.T, loop bool) {
	for _, spec := range []Spec{
		{Kind: PingPong, UDP: true, Size: 64, Connections: 2, EventLoop: loop},
		{Kind: UnderLoad, UDP: true, Size: 64, Connections: 2, Rate: 500, EventLoop: loop},
	} {
		server, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
		if err != nil {
			t.Fatal(err)
		}
		defer server.Close()
		go func() {
			buf := make([]byte, 1<<10)
			for seen := 0; ; {
				n, from, err := server.ReadFromUDPAddrPort(buf)
				if err != nil {
					return
				}
				if string(buf[:n]) != spec.hello() {
					seen++
				}
				if seen%10 != 9 {
					_, _ = server.WriteToUDPAddrPort(buf[:n], from)
				}
			}
		}()
		out, err := drive(t, t.Context(), spec, server.LocalAddr().(*net.UDPAddr).AddrPort(), 700*time.Millisecond)
		if err != nil {
			t.Fatal(err)
		}
		answered, _ := histogram(t, out)
		// Each loss delays a ping-pong by 200 ms of the 700. Under load, a tenth of 700 messages is lost.
		least, most := uint64(3), uint64(8)
		if spec.Kind == UnderLoad {
			least, most = 65, 75
			if n := answered + int64(out.Lost); n != 700 {
				t.Errorf("%d messages were answered or lost, want 700", n)
			}
		}
		if out.Lost < least || out.Lost > most || answered == 0 {
			t.Errorf("%s: %d lost, %d answered", spec.Kind, out.Lost, answered)
		}
	}
}

// repeat is a server that returns each datagram twice, after a delay.
func repeat(t *testing.T, hello string, delay time.Duration) netip.AddrPort {
	t.Helper()
	server, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	go func() {
		buf := make([]byte, 1<<10)
		for {
			n, from, err := server.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			if string(buf[:n]) != hello {
				time.Sleep(delay)
				_, _ = server.WriteToUDPAddrPort(buf[:n], from)
			}
			_, _ = server.WriteToUDPAddrPort(buf[:n], from)
		}
	}()
	return server.LocalAddr().(*net.UDPAddr).AddrPort()
}

// TestDuplicateRoundTrips checks that a second copy of a reply does not count as that to the next message.
func TestDuplicateRoundTrips(t *testing.T) { bothWays(t, testDuplicateRoundTrips) }

func testDuplicateRoundTrips(t *testing.T, loop bool) {
	const delay = 2 * time.Millisecond
	for _, size := range []int{1, 3, 8, 64} {
		spec := Spec{Kind: PingPong, UDP: true, Size: size, Connections: 1, EventLoop: loop}
		out, err := drive(t, t.Context(), spec, repeat(t, spec.hello(), delay), 200*time.Millisecond)
		if err != nil {
			t.Fatal(err)
		}
		if n, at := histogram(t, out); n == 0 || at(0) < delay*9/10 {
			t.Errorf("%d bytes: %d round trips, the shortest took %s", size, n, at(0))
		}
	}
}

// TestIterations checks that each connection makes the set number of round trips, which ends its window, and that a window that
// ends earlier is an error.
func TestIterations(t *testing.T) {
	for _, udp := range []bool{false, true} {
		spec := Spec{Kind: PingPong, UDP: udp, Size: 64, Connections: 2, Iterations: 50}
		e, _, err := pair(t, t.Context(), spec, "127.0.0.1", 2*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		latencies, _ := histogram(t, e)
		if e.Messages != 100 || e.Bytes != 6400 || latencies != 100 || e.Seconds <= 0 || e.Seconds > 1.9 || e.Retransmits > 1000 {
			t.Errorf("udp %v: %d round trips, %d latencies: %+v", udp, e.Messages, latencies, e)
		}
		spec.Iterations = 1 << 40
		if _, _, err := pair(t, t.Context(), spec, "127.0.0.1", 100*time.Millisecond); err == nil || !strings.Contains(err.Error(), "iterations are done at the end of the window: set a longer duration") {
			t.Errorf("udp %v: error %v", udp, err)
		}
	}
}

// TestUnderLoadCountsTheWait stops a server for a while, and checks that each message that was due in that time counts as
// having waited, although a sender that waits for replies, or whose buffer is full, would have sent few of them.
func TestUnderLoadCountsTheWait(t *testing.T) { bothWays(t, testUnderLoadCountsTheWait) }

func testUnderLoadCountsTheWait(t *testing.T, loop bool) {
	const pause, size = 200 * time.Millisecond, 256 << 10 // which fills every buffer
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		buf := make([]byte, size)
		if _, err := io.ReadFull(c, buf[:len(Secret{})]); err != nil {
			return
		}
		for n := 0; ; n++ {
			if _, err := io.ReadFull(c, buf); err != nil {
				return
			}
			if n == 50 {
				time.Sleep(pause)
			}
			if _, err := c.Write(buf); err != nil {
				return
			}
		}
	}()
	spec := Spec{Kind: UnderLoad, Size: size, Connections: 1, Rate: 400, EventLoop: loop}
	out, err := drive(t, t.Context(), spec, netip.MustParseAddrPort(l.Addr().String()), 500*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	n, quantile := histogram(t, out)
	// 80 of 200 messages were due in the pause, evenly spread: a quarter of all waited for more than a third of it.
	if n != 200 {
		t.Errorf("%d latencies, want 200", n)
	}
	if p75 := quantile(75); p75 < pause/3 {
		t.Errorf("p75 is %s after a pause of %s", p75, pause)
	}
}

// TestRateNotReached sets a rate that the sender cannot reach, and one that the server cannot take, and checks that the result
// says so.
func TestRateNotReached(t *testing.T) { bothWays(t, testRateNotReached) }

func testRateNotReached(t *testing.T, loop bool) {
	codes := func(e record.Endpoint) (codes []string) {
		for _, w := range e.Warnings {
			codes = append(codes, w.Code)
		}
		return codes
	}
	for _, busy := range []bool{false, true} {
		// Nothing delays a UDP sender.
		client, _, err := pair(t, t.Context(), Spec{Kind: UnderLoad, UDP: true, Size: 64, Connections: 1, Rate: 100_000_000, Busy: busy, EventLoop: loop}, "127.0.0.1", 300*time.Millisecond)
		if err != nil {
			t.Fatal(err)
		}
		if got := codes(client); !slices.Equal(got, []string{record.WarnGeneratorBound}) {
			t.Errorf("busy=%t: a rate of 1e8 a second: warnings %v", busy, got)
		}
		// Another process may have the CPU at the end of the window, but not three times in a row.
		testenv.Retry(t, 3, func() error {
			client, _, err := pair(t, t.Context(), Spec{Kind: UnderLoad, Size: 64, Connections: 1, Rate: 1000, Busy: busy, EventLoop: loop}, "127.0.0.1", 500*time.Millisecond)
			if err == nil && len(client.Warnings) > 0 {
				err = fmt.Errorf("busy=%t: a rate of 1000 a second: %v", busy, client.Warnings)
			}
			return err
		})
	}
	t.Run("full connection", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() { // echoes 100 of 400 messages a second
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			buf := make([]byte, 256<<10)
			for range time.Tick(10 * time.Millisecond) {
				if _, err := io.ReadFull(c, buf); err != nil {
					return
				}
				if _, err := c.Write(buf); err != nil {
					return
				}
			}
		}()
		spec := Spec{Kind: UnderLoad, Size: 256 << 10, Connections: 1, Rate: 400, EventLoop: loop}
		out, err := drive(t, t.Context(), spec, netip.MustParseAddrPort(l.Addr().String()), 500*time.Millisecond)
		if err != nil {
			t.Fatal(err)
		}
		if got := codes(out); !slices.Equal(got, []string{record.WarnSaturated}) {
			t.Errorf("warnings %v", out.Warnings)
		}
	})
}

// TestUnderLoadFlatOut checks a sender without a schedule: both directions are full all the time.
func TestUnderLoadFlatOut(t *testing.T) { bothWays(t, testUnderLoadFlatOut) }

func testUnderLoadFlatOut(t *testing.T, loop bool) {
	client, server, err := pair(t, t.Context(), Spec{Kind: UnderLoad, Size: 64, Connections: 2, EventLoop: loop}, "127.0.0.1", 200*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if client.Messages < 2000 || server.Messages < 2000 {
		t.Errorf("client %d, server %d messages", client.Messages, server.Messages)
	}
}

// TestLoopCountsItsThreadOnce checks that 8 connections that share a thread count its CPU time once.
func TestLoopCountsItsThreadOnce(t *testing.T) {
	const window = 300 * time.Millisecond
	client, server, err := pair(t, t.Context(), Spec{Kind: Stream, Size: 1 << 14, Connections: 8, EventLoop: true}, "127.0.0.1", window)
	if err != nil {
		t.Fatal(err)
	}
	for name, e := range map[string]record.Endpoint{"client": client, "server": server} {
		if e.CPUSeconds <= 0 || e.CPUSeconds > 1.2*window.Seconds() {
			t.Errorf("%s: %.3f s of CPU in a window of %s", name, e.CPUSeconds, window)
		}
	}
}

func TestConnectFaults(t *testing.T) {
	spec := Spec{Kind: Connect, Size: 64, Connections: 1}
	if _, err := Dial(t.Context(), spec, netip.MustParseAddrPort("127.0.0.1:1")); err == nil {
		t.Error("connected to a closed port")
	}
	client, server := ends(t, spec)
	defer client.Close()
	server.Close() // and with it the port
	now := Now()
	if _, err := client.Run(t.Context(), Window{now, now, now + int64(10*time.Second)}, func(Progress) {}); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("got %v", err)
	}
}

// TestConnectReset checks a server that resets connections. If it resets all, that is a failure; if it resets some, these are
// lost.
func TestConnectReset(t *testing.T) {
	for name, every := range map[string]int{"all": 1, "some": 3} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp4", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			go func() {
				for n := 1; ; n++ {
					c, err := l.Accept()
					if err != nil {
						return
					}
					_, _ = io.CopyN(c, c, 64)
					if n%every == 0 {
						_ = c.(*net.TCPConn).SetLinger(0)
					}
					_ = c.Close()
				}
			}()
			out, err := drive(t, t.Context(), Spec{Kind: Connect, Size: 64, Connections: 1}, l.Addr().(*net.TCPAddr).AddrPort(), 100*time.Millisecond)
			if every == 1 {
				if !errors.Is(err, unix.ECONNRESET) {
					t.Errorf("got %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if out.Lost == 0 || out.Messages < out.Lost || out.Messages > 3*out.Lost {
				t.Errorf("%d messages, %d lost, want twice as many", out.Messages, out.Lost)
			}
		})
	}
}

// TestRunsShareTheRuntime checks that while runs of one process overlap, from the beginning of the first to the end of the
// last, there is no garbage collection, and each thread has a P.
func TestRunsShareTheRuntime(t *testing.T) {
	percent := func() int32 {
		sample := []metrics.Sample{{Name: "/gc/gogc:percent"}}
		metrics.Read(sample)
		return int32(sample[0].Value.Uint64())
	}
	await := func(what string, is func() bool) {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); !is(); runtime.Gosched() {
			if time.Now().After(deadline) {
				t.Fatalf("%s: not within 10 s", what)
			}
		}
	}
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(1 << 40)) // the default is no limit, which is what a run sets
	procs, collects, limit := runtime.GOMAXPROCS(0), percent(), debug.SetMemoryLimit(-1)
	spec := Spec{Kind: PingPong, Size: 64, Connections: procs}
	ends := func(d time.Duration) <-chan error {
		done := make(chan error, 1)
		go func() {
			defer close(done)
			_, _, err := pair(t, t.Context(), spec, "127.0.0.1", d)
			done <- err
		}()
		return done
	}
	short := ends(300 * time.Millisecond)
	await("the first begins", func() bool { return runtime.GOMAXPROCS(0) > 2*procs })
	long := ends(time.Second)
	await("the second begins", func() bool { return runtime.GOMAXPROCS(0) > 4*procs })
	if err := <-short; err != nil {
		t.Error(err)
	}
	if p, l := percent(), debug.SetMemoryLimit(-1); p != -1 || l != math.MaxInt64 {
		t.Errorf("garbage is collected at %d%%, or at %d bytes, while one runs", p, l)
	}
	if err := <-long; err != nil {
		t.Error(err)
	}
	if p, n, l := percent(), runtime.GOMAXPROCS(0), debug.SetMemoryLimit(-1); p != collects || n != procs || l != limit {
		t.Errorf("GOGC, GOMAXPROCS and GOMEMLIMIT are %d, %d and %d, were %d, %d and %d", p, n, l, collects, procs, limit)
	}
}

// TestMark checks that each edge of the window is recorded once, and that nothing is allocated in between.
func TestMark(t *testing.T) {
	var c conn
	r := &run{Window: Window{From: 100, To: 200}}
	between := func() {
		for now := int64(110); now < 200; now += 10 {
			c.mark(r, now)
		}
	}
	c.mark(r, 99)
	c.mark(r, 105)
	if n := testing.AllocsPerRun(10, between); n > 0 {
		t.Errorf("%g allocations between the edges", n)
	}
	c.mark(r, 201)
	c.mark(r, 202)
	if c.from.at != 105 || c.to.at != 201 {
		t.Errorf("edges at %d and %d, want 105 and 201", c.from.at, c.to.at)
	}
}
