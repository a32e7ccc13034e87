//go:build linux || windows

// Package worker runs in a place. For the controller at the other end of its stream, it sends and receives traffic, samples
// counters, and applies and reverts accelerators. The package has both ends of that protocol: Serve for the place, and Client
// for the controller. It knows neither experiments nor how it was started in the place (see internal/place).
package worker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/process"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/traffic"
	"slipstream.dev/internal/worker/pb"
)

// Options configures a worker.
type Options struct {
	// JournalDir is the directory of the journal for accelerators.
	JournalDir string
	// Log receives the problems that no call returns. It may be nil.
	Log *slog.Logger
	// Remote means that the controller is on another machine. A worker that hears nothing from it ends, as at the end of its
	// stream.
	Remote bool

	patience time.Duration // for other tools; toolPatience if 0. Tests set it
	cgroups  string        // mount point of cgroups; collect.HostCgroups if empty. Tests set it
}

// Serve serves the controller over r and w until the stream ends. Then it ends the traffic, reverts what it has applied, and
// returns.
func Serve(ctx context.Context, r io.ReadCloser, w io.WriteCloser, o Options) error {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.patience = cmp.Or(o.patience, toolPatience)
	p := newPipe(r, w)
	s := &server{options: o, system: newSystem(ctx)}
	// Stop waits for calls in progress, so that an Apply is complete before it is reverted.
	options := []grpc.ServerOption{grpc.WaitForHandlers(true), grpc.ChainStreamInterceptor(shrinkFirst, markStream), grpc.UnaryInterceptor(markCall), grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{
		MinTime: keepaliveTime / 2, PermitWithoutStream: true,
	})}
	if o.Remote { // the controller pings twice as often, so this end pings only a dead one
		options = append(options, grpc.KeepaliveParams(keepalive.ServerParameters{Time: 2 * keepaliveTime, Timeout: keepaliveLimit}))
	}
	g := grpc.NewServer(options...)
	pb.RegisterWorkerServer(g, s)
	registerDoctor(g)
	defer context.AfterFunc(ctx, func() { p.Close() })()
	// A closed stream closes the connection, which closes the listener, which ends g.Serve. It also cancels the contexts of
	// calls in progress.
	err := g.Serve(listenOne(p))
	g.Stop()
	if ctx.Err() == nil && p.closed() {
		err = nil
	}
	return errors.Join(err, s.revert(context.WithoutCancel(ctx)))
}

// shrinkFirst releases unused memory before each part of a trial, so that the process holds little more than it uses.
func shrinkFirst(s any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if err := process.Rest(); err != nil {
		return err
	}
	return handle(s, stream)
}

// markCall and markStream set codes for the errors that the controller distinguishes.
func markCall(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	answer, err := handle(ctx, request)
	return answer, mark(err)
}

func markStream(s any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	return mark(handle(s, stream))
}

func mark(err error) error {
	if place.NoSpace(err) {
		return status.Error(noSpace, err.Error())
	}
	if _, ok := errors.AsType[record.StalledError](err); ok {
		return status.Error(stalled, err.Error())
	}
	return err
}

type server struct {
	pb.UnimplementedWorkerServer
	options Options
	// system holds the state of what only some operating systems support.
	system
}

func (s *server) Now(context.Context, *pb.NowRequest) (*pb.NowResponse, error) {
	return &pb.NowResponse{MonotonicNs: traffic.Now()}, nil
}

// end is one end of a pair, of the traffic engine or another tool.
type end interface {
	// Port at which a server listens.
	Port() uint16
	Run(context.Context, traffic.Window, func(traffic.Progress)) (record.Endpoint, error)
	Close()
}

func (s *server) Serve(stream pb.Worker_ServeServer) error {
	return s.runEnd(stream, func(ctx context.Context, w spec.Workload, t *pb.Traffic) (end, error) {
		at, err := addrPort(t)
		if err != nil {
			return nil, err
		}
		var grace time.Duration
		switch w.Traffic().Tool {
		case spec.ToolNative:
		case spec.ToolGRPC:
			return opened(traffic.ListenGRPC(ctx, engineSpec(w, t), at))
		default:
			if tool, err := lookupTool(w); err != nil {
				return nil, err
			} else if argv := tool.ServerArgv(w, at.Addr(), at.Port()); argv != nil {
				return serveTool(ctx, tool, w, at, s.options.patience)
			}
			// The tool has no server: the traffic engine's server answers as long as its client runs.
			grace = s.options.patience
		}
		server, err := listen(ctx, engineSpec(w, t), at)
		if err != nil {
			return nil, err
		}
		return &nativeServer{Server: server, grace: grace}, nil
	})
}

// releaseTime limits how long a server waits for its ports.
const releaseTime = 5 * time.Second

// listen opens the engine's server. It waits for the server of the previous trial if that has the same ports: it may still be
// closing thousands of sockets, because nobody waits for a server to end.
func listen(ctx context.Context, s traffic.Spec, at netip.AddrPort) (*traffic.Server, error) {
	for deadline := time.Now().Add(releaseTime); ; {
		server, err := traffic.Listen(s, at)
		if !errors.Is(err, syscall.EADDRINUSE) || !time.Now().Before(deadline) {
			return server, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(20 * time.Millisecond): // there is no notification when a port becomes free
		}
	}
}

func (s *server) Drive(stream pb.Worker_DriveServer) error {
	return s.runEnd(stream, func(ctx context.Context, w spec.Workload, t *pb.Traffic) (end, error) {
		to, err := addrPort(t)
		if err != nil {
			return nil, err
		}
		switch w.Traffic().Tool {
		case spec.ToolNative:
		case spec.ToolGRPC:
			return opened(traffic.DialGRPC(ctx, engineSpec(w, t), to))
		default:
			return driveTool(w, to, t.GetCongestionControl(), secretOf(t).Path(), s.options.patience)
		}
		client, err := traffic.Dial(ctx, engineSpec(w, t), to)
		if err != nil {
			return nil, err
		}
		return nativeClient{client}, nil
	})
}

// opened returns e as an end, or nil with an error: a plain conversion would return an interface that holds nil.
func opened[E end](e E, err error) (end, error) {
	if err != nil {
		return nil, err
	}
	return e, nil
}

func engineSpec(w spec.Workload, c *pb.Traffic) traffic.Spec {
	t := w.Traffic()
	return traffic.Spec{
		Kind: w.Kind(), UDP: t.Protocol == "udp", Size: int(t.Size),
		Connections: t.Connections, Rate: t.Rate, Busy: t.Busy, CongestionControl: c.GetCongestionControl(), Secret: secretOf(c),
		EventLoop: t.IO == spec.IOEpoll || t.Page, Ports: int(c.GetPorts()), KeepAlive: t.KeepAlive, Requests: t.Requests, Iterations: t.Iterations, Page: t.Page, Image: int(t.Image), Pipeline: t.Pipeline,
	}
}

func secretOf(t *pb.Traffic) (s traffic.Secret) {
	copy(s[:], t.GetSecret())
	return s
}

type nativeClient struct{ *traffic.End }

func (nativeClient) Port() uint16 { return 0 }

// nativeServer is the engine's server. Run accepts its connections, because they exist once the client is ready.
type nativeServer struct {
	*traffic.Server
	// grace is the time for which it serves after its window.
	grace    time.Duration
	accepted bool // Accept must be called exactly once
	end      *traffic.End
}

func (n *nativeServer) Port() uint16 { return n.Addr().Port() }

func (n *nativeServer) Run(ctx context.Context, w traffic.Window, progress func(traffic.Progress)) (record.Endpoint, error) {
	n.accepted = true
	var err error
	if n.end, err = n.Accept(ctx); err != nil {
		return record.Endpoint{}, err
	}
	w.To += int64(n.grace)
	return n.end.Run(ctx, w, progress)
}

func (n *nativeServer) Close() {
	if !n.accepted { // only Accept closes the listener, or returns an end that does
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		n.end, _ = n.Accept(ctx)
	}
	if n.end != nil {
		n.end.Close()
	}
}

// runEnd runs either end of a pair.
func (s *server) runEnd(stream pb.Worker_DriveServer, open func(context.Context, spec.Workload, *pb.Traffic) (end, error)) error {
	ctx := stream.Context()
	command, err := stream.Recv()
	if err != nil {
		return err
	}
	asked := command.GetTraffic()
	var workload spec.Workload
	if err := json.Unmarshal(asked.GetWorkload(), &workload); err != nil {
		return fmt.Errorf("decode workload: %w", err)
	}
	e, err := open(ctx, workload, asked)
	if err != nil {
		return err
	}
	defer e.Close()
	if err := stream.Send(&pb.TrafficEvent{Event: &pb.TrafficEvent_Ready{Ready: &pb.Ready{Port: uint32(e.Port())}}}); err != nil {
		return err
	}
	if command, err = stream.Recv(); err != nil {
		return err
	}
	window := windowOf(command.GetWindow())
	throttled, err := s.throttling(ctx, window)
	if err != nil {
		return err
	}
	result, err := e.Run(ctx, window, func(p traffic.Progress) {
		// A closed stream ends ctx, and so the run.
		_ = stream.Send(&pb.TrafficEvent{Event: &pb.TrafficEvent_Progress{Progress: &pb.Progress{
			Bytes: p.Bytes, Messages: p.Messages, CongestionControl: p.CongestionControl, Command: p.Command,
		}}})
	})
	if err != nil {
		return err
	}
	result.Place = asked.GetPlace()
	for _, w := range throttled() {
		w.Message = result.Place + ": " + w.Message
		result.Warnings = append(result.Warnings, w)
	}
	b, err := encode("result", result)
	if err != nil {
		return err
	}
	return stream.Send(&pb.TrafficEvent{Event: &pb.TrafficEvent_Result{Result: &pb.Result{Endpoint: b}}})
}

func windowOf(w *pb.Window) traffic.Window {
	return traffic.Window{Start: w.GetStartNs(), From: w.GetFromNs(), To: w.GetToNs()}
}
