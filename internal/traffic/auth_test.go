package traffic

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"slipstream.dev/internal/record"
)

func newSecret() (s Secret) {
	_, _ = rand.Read(s[:])
	return s
}

// disturb connects to a server from outside the trial until the test ends. Some clients send nothing and stay, some send
// something else, and some send nearly the secret.
func disturb(t *testing.T, spec Spec, to netip.AddrPort) (began chan struct{}) {
	began = make(chan struct{})
	// From another address than the client's, as another pod would.
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	if spec.UDP {
		dialer.LocalAddr = nil
	}
	ended := make(chan struct{})
	network := "tcp"
	if spec.UDP {
		network = "udp"
	}
	nearly := slices.Clone(spec.Secret[:])
	nearly[len(nearly)-1]++
	messages := [][]byte{nil, []byte("GET / HTTP/1.1\r\nHost: a\r\n\r\n"), nearly, make([]byte, len(Secret{}))}
	if spec.UDP {
		messages = [][]byte{[]byte("slipstream hello"), append([]byte("slipstream hello"), nearly...), []byte("x")}
	}
	if spec.Kind == HTTP {
		path := spec.Secret.Path()
		messages = append(messages, fmt.Appendf(nil, "GET %s/ HTTP/1.1\r\nHost: a\r\n\r\n", path[:len(path)-1]+"x"))
	}
	begin := sync.OnceFunc(func() { close(began) })
	go func() {
		defer close(ended)
		defer begin()
		var open []net.Conn
		defer func() {
			for _, c := range open {
				_ = c.Close()
			}
		}()
		for i := 0; t.Context().Err() == nil && i < 3000; i++ {
			c, err := dialer.Dial(network, to.String())
			if err != nil {
				break // the server is gone
			}
			_, _ = c.Write(messages[i%len(messages)])
			if open = append(open, c); len(open) > 500 {
				_ = open[0].Close()
				open = open[1:]
			}
			if i == 20 {
				begin()
			}
			time.Sleep(time.Millisecond)
		}
	}()
	t.Cleanup(func() { <-ended })
	return began
}

// TestOthersRefused checks that a server serves only the client of its trial, whoever connects first and however many do, and
// that the result says that there were others.
func TestOthersRefused(t *testing.T) {
	for _, spec := range []Spec{
		{Kind: Stream, Size: 1 << 14, Connections: 2},
		{Kind: Stream, Size: 1200, Connections: 2, UDP: true},
		{Kind: PingPong, Size: 64, Connections: 1},
		{Kind: PingPong, Size: 64, Connections: 1, UDP: true},
		{Kind: UnderLoad, Size: 64, Connections: 1, Rate: 1000},
		{Kind: PingPong, Size: 64, Connections: 2, EventLoop: true},
		{Kind: PingPong, Size: 64, Connections: 2, UDP: true, EventLoop: true},
		{Kind: Stream, Size: 1200, Connections: 2, UDP: true, EventLoop: true},
		{Kind: Connect, Size: 1, Connections: 2},
		{Kind: Connect, Size: 64, Connections: 1},
		{Kind: HTTP, Size: 1000, Connections: 2},
		{Kind: HTTP, Size: 1000, Connections: 2, KeepAlive: true},
		{Kind: HTTP, Size: 1000, Connections: 2, EventLoop: true},
		{Kind: HTTP, Size: 1000, Connections: 2, KeepAlive: true, EventLoop: true},
		{Kind: HTTP, Size: 1000, Connections: 1, Rate: 20, Page: true, EventLoop: true},
	} {
		t.Run(fmt.Sprintf("%s/udp=%t/%d/%t/loop=%t", spec.Kind, spec.UDP, spec.Size, spec.Page || spec.KeepAlive, spec.EventLoop), func(t *testing.T) {
			spec.Secret = newSecret()
			spec.Secret[0] |= 1 // not zero, with which others begin, too
			server, err := Listen(spec, netip.MustParseAddrPort("127.0.0.1:0"))
			if err != nil {
				t.Fatal(err)
			}
			<-disturb(t, spec, server.Addr())
			client, accepted := join(t, spec, server, server.Addr())
			defer client.Close()
			defer accepted.Close()
			start := time.Now()
			sent, got, err := runPair(t.Context(), client, accepted, 300*time.Millisecond)
			if err != nil {
				t.Fatal(err)
			}
			if took := time.Since(start); took > 3*time.Second {
				t.Errorf("others kept the server for %s", took)
			}
			i := slices.IndexFunc(got.Warnings, func(w record.Warning) bool { return w.Code == record.WarnUnexpected })
			if i < 0 || !strings.Contains(got.Warnings[i].Message, "refused them") {
				t.Errorf("warnings %v", got.Warnings)
			}
			if sent.Messages == 0 || len(sent.Errors) > 0 {
				t.Errorf("the client's: %d messages, %d lost, errors %v", sent.Messages, sent.Lost, sent.Errors)
			}
			switch {
			case spec.Kind == Connect:
				if got.Messages > sent.Messages+sent.Messages/100+10 { // the edges differ
					t.Errorf("the server answered %d, the client asked %d", got.Messages, sent.Messages)
				}
			case spec.Kind == Stream && spec.UDP && got.Messages > sent.Messages+100: // the edges differ
				t.Errorf("%d of %d datagrams arrived", got.Messages, sent.Messages)
			}
		})
	}
}

// TestOthersAtClientsAddress checks clients with the address of the trial's client, as behind NAT: one that sends nothing
// delays nobody for long, and one that sends something else gets no answer.
func TestOthersAtClientsAddress(t *testing.T) {
	spec := Spec{Kind: Connect, Size: 64, Connections: 1, Secret: newSecret()}
	server, err := Listen(spec, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	client, accepted := join(t, spec, server, server.Addr())
	defer client.Close()
	defer accepted.Close()
	answered := make(chan error, 1)
	go func() {
		for !(*server.auth.trusted.Load())[netip.MustParseAddr("127.0.0.1")] && t.Context().Err() == nil {
			time.Sleep(time.Millisecond)
		}
		for i := range 4 {
			c, err := net.Dial("tcp", server.Addr().String())
			if err != nil {
				answered <- err
				return
			}
			defer c.Close()
			if i == 3 {
				_, _ = c.Write(make([]byte, 64))
				_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
				n, err := c.Read(make([]byte, 64))
				if n > 0 {
					err = fmt.Errorf("%d bytes", n)
				}
				answered <- err
			}
		}
	}()
	sent, got, err := runPair(t.Context(), client, accepted, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if sent.Messages < 1000 {
		t.Errorf("%d messages, %d lost", sent.Messages, sent.Lost)
	}
	if err := <-answered; err == nil || strings.Contains(err.Error(), "bytes") || strings.Contains(err.Error(), "timeout") {
		t.Errorf("one that does not send the secret gets %v", err)
	}
	if len(got.Warnings) != 1 {
		t.Errorf("warnings %v", got.Warnings)
	}
}

// TestLastConnectionBehindOthers checks that a server of connect whose window has ended still serves an earlier connection of
// its client, although others are ahead of it in the queue.
func TestLastConnectionBehindOthers(t *testing.T) {
	spec := Spec{Kind: Connect, Size: 64, Connections: 1, Secret: newSecret()}
	fd, at, err := listenSocket(spec, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	defer closeSocket(fd)
	var conns []net.Conn
	for range 5 { // the last is the client's
		c, err := net.Dial("tcp", at.String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	client := conns[len(conns)-1]
	if _, err := client.Write(spec.message()); err != nil {
		t.Fatal(err)
	}
	r := &run{clock: newClock()}
	r.Window = Window{From: r.now(), To: r.now()}
	if err := spec.answer(fd, newAuthenticator(spec.Secret[:], spec.Size, true), &conn{fd: fd}, r); err != nil {
		t.Fatal(err)
	}
	_ = client.SetReadDeadline(time.Now().Add(5 * time.Second))
	if got, err := io.ReadAll(client); !bytes.Equal(got, spec.message()) {
		t.Errorf("the client's connection was answered with %d bytes: %v", len(got), err)
	}
}

// TestNoOthersNoWarning checks that there is no warning without other clients.
func TestNoOthersNoWarning(t *testing.T) {
	for _, spec := range []Spec{
		{Kind: Stream, Size: 1200, Connections: 2}, {Kind: Stream, Size: 1200, Connections: 2, UDP: true}, {Kind: Connect, Size: 64, Connections: 2},
		{Kind: HTTP, Size: 1000, Connections: 2}, {Kind: HTTP, Size: 1000, Connections: 2, Rate: 20, Page: true, EventLoop: true},
	} {
		spec.Secret = newSecret()
		_, server, err := pair(t, t.Context(), spec, "127.0.0.1", 100*time.Millisecond)
		if err != nil || len(server.Warnings) > 0 {
			t.Errorf("%s: %v, %v", spec.Kind, server.Warnings, err)
		}
	}
}

// TestPendingIsBounded checks that at most maxPending connections that send nothing stay pending, for at most authTimeout.
func TestPendingIsBounded(t *testing.T) {
	spec := Spec{Kind: PingPong, Size: 64, Connections: 1, Secret: newSecret()}
	fd, at, err := listenSocket(spec, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	defer closeSocket(fd)
	a := &acceptor{authenticator: newAuthenticator(spec.Secret[:], len(spec.Secret), false)}
	defer a.close()
	var first net.Conn
	for i := range maxPending + 50 {
		c, err := net.Dial("tcp", at.String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if i == 0 {
			first = c
		}
		if got, err := a.accept(fd); got >= 0 {
			t.Fatalf("a silent one was accepted: %v", err)
		}
	}
	if n, refused := len(a.pending), a.refused.Load(); n != maxPending || refused != 50 {
		t.Errorf("%d are pending and %d were refused, want %d and 50", n, refused, maxPending)
	}
	_ = first.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := first.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the first is still there: %v", err)
	}
	a.expire(time.Now().Add(authTimeout + time.Second))
	if len(a.pending) != 0 {
		t.Errorf("%d are pending for ever", len(a.pending))
	}
	// A client that sends its secret in two parts is accepted too, and its message arrives whole.
	c, err := net.Dial("tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got, _ := a.accept(fd); got >= 0 {
		t.Fatal("accepted before it sent anything")
	}
	for _, part := range [][]byte{spec.Secret[:5], spec.Secret[5:]} {
		if _, err := c.Write(part); err != nil {
			t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(5 * time.Second); ; {
		got, err := a.accept(fd)
		if got >= 0 {
			defer closeSocket(got)
			sent := make([]byte, 32)
			if n, err := receive(got, sent); err != nil || !bytes.Equal(sent[:n], spec.Secret[:]) {
				t.Errorf("read %x, %v", sent[:n], err)
			}
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}
