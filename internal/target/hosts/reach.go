package hosts

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"slipstream.dev/api/v1alpha1"
	"slipstream.dev/internal/target"
)

// reach has a message go each way that traffic is to go, there and back, as in a trial.
func (h *Hosts) reach(ctx context.Context) error {
	for _, w := range h.config.Ways {
		err := h.try(ctx, w, tryTime)
		if err != nil && ctx.Err() == nil {
			err = h.try(ctx, w, tryLong)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// The messages go for tryTime, as the end of a trial is at a time. One has to come back by then: where the way
// is long, or a host is busy, that takes up to tryLong.
const (
	tryTime = v1alpha1.Duration(20 * time.Millisecond)
	tryLong = v1alpha1.Duration(2 * time.Second)
)

func (h *Hosts) try(ctx context.Context, w Way, long v1alpha1.Duration) error {
	client, server := h.find(w.Client), h.find(w.Server)
	to := server.address(w.Address)
	if !to.IsValid() || to.Is4() != (w.IP == 4) {
		return nil // the trial says that there is no such address
	}
	t := target.Traffic{Place: server.name, Workload: v1alpha1.Workload{Name: "reach", PingPong: &v1alpha1.Traffic{
		Protocol: w.Protocol, IP: w.IP, Size: 64, Connections: 1, Warmup: tryTime, Duration: long, Tool: v1alpha1.ToolNative,
	}}}
	_, _ = rand.Read(t.Secret[:])
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ports, begin := make(chan uint16, 1), make(chan time.Time, 1)
	served := make(chan struct{})
	var serveErr error
	go func() {
		defer close(served)
		t := t
		t.Address = netip.AddrPortFrom(to, 0)
		_, serveErr = server.first.Serve(ctx, t, func(port uint16) (time.Time, error) {
			ports <- port
			select {
			case at := <-begin:
				return at, nil
			case <-ctx.Done():
				return time.Time{}, context.Cause(ctx)
			}
		})
		if serveErr != nil {
			cancel(fmt.Errorf("host %s cannot receive traffic at its address %s (path %s): %w", server.name, to, w.Address, serveErr))
		}
	}()
	select {
	case port := <-ports:
		t.Address = netip.AddrPortFrom(to, port)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	t.Place = client.name
	_, err := client.first.Drive(ctx, t, func(uint16) (time.Time, error) {
		at := time.Now().Add(h.lead)
		begin <- at
		return at, nil
	}, nil)
	if err == nil {
		<-served
		return serveErr
	}
	// The server's error is the reason where it came first; a client that was not let in is not one of its.
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	cancel(errors.New("the client has no connection"))
	<-served
	return fmt.Errorf("host %s cannot reach host %s at %s, %s port %d (path %s): %w. Is there a firewall between them? Let the ports of net.ipv4.ip_local_port_range (32768 to 60999) through it, by TCP and UDP",
		client.name, server.name, to, w.Protocol, t.Address.Port(), w.Address, err)
}
