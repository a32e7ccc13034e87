package agent

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"slipstream.dev/internal/testenv"
)

// metricsAt and healthAt are addresses on the loopback device of a test's own network namespace.
const metricsAt, healthAt = "127.0.0.1:9469", "127.0.0.1:9470"

// connectTo opens a connection on this thread, at the cost of a file descriptor only.
func connectTo(t testing.TB, port int) int {
	t.Helper()
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	must(t, unix.Connect(s, &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}))
	return s
}

// ask requests a path on this thread, which is in the test's network namespace; net/http may dial on another one.
func ask(t testing.TB, address, path string) (code int, took time.Duration) {
	t.Helper()
	began := time.Now()
	c, err := net.DialTimeout("tcp", address, 5*time.Second)
	must(t, err)
	defer c.Close()
	must(t, c.SetDeadline(began.Add(5*time.Second)))
	r, err := http.NewRequest("GET", "http://"+address+path, nil)
	must(t, err)
	must(t, r.Write(c))
	answer, err := http.ReadResponse(bufio.NewReader(c), r)
	must(t, err)
	defer answer.Body.Close()
	_, err = io.Copy(io.Discard, answer.Body)
	must(t, err)
	return answer.StatusCode, time.Since(began)
}

// TestServeIdleConnections opens 8,000 connections that send nothing.
func TestServeIdleConnections(t *testing.T) {
	const connections, most = 8000, 16.0 // MiB more
	var files unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &files))
	if files.Cur < connections+500 {
		files.Cur = min(files.Max, connections+500)
		must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &files))
	}
	p := newTestNode(t)
	must(t, netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 1}}))
	c := p.childWith(childOptions{Verify: time.Hour, Metrics: metricsAt, Health: healthAt})
	if !c.out.Scan() {
		t.Fatal("the agent ended")
	}
	for range 3 { // allocate the memory of a scrape beforehand
		if code, _ := ask(t, metricsAt, "/metrics"); code != http.StatusOK {
			t.Fatalf("a scrape: %d", code)
		}
	}
	_, before := c.usage(t)
	for range connections {
		s := connectTo(t, 9469)
		defer unix.Close(s)
	}
	for address, path := range map[string]string{metricsAt: "/metrics", healthAt: "/healthz"} {
		if code, took := ask(t, address, path); code != http.StatusOK || took > 2*time.Second {
			t.Errorf("%s beside %d idle connections: %d after %s", path, connections, code, took)
		}
	}
	_, after := c.usage(t)
	t.Logf("%d idle connections: %.1f MiB, were %.1f", connections, after, before)
	if !testenv.Race && after-before > most {
		t.Errorf("%d idle connections took %.1f MiB, want at most %.0f", connections, after-before, most)
	}
}

// serveTest serves a handler with this timeout and this many connections, and returns the address.
func serveTest(t *testing.T, h http.Handler, room int, patience time.Duration) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	server := newServer(h, timeouts{header: patience, write: patience, idle: patience})
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(&boundedListener{Listener: l, room: room}) }()
	t.Cleanup(func() {
		_ = server.Close()
		if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

func dial(t *testing.T, address string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", address)
	must(t, err)
	t.Cleanup(func() { c.Close() })
	must(t, c.SetDeadline(time.Now().Add(20*time.Second)))
	return c
}

var hello = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "hello") })

// TestServeSlowClients checks that the server closes the connections of clients that send a request a byte at a time, that send
// no second request, or that do not read the answer.
func TestServeSlowClients(t *testing.T) {
	t.Parallel()
	endless := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for block := make([]byte, 1<<16); ; {
			if _, err := w.Write(block); err != nil {
				return
			}
		}
	})
	mux := http.NewServeMux()
	mux.Handle("/hello", hello)
	mux.Handle("/endless", endless)
	at := serveTest(t, mux, 8, 300*time.Millisecond)
	for name, client := range map[string]func(c net.Conn) error{
		"loris": func(c net.Conn) error {
			if _, err := io.WriteString(c, "GET /hello HTTP/1.1\r\nHost: x\r\n"); err != nil {
				return err
			}
			for tick := time.NewTicker(10 * time.Millisecond); ; <-tick.C {
				if _, err := io.WriteString(c, "X-A: b\r\n"); err != nil {
					return err
				}
			}
		},
		"silent": func(c net.Conn) error { _, err := io.Copy(io.Discard, c); return cmpOr(err, io.EOF) },
		"idle": func(c net.Conn) error {
			if _, err := io.WriteString(c, "GET /hello HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
				return err
			}
			_, err := io.Copy(io.Discard, c)
			return cmpOr(err, io.EOF)
		},
		"deaf": func(c net.Conn) error {
			must(t, c.(*net.TCPConn).SetReadBuffer(4096))
			if _, err := io.WriteString(c, "GET /endless HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
				return err
			}
			for tick := time.NewTicker(10 * time.Millisecond); ; <-tick.C {
				if _, err := io.WriteString(c, "X"); err != nil {
					return err
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			began := time.Now()
			err := client(dial(t, at))
			if took := time.Since(began); errors.Is(err, os.ErrDeadlineExceeded) || took > 10*time.Second {
				t.Errorf("it was not cut after %s: %v", took, err)
			}
		})
	}
}

func cmpOr(err, other error) error {
	if err == nil {
		return other
	}
	return err
}

func TestServeLargeHeader(t *testing.T) {
	at := serveTest(t, hello, 8, time.Minute)
	for size, want := range map[int]int{headerBytes / 2: http.StatusOK, 2*headerBytes + 4096: http.StatusRequestHeaderFieldsTooLarge} {
		r, err := http.NewRequest("GET", "http://"+at, nil)
		must(t, err)
		r.Header.Set("X-Large", strings.Repeat("x", size))
		answer, err := http.DefaultTransport.(*http.Transport).Clone().RoundTrip(r)
		must(t, err)
		answer.Body.Close()
		if answer.StatusCode != want {
			t.Errorf("a header of %d bytes: %s, want %d", size, answer.Status, want)
		}
	}
}

// TestServeRoom checks that a new connection replaces the one that has waited longest for a request, and that it is refused at
// once if all others are being served.
func TestServeRoom(t *testing.T) {
	entered, leave := make(chan struct{}), make(chan struct{})
	at := serveTest(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		entered <- struct{}{}
		<-leave
	}), 2, time.Minute)
	enter := func(c net.Conn) {
		t.Helper()
		_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		must(t, err)
		select {
		case <-entered:
		case <-time.After(10 * time.Second):
			t.Fatal("the request is not being answered")
		}
	}
	closed := func(c net.Conn) bool {
		_, err := c.Read(make([]byte, 1))
		return err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
	}
	first := dial(t, at)
	enter(first)
	waits := dial(t, at)
	second := dial(t, at)
	if !closed(waits) {
		t.Error("the connection that waited is there still")
	}
	enter(second)
	if third := dial(t, at); !closed(third) {
		t.Error("a third connection is there while two are being answered")
	}
	close(leave)
	for i, c := range []net.Conn{first, second} {
		if answer, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || answer.StatusCode != http.StatusOK {
			t.Errorf("connection %d, which was being answered: %v, %v", i, answer, err)
		}
	}
}

// TestServeScrapesInALoop checks that scrapes in a loop do not make the agent gather all metrics
// each time.
func TestServeScrapesInALoop(t *testing.T) {
	p := newTestNode(t)
	a := p.start(p.options())
	h := a.Metrics()
	get := func() string {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		return w.Body.String()
	}
	counted := 0
	testenv.Retry(t, 5, func() error { // on a busy machine two scrapes may be too far apart
		first := get()
		a.metrics.errors.Inc()
		counted++
		if get() != first {
			return fmt.Errorf("a second scrape at once was worked out anew")
		}
		return nil
	})
	eventually(t, "one that is not at once", func() string {
		if !strings.Contains(get(), fmt.Sprintf("slipstream_errors_total %d\n", counted)) {
			return "not counted"
		}
		return ""
	})
}

// TestServeTLS checks that if tokens are reviewed, metrics are served only over TLS: with the given certificate, even after it
// is replaced, or with a self-signed one.
func TestServeTLS(t *testing.T) {
	p := newTestNode(t)
	must(t, netlink.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 1}}))
	a := p.start(p.options())
	dir := t.TempDir()
	o := ServeOptions{Metrics: metricsAt, CertFile: filepath.Join(dir, "tls.crt"), KeyFile: filepath.Join(dir, "tls.key")}
	failed := func(err error) { t.Error(err) }
	if _, err := a.Serve(o, failed); err == nil || !strings.Contains(err.Error(), "tls.crt") {
		t.Errorf("no certificate: %v, want which file", err)
	}
	if _, err := a.Serve(ServeOptions{Metrics: metricsAt, CertFile: o.CertFile}, failed); err == nil || !strings.Contains(err.Error(), "--tls-key") {
		t.Errorf("a certificate without a key: %v", err)
	}
	write := func() []byte {
		pair, err := selfSigned()
		must(t, err)
		key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
		must(t, err)
		must(t, os.WriteFile(o.CertFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}), 0o600))
		must(t, os.WriteFile(o.KeyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}), 0o600))
		return pair.Certificate[0]
	}
	offered := func() []byte {
		c, err := net.Dial("tcp", metricsAt)
		must(t, err)
		defer c.Close()
		s := tls.Client(c, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2", "http/1.1"}})
		must(t, s.Handshake())
		if got := s.ConnectionState().NegotiatedProtocol; got == "h2" {
			t.Error("HTTP/2 was agreed on")
		}
		return s.ConnectionState().PeerCertificates[0].Raw
	}
	first := write()
	servers, err := a.Serve(o, failed)
	must(t, err)
	if !bytes.Equal(offered(), first) {
		t.Error("another certificate than the one given")
	}
	if second := write(); !bytes.Equal(offered(), second) {
		t.Error("the certificate that was replaced is offered still")
	}
	servers.Close()

	var asked atomic.Value
	servers, err = a.Serve(ServeOptions{Metrics: metricsAt, Log: slog.New(slog.DiscardHandler), Authorize: func(_ context.Context, token string) (bool, error) {
		asked.Store(token)
		return token == "good", nil
	}}, failed)
	must(t, err)
	defer servers.Close()
	if code, _ := ask(t, metricsAt, "/metrics"); code != http.StatusBadRequest || asked.Load() != nil {
		t.Errorf("without TLS: %d, want %d", code, http.StatusBadRequest)
	}
	offered()
}

// TestAuthorized asks with tokens that are allowed, tokens that are not, and tokens that cannot be
// reviewed.
func TestAuthorized(t *testing.T) {
	h := authorized(hello, func(_ context.Context, token string) (bool, error) {
		switch token {
		case "busy":
			return false, fmt.Errorf("review: %w", ErrBusy)
		case "down":
			return false, errors.New("the cluster is down")
		}
		return token == "reader", nil
	}, slog.New(slog.DiscardHandler))
	for header, want := range map[string]int{
		"": http.StatusUnauthorized, "Basic cmVhZGVy": http.StatusUnauthorized, "Bearer ": http.StatusUnauthorized,
		"Bearer reader": http.StatusOK, "bearer reader": http.StatusOK, "Bearer other": http.StatusForbidden,
		"Bearer busy": http.StatusServiceUnavailable, "Bearer down": http.StatusServiceUnavailable,
	} {
		r := httptest.NewRequest("GET", "/metrics", nil)
		if header != "" {
			r.Header.Set("Authorization", header)
		}
		w := httptest.NewRecorder()
		if h.ServeHTTP(w, r); w.Code != want {
			t.Errorf("Authorization %q: %d, want %d", header, w.Code, want)
		}
	}
}
