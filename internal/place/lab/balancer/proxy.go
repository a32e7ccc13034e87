//go:build linux

package balancer

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// backendTimeout limits how long a backend may take to accept a connection, as in HAProxy's configuration.
const backendTimeout = 5 * time.Second

// Run is the built-in proxy, which a lab starts as a process of its own. It balances connections round robin until ctx ends. It
// inherits its configuration as an open file.
func Run(ctx context.Context) error {
	text, err := os.ReadFile(proxyConfig)
	var fronts []front
	if err == nil {
		err = json.Unmarshal(text, &fronts)
	}
	if err != nil {
		return fmt.Errorf("read the balancer's configuration (only a lab starts this command): %w", err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	for _, f := range fronts {
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(f.Listen))
		if err != nil {
			return fmt.Errorf("balance %s: %w", f.Name, err)
		}
		defer context.AfterFunc(ctx, func() { l.Close() })()
		defer l.Close()
		wg.Go(func() {
			if err := f.serve(ctx, l); err != nil && ctx.Err() == nil {
				cancel(fmt.Errorf("balance %s: %w", f.Name, err))
			}
		})
	}
	<-ctx.Done()
	if err := context.Cause(ctx); err != ctx.Err() {
		return err
	}
	return nil
}

// serve accepts connections and forwards each to the next backend.
func (f front) serve(ctx context.Context, l *net.TCPListener) error {
	var turn atomic.Uint64
	for {
		client, err := l.AcceptTCP()
		if err != nil {
			return err
		}
		to := f.Backends[(turn.Add(1)-1)%uint64(len(f.Backends))]
		go forward(ctx, client, to)
	}
}

// forward copies the bytes of a connection in both directions. The kernel moves them between the sockets (splice, see
// net.TCPConn.ReadFrom). If one side is reset, forward resets the other: a client must not mistake a reset for the end of the
// data.
func forward(ctx context.Context, client *net.TCPConn, to netip.AddrPort) {
	defer client.Close()
	d := net.Dialer{Timeout: backendTimeout}
	c, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		_ = client.SetLinger(0)
		return
	}
	backend := c.(*net.TCPConn)
	defer backend.Close()
	var wg sync.WaitGroup
	carry := func(to, from *net.TCPConn) {
		if _, err := io.Copy(to, from); err == nil {
			err = to.CloseWrite()
			if err == nil {
				return
			}
		}
		_ = to.SetLinger(0)
		_ = from.SetLinger(0)
		to.Close()
		from.Close()
	}
	wg.Go(func() { carry(backend, client) })
	carry(client, backend)
	wg.Wait()
}
