package traffic

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"slipstream.dev/internal/process"
	"slipstream.dev/internal/record"
)

// The engine generates gRPC traffic like a program that uses grpc-go with its defaults, including Go's poller, goroutines and
// garbage collector. So it does not use an End, whose threads avoid all of these. Connections are not encrypted.

// grpcEcho is the method that returns its message.
const grpcEcho = "Echo"

// grpcService returns the name of the only service of a server, which contains the trial's secret.
func (s Spec) grpcService() string { return "slipstream.Echo" + hex.EncodeToString(s.Secret[:]) }

// congestion sets the congestion control of one of Go's sockets.
func (s Spec) congestion(_, _ string, c syscall.RawConn) (err error) {
	control := c.Control(func(fd uintptr) { err = setCongestionControl(int(fd), s) })
	return errors.Join(control, err)
}

// GRPCServer is the server of a pair.
type GRPCServer struct {
	spec     Spec
	listener *grpcListener
	server   *grpc.Server
	served   chan error
	calls    atomic.Uint64
}

// ListenGRPC listens on addr. If the port is 0, the kernel chooses one.
func ListenGRPC(ctx context.Context, spec Spec, addr netip.AddrPort) (*GRPCServer, error) {
	l, err := (&net.ListenConfig{Control: spec.congestion}).Listen(ctx, "tcp", addr.String())
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", addr, err)
	}
	s := &GRPCServer{
		spec: spec, server: grpc.NewServer(), served: make(chan error, 1),
		listener: &grpcListener{Listener: l, gone: make(chan struct{}, 1)},
	}
	s.server.RegisterService(&grpc.ServiceDesc{
		ServiceName: spec.grpcService(),
		HandlerType: (*any)(nil),
		Methods:     []grpc.MethodDesc{{MethodName: grpcEcho, Handler: s.echo}},
	}, s)
	go func() { s.served <- s.server.Serve(s.listener) }()
	return s, nil
}

//nolint:revive // the signature is grpc-go's
func (s *GRPCServer) echo(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	message := new(wrapperspb.BytesValue)
	if err := decode(message); err != nil {
		return nil, err
	}
	s.calls.Add(1)
	return message, nil
}

// Port returns the port at which it listens.
func (s *GRPCServer) Port() uint16 { return s.listener.Addr().(*net.TCPAddr).AddrPort().Port() }

// Run counts the calls within the window. It returns once the client has closed its connections after the window, but at most a
// second after the window.
func (s *GRPCServer) Run(ctx context.Context, w Window, progress func(Progress)) (record.Endpoint, error) {
	defer process.CollectingAsUsual()()
	defer every(time.Second, func() { progress(Progress{Messages: s.calls.Load()}) })()
	var calls [2]uint64
	var at [2]int64
	for i, edge := range []int64{w.From, w.To} {
		if err := SleepUntil(ctx, edge); err != nil {
			return record.Endpoint{}, fmt.Errorf("run grpc: %w", err)
		}
		at[i], calls[i] = Now(), s.calls.Load()
	}
	timer := time.NewTimer(linger)
	defer timer.Stop()
	for s.listener.open.Load() > 0 {
		select {
		case <-s.listener.gone:
			continue
		case <-ctx.Done():
		case <-timer.C:
		case err := <-s.served:
			s.served <- err
			return record.Endpoint{}, fmt.Errorf("run grpc: %w", err)
		}
		break
	}
	return s.spec.grpcResult(calls[1]-calls[0], at[1]-at[0]), nil
}

func (s Spec) grpcResult(calls uint64, window int64) record.Endpoint {
	return record.Endpoint{Messages: calls, Bytes: calls * uint64(s.Size), Seconds: float64(window) / 1e9}
}

// Close ends the server.
func (s *GRPCServer) Close() {
	s.server.Stop()
	s.served <- <-s.served // it was stopped deliberately
}

// grpcListener counts the open connections.
type grpcListener struct {
	net.Listener
	open atomic.Int64
	gone chan struct{} // receives a value after a connection was closed
}

func (l *grpcListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.open.Add(1)
	return &grpcConn{Conn: c, closed: sync.OnceFunc(func() {
		l.open.Add(-1)
		select {
		case l.gone <- struct{}{}:
		default:
		}
	})}, nil
}

type grpcConn struct {
	net.Conn
	closed func()
}

func (c *grpcConn) Close() error {
	defer c.closed()
	return c.Conn.Close()
}

// GRPCClient is the client of a pair. Each of its connections has Spec.Pipeline calls in progress.
type GRPCClient struct {
	spec  Spec
	conns []*grpcCaller
}

// grpcCaller is a connection, with the results of its calls.
type grpcCaller struct {
	*grpc.ClientConn
	mu    sync.Mutex
	hdr   *hdrhistogram.Histogram
	calls uint64 // in the window
	all   atomic.Uint64
}

// DialGRPC connects to a server, and makes one call on each connection.
func DialGRPC(ctx context.Context, spec Spec, to netip.AddrPort) (*GRPCClient, error) {
	g := &GRPCClient{spec: spec}
	dialer := &net.Dialer{Control: spec.congestion}
	for range spec.Connections {
		c, err := grpc.NewClient("passthrough:///"+to.String(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy(),
			grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) { return dialer.DialContext(ctx, "tcp", addr) }))
		if err == nil {
			caller := &grpcCaller{ClientConn: c, hdr: record.NewHistogram()}
			g.conns = append(g.conns, caller)
			err = caller.call(ctx, spec)
		}
		if err != nil {
			g.Close()
			return nil, fmt.Errorf("connect to %s: %w", to, err)
		}
	}
	return g, nil
}

// call makes a call, and waits for the answer.
func (c *grpcCaller) call(ctx context.Context, s Spec) error {
	answer := new(wrapperspb.BytesValue)
	err := c.Invoke(ctx, "/"+s.grpcService()+"/"+grpcEcho, wrapperspb.Bytes(make([]byte, s.Size)), answer)
	if err == nil && len(answer.GetValue()) != s.Size {
		return fmt.Errorf("an answer of %d bytes to a message of %d", len(answer.GetValue()), s.Size)
	}
	return err
}

// Port returns 0: a client has no port.
func (g *GRPCClient) Port() uint16 { return 0 }

// Run makes calls until the end of the window. It returns the error of a call that fails before that.
func (g *GRPCClient) Run(ctx context.Context, w Window, progress func(Progress)) (record.Endpoint, error) {
	defer process.CollectingAsUsual()()
	defer every(time.Second, func() {
		var p Progress
		for _, c := range g.conns {
			p.Messages += c.all.Load()
		}
		p.Bytes = p.Messages * uint64(g.spec.Size)
		progress(p)
	})()
	if err := SleepUntil(ctx, w.Start); err != nil {
		return record.Endpoint{}, fmt.Errorf("run grpc: %w", err)
	}
	r := &run{Window: w, clock: newClock()}
	// Wait for calls that are in progress at the end of the window, unless they stall.
	ctx, cancel := context.WithTimeout(ctx, time.Duration(w.To-r.now())+linger)
	defer cancel()
	var wg sync.WaitGroup
	errs := make([]error, len(g.conns)*g.spec.Pipeline)
	for i := range errs {
		wg.Go(func() {
			if errs[i] = g.conns[i%len(g.conns)].work(ctx, g.spec, r); errs[i] != nil {
				cancel()
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return record.Endpoint{}, fmt.Errorf("run grpc: %w", err)
	}
	hdr := record.NewHistogram()
	var calls uint64
	for _, c := range g.conns {
		hdr.Merge(c.hdr)
		calls += c.calls
	}
	out := g.spec.grpcResult(calls, w.To-w.From)
	var err error
	out.Latency, err = record.EncodeHistogram(hdr)
	return out, err
}

// work makes one call after another.
func (c *grpcCaller) work(ctx context.Context, s Spec, r *run) error {
	for sent := r.now(); sent < r.To; {
		err := c.call(ctx, s)
		now := r.now()
		if err != nil {
			if now < r.To {
				return err
			}
			return nil
		}
		c.all.Add(1)
		if now >= r.From && now < r.To {
			c.mu.Lock()
			c.calls++
			if sent >= r.From {
				_ = c.hdr.RecordValue(min(now-sent, c.hdr.HighestTrackableValue()))
			}
			c.mu.Unlock()
		}
		sent = now
	}
	return nil
}

// Close closes the connections.
func (g *GRPCClient) Close() {
	for _, c := range g.conns {
		c.ClientConn.Close()
	}
}

// every calls do at intervals, in another goroutine, until the returned function is called.
func every(interval time.Duration, do func()) (end func()) {
	tick, done := time.NewTicker(interval), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-tick.C:
				do()
			case <-done:
				return
			}
		}
	})
	return func() {
		tick.Stop()
		close(done)
		wg.Wait()
	}
}
