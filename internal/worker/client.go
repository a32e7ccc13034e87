package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"reflect"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/worker/pb"
)

// Client is the controller's end of the stream to a worker.
type Client struct {
	pipe   *pipe
	conn   *grpc.ClientConn
	rpc    pb.WorkerClient
	doctor pb.DoctorClient
	// reap waits for the worker's process to exit.
	reap func() error
	// why returns why a stream ended too early, or nil if that is unknown.
	why func() error
	// far means that the worker may be on another machine, whose clock drifts against this one.
	far bool
	// place is where Apply last applied accelerators.
	place string

	mu sync.Mutex
	// base and mono are the same instant on this process's clock and on the worker's CLOCK_MONOTONIC.
	base time.Time
	mono int64
	// within is the maximum error of this pair.
	within time.Duration
}

// Stream is a connection to a worker that is not a child of this process.
type Stream interface {
	io.ReadWriteCloser
	// Wait waits for the worker to exit, after Close.
	Wait() error
	// Why says why the stream ended too early.
	Why() error
}

// gRPC pings a remote worker that is silent for keepaliveTime, and takes it for dead if it does not answer within
// keepaliveLimit: nothing else shows that a machine is dead.
const (
	keepaliveTime  = 15 * time.Second
	keepaliveLimit = 10 * time.Second
)

// Attach connects to a remote worker.
func Attach(ctx context.Context, s Stream) (*Client, error) {
	c := &Client{reap: s.Wait, why: s.Why, far: true}
	err := c.connect(ctx, s, s, grpc.WithKeepaliveParams(keepalive.ClientParameters{
		Time: keepaliveTime, Timeout: keepaliveLimit, PermitWithoutStream: true,
	}))
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Connect connects to a worker over the two directions of a stream. Closing the client closes the stream.
func Connect(ctx context.Context, r io.ReadCloser, w io.WriteCloser) (*Client, error) {
	c := new(Client)
	if err := c.connect(ctx, r, w); err != nil {
		return nil, err
	}
	return c, nil
}

// connect connects over a stream. If it fails, it closes the client.
func (c *Client) connect(ctx context.Context, r io.ReadCloser, w io.WriteCloser, options ...grpc.DialOption) (err error) {
	c.pipe = newPipe(r, w)
	c.conn, err = grpc.NewClient("passthrough:stdio", append(options,
		grpc.WithContextDialer(dialOnce(c.pipe)),
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the stream is the security
		grpc.WithIdleTimeout(0),
	)...)
	if err != nil {
		return errors.Join(fmt.Errorf("connect to worker: %w", err), c.pipe.Close())
	}
	c.rpc, c.doctor = pb.NewWorkerClient(c.conn), pb.NewDoctorClient(c.conn)
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	if err := c.setClock(ctx); err != nil {
		return errors.Join(fmt.Errorf("connect to worker: %w", err), c.Close())
	}
	return nil
}

// clockProbes is how many times the client asks the worker for its time. The quickest answer is the most exact, because the
// error is at most half of the round trip. A remote worker is asked up to farProbes times, until an answer is as exact as
// clockWithin.
const (
	clockProbes = 5
	farProbes   = 20
	clockWithin = 500 * time.Microsecond
)

func (c *Client) setClock(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	probes := clockProbes
	if c.far {
		probes = farProbes
	}
	for i := range probes {
		if i >= clockProbes && c.uncertainty() < clockWithin {
			break
		}
		before := time.Now()
		answer, err := c.rpc.Now(ctx, &pb.NowRequest{})
		if err != nil {
			return c.plain(err)
		}
		if took := time.Since(before); c.base.IsZero() || took/2 < c.uncertainty() {
			c.base, c.mono, c.within = before.Add(took/2), answer.GetMonotonicNs(), took/2
		}
	}
	return nil
}

// uncertainty returns the maximum error of the worker's time. The clocks of two machines drift by up to 50 µs per second each.
func (c *Client) uncertainty() time.Duration {
	if !c.far {
		return c.within
	}
	return c.within + time.Since(c.base)/10_000
}

// keepClock measures a remote clock again if it may have drifted too far.
func (c *Client) keepClock(ctx context.Context) error {
	c.mu.Lock()
	old := c.far && c.uncertainty() > 2*clockWithin
	c.mu.Unlock()
	if !old {
		return nil
	}
	return c.setClock(ctx)
}

// window converts the window of traffic that starts at start to the worker's clock.
func (c *Client) window(start time.Time, warmup, duration time.Duration) *pb.Window {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.mono + int64(start.Sub(c.base))
	return &pb.Window{StartNs: at, FromNs: at + int64(warmup), ToNs: at + int64(warmup+duration)}
}

// answerTime limits how long a worker may take to answer. Describe runs every tool for its version in that time.
const answerTime = time.Minute

// Alive returns nil if the worker answers.
func (c *Client) Alive(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	_, err := c.rpc.Now(ctx, &pb.NowRequest{})
	if err != nil {
		return c.plain(err)
	}
	return nil
}

// Gone reports whether the worker has closed its end of the stream, as it does when it exits.
func (c *Client) Gone() bool { return c.pipe.closed() }

// Close ends the stream; the worker then ends its traffic, reverts what it
// applied, and exits.
func (c *Client) Close() error {
	err := errors.Join(c.conn.Close(), c.pipe.Close())
	if c.reap != nil {
		err = errors.Join(err, c.reap())
	}
	return err
}

// Describe returns the facts about the place.
func (c *Client) Describe(ctx context.Context, place place.Place) (record.Node, error) {
	var node record.Node
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	answer, err := c.rpc.Describe(ctx, &pb.DescribeRequest{Place: pbPlace(place)})
	if err != nil {
		return node, c.plain(err)
	}
	err = decode(answer.GetNode(), &node)
	node.Name = place.Name
	return node, err
}

// Serve receives a workload's traffic. Another tool's server runs until ctx ends, so Serve returns its endpoint
// together with an error.
func (c *Client) Serve(ctx context.Context, t place.Traffic, ready place.Ready) (record.Endpoint, error) {
	return c.traffic(ctx, c.rpc.Serve, t, ready, nil)
}

// Drive sends a workload's traffic, and reports once a second what it has moved since the start.
func (c *Client) Drive(ctx context.Context, t place.Traffic, ready place.Ready, progress func(bytes, messages uint64)) (record.Endpoint, error) {
	return c.traffic(ctx, c.rpc.Drive, t, ready, progress)
}

// readiness reports once that a worker is ready.
type readiness struct {
	ready  place.Ready
	passed bool
}

// pass reports the port at which a worker is ready. It refuses a second report, for which nobody waits.
func (c *readiness) pass(port uint32) (time.Time, error) {
	switch {
	case c.passed:
		return time.Time{}, errors.New("the worker reported twice that it was ready")
	case port > math.MaxUint16:
		return time.Time{}, fmt.Errorf("the worker says that it is ready at port %d", port)
	}
	c.passed = true
	return c.ready(uint16(port))
}

// checkResult refuses the result of a worker that has not reported that it is ready, for which the others wait.
func (c *readiness) checkResult() error {
	if !c.passed {
		return errors.New("the worker sent a result before it was ready")
	}
	return nil
}

// progressEvery limits how often progress is passed on. A worker should report it once a second.
const progressEvery = 100 * time.Millisecond

type trafficCall = func(context.Context, ...grpc.CallOption) (grpc.BidiStreamingClient[pb.TrafficCommand, pb.TrafficEvent], error)

func (c *Client) traffic(ctx context.Context, call trafficCall, t place.Traffic, ready place.Ready, progress func(bytes, messages uint64)) (record.Endpoint, error) {
	var end record.Endpoint
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	worker := readiness{ready: ready}
	if err := c.keepClock(ctx); err != nil {
		return end, err
	}
	stream, err := call(ctx)
	if err != nil {
		return end, c.plain(err)
	}
	workload, err := encode("workload "+t.Workload.Name, t.Workload)
	if err != nil {
		return end, err
	}
	if err := stream.Send(&pb.TrafficCommand{Step: &pb.TrafficCommand_Traffic{Traffic: &pb.Traffic{
		Workload: workload, Address: t.Address.Addr().String(), Port: uint32(t.Address.Port()),
		CongestionControl: t.CongestionControl, Place: t.Place, Secret: t.Secret[:], Ports: uint32(t.Ports),
	}}}); err != nil && !errors.Is(err, io.EOF) { // after io.EOF, Recv has the reason
		return end, c.plain(err)
	}
	var last time.Time // when progress was last passed on
	for {
		event, err := stream.Recv()
		if err != nil {
			return end, c.plain(err)
		}
		switch {
		case event.GetReady() != nil:
			start, err := worker.pass(event.GetReady().GetPort())
			if err != nil {
				return end, err
			}
			traffic := t.Workload.Traffic()
			w := c.window(start, time.Duration(traffic.Warmup), time.Duration(traffic.Duration))
			if err := stream.Send(&pb.TrafficCommand{Step: &pb.TrafficCommand_Window{Window: w}}); err != nil && !errors.Is(err, io.EOF) {
				return end, c.plain(err)
			}
		case event.GetProgress().GetCongestionControl() != "":
			end.Place, end.CongestionControl = t.Place, place.Clip(event.GetProgress().GetCongestionControl())
		case event.GetProgress().GetCommand() != "":
			end.Place, end.Command = t.Place, place.Clip(event.GetProgress().GetCommand())
		case event.GetProgress() != nil:
			if progress != nil && time.Since(last) >= progressEvery {
				last = time.Now()
				progress(event.GetProgress().GetBytes(), event.GetProgress().GetMessages())
			}
		case event.GetResult() != nil:
			err := errors.Join(worker.checkResult(), decode(event.GetResult().GetEndpoint(), &end))
			end.Place = t.Place
			return end, err
		}
	}
}

// Sample reads counters at both edges of the window, and a series of some in between.
func (c *Client) Sample(ctx context.Context, q place.Sampling, ready place.Ready) (s record.Sample, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	worker := readiness{ready: ready}
	if err := c.keepClock(ctx); err != nil {
		return s, err
	}
	stream, err := c.rpc.Sample(ctx)
	if err != nil {
		return s, c.plain(err)
	}
	request := &pb.SampleRequest{Place: q.Place, Cpus: q.CPUs, Connections: uint32(q.Connections)}
	for _, o := range q.Observe {
		if o.Missing == "" {
			request.Pods = append(request.Pods, &pb.ObservedPod{Uid: o.UID, Containers: o.Containers})
		}
	}
	if err := stream.Send(&pb.SampleCommand{Step: &pb.SampleCommand_Request{Request: request}}); err != nil && !errors.Is(err, io.EOF) {
		return s, c.plain(err)
	}
	for {
		event, err := stream.Recv()
		if err != nil {
			return s, c.plain(err)
		}
		if counters := event.GetCounters(); counters != nil {
			if err := worker.checkResult(); err != nil {
				return s, err
			}
			return sample(counters, q)
		}
		start, err := worker.pass(0)
		if err != nil {
			return s, err
		}
		window := &pb.SampleCommand{Step: &pb.SampleCommand_Window{Window: c.window(start, q.Warmup, q.Duration)}}
		if err := stream.Send(window); err != nil && !errors.Is(err, io.EOF) {
			return s, c.plain(err)
		}
		go func() {
			select {
			case <-q.Early:
				// A second message with a window ends the first window. If it cannot be sent, Recv returns the error.
				_ = stream.Send(window)
			case <-ctx.Done():
			}
		}()
	}
}

// sample decodes the sample of a place. It sets the name of the place itself, because it does not trust that of the worker.
func sample(counters *pb.Counters, q place.Sampling) (s record.Sample, err error) {
	s.Series = counters.GetSeries()
	if q.CPUs {
		s.Host = new(record.Host)
		err = decode(counters.GetHost(), s.Host)
	}
	if fast := counters.GetFastpath(); fast != nil {
		s.Fastpath = new(record.Fastpath)
		err = errors.Join(err, decode(fast, s.Fastpath))
		s.Fastpath.Place = q.Place
	}
	err = errors.Join(err, decode(counters.GetDevices(), &s.Devices), decode(counters.GetVfs(), &s.VFs))
	for i := range s.Devices {
		s.Devices[i].Place = q.Place
	}
	for i := range s.VFs {
		s.VFs[i].Place = q.Place
	}
	var used []record.DaemonSet
	if len(q.Observe) > 0 {
		err = errors.Join(err, decode(counters.GetDaemonsets(), &used))
	}
	s.DaemonSets = observed(q, used)
	return s, err
}

// observed returns an entry for each DaemonSet that the place was to observe. used holds those whose pods were there, in order.
func observed(q place.Sampling, used []record.DaemonSet) (all []record.DaemonSet) {
	for _, o := range q.Observe {
		d := record.DaemonSet{Error: o.Missing}
		if o.Missing == "" && len(used) == 0 {
			d.Error = "its node did not report it"
		} else if o.Missing == "" {
			d, used = used[0], used[1:]
		}
		d.Name, d.Node = o.DaemonSet, q.Place
		all = append(all, d)
	}
	return all
}

// Apply applies accelerators in the worker's place, and returns the settings as read back.
func (c *Client) Apply(ctx context.Context, s place.Steering) ([]record.Setting, error) {
	accelerators, err := encode("accelerators", s.Accelerators)
	if err != nil {
		return nil, err
	}
	answer, err := c.rpc.Apply(ctx, &pb.ApplyRequest{Place: pbPlace(s.Place), Accelerators: accelerators, Owner: s.Owner})
	if err != nil {
		return nil, c.plain(err)
	}
	c.place = s.Place.Name
	return c.settings(answer.GetSettings())
}

// settings decodes the settings of the place in which accelerators are applied. It sets the name of the place itself, because
// it does not trust that of the worker.
func (c *Client) settings(b []byte) (all []record.Setting, err error) {
	err = decode(b, &all)
	for i := range all {
		all[i].Place = c.place
	}
	return all, err
}

// Revert reverts Apply. It returns all settings that were applied, including those of devices that appeared later, also with a
// place.ChangedError.
func (c *Client) Revert(ctx context.Context) ([]record.Setting, error) {
	answer, err := c.rpc.Revert(ctx, &pb.RevertRequest{})
	if err != nil {
		return nil, c.plain(err)
	}
	settings, err := c.settings(answer.GetSettings())
	if changed := answer.GetChanged(); err == nil && changed != "" {
		err = place.ChangedError(place.Clip(changed))
	}
	return settings, err
}

func pbPlace(p place.Place) *pb.Place {
	return &pb.Place{Name: p.Name, Pod: p.Kind == place.Pod, Cpus: p.CPUs, IrqCpus: p.IRQCPUs}
}

// encode encodes a part of a message. what names the part in an error.
func encode(what string, v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", what, err)
	}
	return b, nil
}

// decode decodes values for the record. It returns an error for impossible values.
func decode(b []byte, into any) error {
	if err := unmarshal(b, into); err != nil {
		return err
	}
	if err := plausible(reflect.ValueOf(into), ""); err != nil {
		return fmt.Errorf("the worker's answer cannot be true: %w", err)
	}
	return nil
}

func unmarshal(b []byte, into any) error {
	if err := record.Decode(b, into); err != nil {
		return fmt.Errorf("decode the worker's answer: %w", err)
	}
	return nil
}

// most is larger than any true count or rate: 10^18 bytes/s is 1000 times the traffic of the internet.
const most = 1e18

// plausible returns an error that names the first number in a value that is out of range. A difference of clocks may be
// negative, by less than a second. JSON has neither NaN nor infinity.
func plausible(v reflect.Value, path string) error {
	number := math.NaN()
	switch v.Kind() {
	case reflect.Float64:
		number = v.Float()
	case reflect.Uint64:
		number = float64(v.Uint())
	case reflect.Pointer:
		if !v.IsNil() {
			return plausible(v.Elem(), path)
		}
	case reflect.Slice:
		for i := range v.Len() {
			if err := plausible(v.Index(i), fmt.Sprintf("%s[%d]", path, i)); err != nil {
				return err
			}
		}
	case reflect.Map:
		for _, key := range v.MapKeys() {
			if err := plausible(v.MapIndex(key), fmt.Sprintf("%s[%v]", path, key)); err != nil {
				return err
			}
		}
	case reflect.Struct:
		for field, value := range v.Fields() {
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			if err := plausible(value, strings.TrimPrefix(path+"."+name, ".")); err != nil {
				return err
			}
		}
	}
	if number < -1 || number > most {
		return fmt.Errorf("%s is %g", path, number)
	}
	return nil
}

// ErrGone means that the stream of a worker has ended.
var ErrGone = errors.New("the worker is gone")

// errLate is context.DeadlineExceeded for users.
var errLate = fmt.Errorf("the worker does not answer: %w", context.DeadlineExceeded)

// plain removes gRPC's wrapping from an error, and adds why the worker is gone if that is known.
func (c *Client) plain(err error) error {
	err = plain(err)
	if errors.Is(err, ErrGone) && c.why != nil {
		if why := c.why(); why != nil {
			return fmt.Errorf("%w: %w", ErrGone, why)
		}
	}
	return err
}

// Codes of calls that failed because a disk is full, or because connections stalled. gRPC itself does not use them.
const (
	noSpace = codes.OutOfRange
	stalled = codes.Aborted
)

// plain removes gRPC's wrapping, which means nothing to a user, from an error.
func plain(err error) error {
	s, ok := status.FromError(err)
	if !ok {
		return err
	}
	switch s.Code() {
	case codes.Unavailable:
		return ErrGone
	case codes.Canceled:
		return context.Canceled
	case codes.DeadlineExceeded:
		return errLate
	case noSpace:
		return fmt.Errorf("%w: %s", place.ErrNoSpace, place.Clip(s.Message()))
	case stalled:
		return record.StalledError(place.Clip(s.Message()))
	default:
		return errors.New(place.Clip(s.Message()))
	}
}

// addrPort returns the address of a command.
func addrPort(t interface {
	GetAddress() string
	GetPort() uint32
}) (netip.AddrPort, error) {
	addr, err := netip.ParseAddr(t.GetAddress())
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("address of traffic: %w", err)
	}
	return netip.AddrPortFrom(addr, uint16(t.GetPort())), nil
}
