//go:build linux || windows

package worker

import (
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// TestAwaitPort checks that a server with a given port waits until the last one has left it, but not forever.
func TestAwaitPort(t *testing.T) {
	t.Parallel()
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	at := l.Addr().(*net.TCPAddr).AddrPort()
	err = awaitPort(t.Context(), at, 3*acceptEvery)
	if err == nil || !strings.Contains(err.Error(), "another program listens there") {
		t.Errorf("error %v while another socket listens", err)
	}
	free := make(chan error)
	go func() { free <- awaitPort(t.Context(), at, time.Minute) }()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-free; err != nil {
		t.Errorf("after the socket was closed: %v", err)
	}
}
