package traffic

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
)

func histogram(t *testing.T, e record.Endpoint) (count int64, at func(float64) time.Duration) {
	t.Helper()
	h, err := record.DecodeHistogram(e.Latency)
	if err != nil {
		t.Fatal(err)
	}
	return h.TotalCount(), func(q float64) time.Duration { return time.Duration(h.ValueAtQuantile(q)) }
}

func TestHTTP(t *testing.T) {
	for _, ip := range []string{"127.0.0.1", "::1"} {
		for _, keep := range []bool{false, true} {
			for _, connections := range []int{1, 3} {
				for _, loop := range []bool{false, true} {
					spec := Spec{Kind: HTTP, Size: 1000, Connections: connections, KeepAlive: keep, EventLoop: loop}
					t.Run(fmt.Sprintf("%s/keep=%t/%d/loop=%t", ip, keep, connections, loop), func(t *testing.T) { testHTTP(t, spec, ip) })
				}
			}
		}
	}
}

func testHTTP(t *testing.T, spec Spec, ip string) {
	const window = 300 * time.Millisecond
	client, server, err := pair(t, t.Context(), spec, ip, window)
	if err != nil {
		t.Fatal(err)
	}
	if client.Bytes != 1000*client.Messages || client.Errors != nil {
		t.Errorf("%d bytes of %d responses, errors %v", client.Bytes, client.Messages, client.Errors)
	}
	for name, e := range map[string]record.Endpoint{"client": client, "server": server} {
		if off := e.Seconds - window.Seconds(); off < -0.06 || off > 0.06 || e.CPUSeconds <= 0 {
			t.Errorf("%s: window of %.3f s, want %.3f; CPU %.3f s", name, e.Seconds, window.Seconds(), e.CPUSeconds)
		}
	}
	if d := int64(client.Messages) - int64(server.Messages); d < -int64(client.Messages)/5-5 || d > int64(client.Messages)/5+5 {
		t.Errorf("%d responses came, %d were sent", client.Messages, server.Messages)
	}
	n, _ := histogram(t, client)
	if d := int64(client.Messages) - n; d < -2*int64(spec.Connections) || d > 2*int64(spec.Connections) {
		t.Errorf("%d responses, %d latencies", client.Messages, n)
	}
}

// web is a server of net/http that counts connections.
type web struct {
	addr     netip.AddrPort
	accepted atomic.Int64
	server   http.Server
}

func serveWeb(t *testing.T, handler http.HandlerFunc) *web {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &web{addr: l.Addr().(*net.TCPAddr).AddrPort()}
	w.server.Handler = handler
	w.server.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			w.accepted.Add(1)
		}
	}
	go func() { _ = w.server.Serve(l) }()
	t.Cleanup(func() { _ = w.server.Close() })
	return w
}

// drive runs only the client of spec.
func drive(t *testing.T, ctx context.Context, spec Spec, to netip.AddrPort, d time.Duration) (record.Endpoint, error) {
	t.Helper()
	end, err := Dial(ctx, spec, to)
	if err != nil {
		t.Fatal(err)
	}
	defer end.Close()
	start := Now() + int64(5*time.Millisecond)
	return end.Run(ctx, Window{Start: start, From: start, To: start + int64(d)}, func(Progress) {})
}

// TestKeepAlive checks the number of connections: one that tests whether the server is there, and then one for each of the
// client's concurrent connections, or one for each request.
func TestKeepAlive(t *testing.T) { bothWays(t, testKeepAlive) }

func testKeepAlive(t *testing.T, loop bool) {
	for _, keep := range []bool{false, true} {
		w := serveWeb(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") })
		spec := Spec{Kind: HTTP, Size: 5, Connections: 2, KeepAlive: keep, Requests: 200, EventLoop: loop}
		e, err := drive(t, t.Context(), spec, w.addr, 5*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		want := int64(1 + 200)
		if keep {
			want = 1 + 2
		}
		if got := w.accepted.Load(); got != want {
			t.Errorf("keep %t: %d connections, want %d", keep, got, want)
		}
		if e.Messages != 200 || e.Bytes != 200*5 || e.Errors != nil {
			t.Errorf("keep %t: %+v", keep, e)
		}
	}
}

// TestRequests checks that a client makes exactly the set number of requests, over all connections, and that the window ends
// with the last of them.
func TestRequests(t *testing.T) { bothWays(t, testRequests) }

func testRequests(t *testing.T, loop bool) {
	var seen atomic.Int64
	w := serveWeb(t, func(w http.ResponseWriter, _ *http.Request) {
		if seen.Add(1) == 50 {
			time.Sleep(200 * time.Millisecond) // the slow one
		}
		_, _ = io.WriteString(w, "hello")
	})
	spec := Spec{Kind: HTTP, Size: 5, Connections: 3, KeepAlive: true, Requests: 50, EventLoop: loop}
	began := time.Now()
	e, err := drive(t, t.Context(), spec, w.addr, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if seen.Load() != 50 || e.Messages != 50 {
		t.Errorf("%d requests, %d responses, want 50", seen.Load(), e.Messages)
	}
	if took := time.Since(began).Seconds(); e.Completion < 0.2 || e.Completion > took || e.Seconds != e.Completion {
		t.Errorf("completion %.3f s, seconds %.3f, took %.3f s", e.Completion, e.Seconds, took)
	}
	spec.Requests = 1 << 30
	if _, err := drive(t, t.Context(), spec, w.addr, 100*time.Millisecond); err == nil || !strings.Contains(err.Error(), "longer duration") {
		t.Errorf("a billion requests in a tenth of a second: %v", err)
	}
}

// script serves raw connections with serve, one after another, until serve closes the listener. The first connection only tests
// whether somebody listens.
func script(t *testing.T, serve func(l *net.TCPListener, n int, c *net.TCPConn)) netip.AddrPort {
	t.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for n := 0; ; n++ {
			c, err := l.AcceptTCP()
			if err != nil {
				return
			}
			if n > 0 {
				if _, err := http.ReadRequest(bufio.NewReader(c)); err != nil {
					t.Errorf("request %d: %v", n, err)
				}
				serve(l, n, c)
			}
			c.Close()
		}
	}()
	return l.Addr().(*net.TCPAddr).AddrPort()
}

const good = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"

// TestErrors checks a server that fails in every possible way: each failed request is counted under its kind of error and
// yields no latency, and the others continue.
func TestErrors(t *testing.T) { bothWays(t, testErrors) }

func testErrors(t *testing.T, loop bool) {
	const each = 10
	kinds := []func(*net.TCPConn){
		func(c *net.TCPConn) { _, _ = io.WriteString(c, good) },
		func(c *net.TCPConn) { _, _ = io.WriteString(c, good[:len(good)-2]) }, // ends in mid-response
		func(c *net.TCPConn) { _ = c.SetLinger(0) },                           // reset
		func(c *net.TCPConn) {
			_, _ = io.WriteString(c, "HTTP/1.1 503 Away\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
		}, // a backend that is down
		func(c *net.TCPConn) { _, _ = io.WriteString(c, "SSH-2.0-hello\r\n\r\n") }, // no HTTP
		func(c *net.TCPConn) { _, _ = io.WriteString(c, good+"!") },                // more than it said
	}
	addr := script(t, func(_ *net.TCPListener, n int, c *net.TCPConn) { kinds[n%len(kinds)](c) })
	e, err := drive(t, t.Context(), Spec{Kind: HTTP, Size: 5, Connections: 1, Requests: each * len(kinds), EventLoop: loop}, addr, 20*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]uint64{record.ErrShort: each, record.ErrReset: each, record.ErrStatus: each, record.ErrOther: 2 * each}
	if diff := cmp.Diff(want, e.Errors); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if n, _ := histogram(t, e); n != each || e.Messages != each {
		t.Errorf("%d responses and %d latencies, want %d", e.Messages, n, each)
	}
}

// TestServerDies checks that after a server has died in mid-run, requests count as refused.
func TestServerDies(t *testing.T) {
	for _, page := range []bool{false, true} {
		site := Spec{Page: page, EventLoop: page, Size: 1000}.site()
		addr := script(t, func(l *net.TCPListener, n int, c *net.TCPConn) {
			if !page {
				_, _ = io.WriteString(c, good)
			} else {
				_, _ = c.Write(site[pageIndex].responses[1][kept])
				for range 2 {
					r, err := http.ReadRequest(bufio.NewReader(c))
					if err != nil {
						t.Error(err)
						return
					}
					last := map[bool]int{true: closed, false: kept}[r.Close]
					_, _ = c.Write(site[r.URL.Path].responses[1][last])
				}
			}
			if n == 20 {
				l.Close()
			}
		})
		spec := Spec{Kind: HTTP, Size: 5, Connections: 1, Page: page, EventLoop: page}
		if page {
			spec.Size, spec.Rate = 1000, 100
		}
		e, err := drive(t, t.Context(), spec, addr, 500*time.Millisecond)
		if err != nil {
			t.Fatal(err)
		}
		if e.Messages != 20 || e.Errors[record.ErrRefused] < 10 {
			t.Errorf("page %t: %d responses, want 20; errors %v", page, e.Messages, e.Errors)
		}
	}
}

// TestPage loads pages from the engine's own server. Far fewer bytes are transferred than the objects have, because they are
// compressed.
func TestPage(t *testing.T) {
	spec := Spec{Kind: HTTP, Size: 200_000, Connections: 1, Page: true, EventLoop: true, Rate: 100}
	client, server, err := pair(t, t.Context(), spec, "127.0.0.1", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	n, at := histogram(t, client)
	if n != 100 || client.Errors != nil {
		t.Errorf("%d users in a second, want 100; errors %v", n, client.Errors)
	}
	const plain = indexSize + 200_000 + stylesSize
	if each := client.Bytes / client.Messages; each < plain/8 || each > plain/2 {
		t.Errorf("%d bytes a user, want about a quarter of %d", each, plain)
	}
	if at(50) < 50*time.Microsecond || at(50) > 100*time.Millisecond {
		t.Errorf("a page takes %s", at(50))
	}
	if want := 3 * client.Messages; server.Messages < want-20 || server.Messages > want+20 {
		t.Errorf("%d objects for %d users", server.Messages, client.Messages)
	}
}

// TestPageImage checks that an image is the last object of a page, and is sent uncompressed.
func TestPageImage(t *testing.T) {
	const image = 400_000
	without := Spec{Kind: HTTP, Size: 1000, Connections: 1, Page: true, EventLoop: true, Rate: 20}
	with := without
	with.Image = image
	var each [2]uint64
	for i, spec := range []Spec{without, with} {
		client, server, err := pair(t, t.Context(), spec, "127.0.0.1", time.Second)
		if err != nil {
			t.Fatal(err)
		}
		// A stalled server sends the last user's objects after the window.
		objects := uint64(3 + i)
		if all := objects * client.Messages; client.Errors != nil || server.Messages > all || server.Messages < all-objects {
			t.Errorf("%d objects for %d users, want %d each; errors %v", server.Messages, client.Messages, objects, client.Errors)
		}
		each[i] = client.Bytes / client.Messages
	}
	if got := each[1] - each[0]; got != image {
		t.Errorf("the image took %d bytes, want %d", got, image)
	}
}

// TestCoordinatedOmission stops a page's server for 200 ms of a second, and checks that the users who were due in that time
// count as having waited, whether or not the generator could have sent their requests.
func TestCoordinatedOmission(t *testing.T) {
	var gate sync.RWMutex
	objects := map[string]int{pageIndex: indexSize, pageScript: 1000, pageStyles: stylesSize}
	w := serveWeb(t, func(w http.ResponseWriter, r *http.Request) {
		gate.RLock()
		defer gate.RUnlock()
		w.Header().Set("Content-Length", strconv.Itoa(objects[r.URL.Path]))
		_, _ = w.Write(bytes.Repeat([]byte("x"), objects[r.URL.Path])) // a server that does not compress
	})
	time.AfterFunc(400*time.Millisecond, func() {
		gate.Lock()
		time.AfterFunc(200*time.Millisecond, gate.Unlock)
	})
	e, err := drive(t, t.Context(), Spec{Kind: HTTP, Size: 1000, Connections: 1, Page: true, EventLoop: true, Rate: 100}, w.addr, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	n, at := histogram(t, e)
	if n != 100 || e.Errors != nil {
		t.Errorf("%d users, want 100; errors %v", n, e.Errors)
	}
	// Of the 100 users, 20 were due in the 200 ms, and waited for the rest of that time.
	if at(99) < 150*time.Millisecond || at(90) < 70*time.Millisecond || at(50) > 50*time.Millisecond {
		t.Errorf("p50 %s, p90 %s, p99 %s", at(50), at(90), at(99))
	}
}

// TestHTTPPorts checks that a server with several ports answers on each of them, and closes all of them.
func TestHTTPPorts(t *testing.T) {
	spec := Spec{Kind: HTTP, Size: 5, Connections: 1, Requests: 3, EventLoop: true, Ports: 5}
	var s *Server
	testenv.Retry(t, 20, func() (err error) { // another process may have a port that follows the one that the kernel chooses
		s, err = Listen(spec, netip.MustParseAddrPort("127.0.0.1:0"))
		return err
	})
	end := accept(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		now := Now()
		_, err := end.Run(ctx, Window{Start: now, From: now, To: now + int64(time.Hour)}, func(Progress) {})
		ended <- err
	}()
	for i := range spec.Ports {
		at := netip.AddrPortFrom(s.Addr().Addr(), s.Addr().Port()+uint16(i))
		if e, err := drive(t, t.Context(), spec, at, 10*time.Second); err != nil || e.Messages != 3 || e.Errors != nil {
			t.Errorf("port %d: %+v, %v", i, e, err)
		}
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	end.Close()
	for i := range spec.Ports {
		if c, err := net.Dial("tcp", netip.AddrPortFrom(s.Addr().Addr(), s.Addr().Port()+uint16(i)).String()); err == nil {
			c.Close()
			t.Errorf("port %d is still open", i)
		}
	}
}

// TestHTTPPortTaken checks that a server that cannot have one of its ports keeps none.
func TestHTTPPortTaken(t *testing.T) {
	spec := Spec{Kind: HTTP, Size: 5, Connections: 1, EventLoop: true, Ports: 3}
	first := netip.MustParseAddrPort("127.0.0.1:0")
	var taken net.Listener
	testenv.Retry(t, 20, func() error {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		taken, first = l, netip.AddrPortFrom(first.Addr(), l.Addr().(*net.TCPAddr).AddrPort().Port()-2)
		for i := range uint16(2) { // another process may have them
			free, err := net.Listen("tcp", netip.AddrPortFrom(first.Addr(), first.Port()+i).String())
			if err != nil {
				l.Close()
				return err
			}
			free.Close()
		}
		return nil
	})
	defer taken.Close()
	_, err := Listen(spec, first)
	if !errors.Is(err, unix.EADDRINUSE) || !strings.Contains(err.Error(), fmt.Sprintf("port %d, number 3 of 3", first.Port()+2)) {
		t.Errorf("%v", err)
	}
	for i := range uint16(2) {
		l, err := net.Listen("tcp", netip.AddrPortFrom(first.Addr(), first.Port()+i).String())
		if err != nil {
			t.Errorf("port %d is not free again: %v", i, err)
			continue
		}
		l.Close()
	}
	if _, err := Listen(Spec{Kind: HTTP, Size: 5, Connections: 1, Ports: 3}, first); err == nil || !strings.Contains(err.Error(), "only a server of HTTP on an event loop") {
		t.Errorf("a server that blocks: %v", err)
	}
}

// TestHTTPStops checks that a server that never answers does not delay the end of a run.
func TestHTTPStops(t *testing.T) {
	for _, page := range []bool{false, true} {
		release := make(chan struct{})
		addr := script(t, func(*net.TCPListener, int, *net.TCPConn) { <-release })
		defer close(release)
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		began := time.Now()
		_, err := drive(t, ctx, Spec{Kind: HTTP, Size: 5, Connections: 1, Page: page, EventLoop: page, Rate: 10}, addr, time.Hour)
		if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took > 3*time.Second {
			t.Errorf("page %t: after %s: %v", page, took, err)
		}
	}
}

// TestOtherClients sends requests from other clients to the engine's server: from net/http, compressed and plain, and from an
// HTTP/1.0 client that wants to keep its connection, like ab.
func TestOtherClients(t *testing.T) {
	spec := Spec{Kind: HTTP, Size: 200_000, Connections: 1, Page: true, EventLoop: true, Rate: 1}
	s, err := Listen(spec, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	end, err := s.Accept(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer end.Close()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		start := Now()
		_, err := end.Run(ctx, Window{Start: start, From: start, To: start + int64(time.Hour)}, func(Progress) {})
		ended <- err
	}()
	defer func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("the server ended with %v, not as it was told to", err)
		}
	}()

	for _, tt := range []struct {
		path  string
		plain bool
		want  int
	}{{"/", false, indexSize}, {"/script.js", false, 200_000}, {"/script.js", true, 200_000}, {"/styles.css", false, stylesSize}} {
		client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableCompression: tt.plain}}
		r, err := client.Get("http://" + s.Addr().String() + tt.path)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r.Body)
		if err != nil || r.StatusCode != 200 || len(b) != tt.want || r.Uncompressed == tt.plain {
			t.Errorf("%s: %d, %d bytes of %d, uncompressed here %t, %v", tt.path, r.StatusCode, len(b), tt.want, r.Uncompressed, err)
		}
		client.CloseIdleConnections()
	}
	c, err := net.Dial("tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	in := bufio.NewReader(c)
	for _, connection := range []string{"Keep-Alive", "close"} {
		// Half a request gets no answer.
		request := "GET / HTTP/1.0\r\nConnection: " + connection + "\r\n\r\n"
		for _, part := range []string{request[:20], request[20:]} {
			if _, err := io.WriteString(c, part); err != nil {
				t.Fatal(err)
			}
		}
		r, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r.Body)
		if err != nil || len(b) != indexSize || r.Close != (connection == "close") {
			t.Errorf("%s: %d bytes, %v, close %t", connection, len(b), err, r.Close)
		}
	}
	if _, err := in.ReadByte(); err != io.EOF {
		t.Errorf("the connection goes on: %v", err)
	}
	for request, want := range map[string]int{
		"GET /none HTTP/1.1\r\n\r\n":                        404,
		"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello": 400,
		"GET / HTTP/3\r\n\r\n":                              400,
		"GET / HTTP/1.1\r\nX: " + strings.Repeat("x", 5000): 400,
	} {
		c, err := net.Dial("tcp", s.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		_, _ = io.WriteString(c, request)
		r, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || r.StatusCode != want {
			t.Errorf("%.40q: %v, %v, want %d", request, r, err, want)
		}
		c.Close()
	}
}

// TestNoResponse checks that invalid responses are rejected, and for which reason.
func TestNoResponse(t *testing.T) {
	for text, want := range map[string]string{
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n": "length",
		"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n":                     "length",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n":             "a response in \"chunked\"",
		"HTTP/1.1 200 OK\r\n\r\n":                                           "without a length",
		"HTTP/1.1 20 OK\r\nContent-Length: 5\r\n\r\n":                       "status",
		"HTTP/1.1 200 OK\r\nConnection: close\r\n and more\r\n\r\n":         "field",
		strings.Repeat("x", headLimit):                                      "4 KiB",
	} {
		if h, err := parseResponse([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60q: %+v, %v, want %q", text, h, err, want)
		}
	}
}

// FuzzResponse compares the parser with that of net/http: they agree on what both accept, and an incomplete head is never taken
// for a complete one.
func FuzzResponse(f *testing.F) {
	for _, seed := range []string{
		good, "HTTP/1.0 204 No\r\ncontent-length:0\r\nconnection: Keep-Alive\r\n\r\n", "HTTP/1.1 200\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 12\r\n\r\n",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := parseResponse(b)
		if err != nil || h.size == 0 {
			if h.size != 0 {
				t.Errorf("an error and a head too: %+v", h)
			}
			return
		}
		if h.size > len(b) || h.length < 0 || h.status < 100 || h.status > 999 {
			t.Fatalf("%+v of %q", h, b)
		}
		if part, err := parseResponse(b[:h.size-1]); err != nil || part.size != 0 {
			t.Errorf("without its end: %+v, %v", part, err)
		}
		r, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(b)), nil)
		if err != nil || r.StatusCode/100 == 1 || r.StatusCode == 204 || r.StatusCode == 304 { // which have no body, whatever they say
			return
		}
		if r.StatusCode != h.status || r.ContentLength != int64(h.length) || r.Close != h.last {
			t.Errorf("%q:\n%+v, but Go has status %d, length %d, close %t", b, h, r.StatusCode, r.ContentLength, r.Close)
		}
	})
}

// FuzzRequest does the same for requests.
func FuzzRequest(f *testing.F) {
	for _, seed := range []string{
		"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "GET /script.js HTTP/1.0\r\nConnection: Keep-Alive\r\nAccept-Encoding: br, gzip\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx", "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := parseRequest(b)
		if err != nil || h.size == 0 {
			if h.size != 0 {
				t.Errorf("an error and a head too: %+v", h)
			}
			return
		}
		if h.size > len(b) || len(h.target) == 0 {
			t.Fatalf("%+v of %q", h, b)
		}
		r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(b)))
		if err != nil {
			return
		}
		if r.Method != "GET" || r.RequestURI != string(h.target) || r.Close != h.last || r.ContentLength > 0 {
			t.Errorf("%q:\n%+v, but Go has %s %s, close %t, length %d", b, h, r.Method, r.RequestURI, r.Close, r.ContentLength)
		}
	})
}

// TestConnectionsBeforeRequests checks that a server refuses none of the connections of its client, which may open all of them
// before it requests anything.
func TestConnectionsBeforeRequests(t *testing.T) {
	n := min(4000, maxPending*runtime.NumCPU()+50)
	spec := Spec{Kind: HTTP, Size: 5, Connections: n, KeepAlive: true, EventLoop: true, Secret: newSecret()}
	s, err := Listen(spec, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	server := accept(t, s)
	defer server.Close()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	now := Now()
	go func() {
		_, err := server.Run(ctx, Window{now, now, now + int64(time.Hour)}, func(Progress) {})
		ended <- err
	}()
	defer func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("the server ended with %v", err)
		}
	}()
	conns := make([]net.Conn, n)
	for i := range conns {
		if conns[i], err = net.Dial("tcp", s.Addr().String()); err != nil {
			t.Fatal(err)
		}
		defer conns[i].Close()
	}
	testenv.Await(t, 10*time.Second, "all are accepted", func() bool {
		info, err := unix.GetsockoptTCPInfo(s.fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		return err == nil && info.Unacked == 0 // of a listener: the connections that wait
	})
	for _, c := range conns {
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		_, err := io.WriteString(c, "GET "+spec.Secret.Path()+"/ HTTP/1.1\r\n\r\n")
		if _, readErr := io.ReadFull(c, make([]byte, len("HTTP/1.1 200"))); err != nil || readErr != nil {
			t.Fatalf("no answer: %v", errors.Join(err, readErr))
		}
	}
	if refused := server.auth.refused.Load(); refused > 0 {
		t.Errorf("%d of the client's own connections were refused", refused)
	}
}

// TestNoTimeNoRate checks that the result of a thread whose window has no length can be recorded: one that is left without a request
// may end in the moment in which the window begins.
func TestNoTimeNoRate(t *testing.T) {
	e := &End{spec: Spec{Kind: HTTP}, listening: -1, conns: unconnected(2)}
	e.conns[0].from.at, e.conns[0].to.at = 100, 100
	e.conns[1].from.at, e.conns[1].to = 100, edge{at: 100 + 1e9, bytes: 1000, messages: 10}
	out, err := e.result()
	if err != nil || out.BitsPerSecond != 8000 {
		t.Errorf("%v bit/s, %v", out.BitsPerSecond, err)
	}
	if _, err := json.Marshal(out); err != nil {
		t.Error(err)
	}
}
