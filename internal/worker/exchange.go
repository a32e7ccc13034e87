package worker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/spec"
)

// ErrServe means that the server's place cannot receive traffic.
var ErrServe = errors.New("no traffic can be received there")

// Exchange first tries for exchangeTime. If no message comes back, because the route is long or a machine is busy, it tries
// once more, for exchangeLong.
const (
	exchangeTime = spec.Duration(20 * time.Millisecond)
	exchangeLong = spec.Duration(2 * time.Second)
)

// Exchange sends messages from one place to an address of another and back, as a trial does, and returns the server's port.
// With port 0 the server chooses one. lead is the time in which the start time of traffic reaches the workers.
func Exchange(ctx context.Context, client, server *Client, to netip.AddrPort, by place.Transport, lead time.Duration) (uint16, error) {
	port, connected, err := exchange(ctx, client, server, to, by, lead, exchangeTime)
	if err != nil && connected && ctx.Err() == nil {
		port, _, err = exchange(ctx, client, server, to, by, lead, exchangeLong)
	}
	return port, err
}

// exchange is one try of Exchange, which sends messages for the duration long. connected reports whether the client could
// connect.
func exchange(ctx context.Context, client, server *Client, to netip.AddrPort, by place.Transport, lead time.Duration, long spec.Duration) (port uint16, connected bool, err error) {
	t := place.Traffic{Place: "server", Workload: spec.Workload{Name: "reach", PingPong: &spec.Traffic{
		Protocol: by.Protocol, IP: by.IP, Size: 64, Connections: 1, Warmup: exchangeTime, Duration: long, Tool: spec.ToolNative,
	}}}
	_, _ = rand.Read(t.Secret[:])
	ctx, late := context.WithTimeoutCause(ctx, answerTime, errLate)
	defer late()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ports, begin := make(chan uint16, 1), make(chan time.Time, 1)
	served := make(chan struct{})
	var serveErr error
	go func() {
		defer close(served)
		t := t
		t.Address = to
		_, serveErr = server.Serve(ctx, t, func(port uint16) (time.Time, error) {
			ports <- port
			select {
			case at := <-begin:
				return at, nil
			case <-ctx.Done():
				return time.Time{}, context.Cause(ctx)
			}
		})
		if serveErr != nil {
			serveErr = fmt.Errorf("%w: %w", ErrServe, serveErr)
			cancel(serveErr)
		}
	}()
	select {
	case port = <-ports:
		t.Address = netip.AddrPortFrom(to.Addr(), port)
	case <-ctx.Done():
		return 0, false, context.Cause(ctx)
	}
	t.Place = "client"
	_, err = client.Drive(ctx, t, func(uint16) (time.Time, error) {
		connected = true
		at := time.Now().Add(lead)
		begin <- at
		return at, nil
	}, nil)
	if err == nil {
		<-served
		return port, connected, serveErr
	}
	// If the server failed first, its error is the cause: a server does not fail because a client is refused.
	if cause := context.Cause(ctx); cause != nil {
		return port, connected, cause
	}
	cancel(errors.New("the client has no connection"))
	<-served
	return port, connected, err
}
