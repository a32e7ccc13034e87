//go:build linux

package worker

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"

	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/worker/pb"
)

// hostile is a worker whose place somebody else controls. It answers what a test wants.
type hostile struct {
	pb.UnimplementedWorkerServer
	node     string
	traffic  func(pb.Worker_ServeServer) error
	counters func(pb.Worker_SampleServer) error
	settings string
}

func (h *hostile) Now(context.Context, *pb.NowRequest) (*pb.NowResponse, error) {
	return &pb.NowResponse{MonotonicNs: -1 << 63}, nil
}

func (h *hostile) Describe(context.Context, *pb.DescribeRequest) (*pb.DescribeResponse, error) {
	return &pb.DescribeResponse{Node: []byte(h.node)}, nil
}

func (h *hostile) Serve(stream pb.Worker_ServeServer) error   { return h.traffic(stream) }
func (h *hostile) Drive(stream pb.Worker_DriveServer) error   { return h.traffic(stream) }
func (h *hostile) Sample(stream pb.Worker_SampleServer) error { return h.counters(stream) }

func (h *hostile) Apply(context.Context, *pb.ApplyRequest) (*pb.ApplyResponse, error) {
	return &pb.ApplyResponse{Settings: []byte(h.settings)}, nil
}

func (h *hostile) attach(t *testing.T) *Client {
	t.Helper()
	in, toWorker := io.Pipe()
	fromWorker, out := io.Pipe()
	g := grpc.NewServer(grpc.MaxSendMsgSize(1 << 30))
	pb.RegisterWorkerServer(g, h)
	go func() { _ = g.Serve(listenOne(newPipe(in, out))) }()
	c, err := Connect(t.Context(), fromWorker, toWorker)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Close()
		g.Stop()
	})
	return c
}

func (h *hostile) serve(t *testing.T, ctx context.Context, progress func(uint64, uint64)) (record.Endpoint, error) {
	to := place.Traffic{Place: "server", Workload: pingPong(time.Second), Address: netip.AddrPortFrom(loopback, 0)}
	return h.attach(t).Drive(ctx, to, func(uint16) (time.Time, error) { return time.Now(), nil }, progress)
}

func ready(port uint32) *pb.TrafficEvent {
	return &pb.TrafficEvent{Event: &pb.TrafficEvent_Ready{Ready: &pb.Ready{Port: port}}}
}

func result(endpoint string) *pb.TrafficEvent {
	return &pb.TrafficEvent{Event: &pb.TrafficEvent_Result{Result: &pb.Result{Endpoint: []byte(endpoint)}}}
}

// TestHostileTraffic checks that whatever a worker answers, its controller gets a plausible result, or an error that says what
// cannot be true.
func TestHostileTraffic(t *testing.T) {
	for name, c := range map[string]struct {
		events []*pb.TrafficEvent
		fail   error
		want   string // of the error
	}{
		"result first":     {[]*pb.TrafficEvent{result(`{"seconds": 1}`)}, nil, "sent a result before it was ready"},
		"ready twice":      {[]*pb.TrafficEvent{ready(1), ready(1)}, nil, "reported twice that it was ready"},
		"no such port":     {[]*pb.TrafficEvent{ready(1 << 20)}, nil, "ready at port 1048576"},
		"negative time":    {[]*pb.TrafficEvent{ready(1), result(`{"seconds": -5}`)}, nil, "cannot be true: seconds is -5"},
		"huge rate":        {[]*pb.TrafficEvent{ready(1), result(`{"seconds": 1, "bits_per_second": 1e300}`)}, nil, "bits_per_second is 1e+300"},
		"huge count":       {[]*pb.TrafficEvent{ready(1), result(`{"bytes": 18446744073709551615}`)}, nil, "bytes is 1.8"},
		"huge in a map":    {[]*pb.TrafficEvent{ready(1), result(`{"percentiles": {"latency_p50": -1e9}}`)}, nil, "percentiles[latency_p50] is -1e+09"},
		"negative count":   {[]*pb.TrafficEvent{ready(1), result(`{"bytes": -1}`)}, nil, "decode the worker's answer"},
		"out of range":     {[]*pb.TrafficEvent{ready(1), result(`{"seconds": 1e999}`)}, nil, "decode the worker's answer"},
		"not a number":     {[]*pb.TrafficEvent{ready(1), result(`{"seconds": NaN}`)}, nil, "decode the worker's answer"},
		"no JSON":          {[]*pb.TrafficEvent{ready(1), result("\x1b]0;pwned\a")}, nil, "decode the worker's answer"},
		"many objects":     {[]*pb.TrafficEvent{ready(1), result(`{"warnings": [` + strings.Repeat("{},", 1<<20) + "{}]}")}, nil, "JSON objects"},
		"huge message":     {[]*pb.TrafficEvent{ready(1), result(strings.Repeat(" ", 64<<20))}, nil, "larger than max"},
		"long error":       {nil, errors.New(strings.Repeat("x", 1<<20)), "xxxxxxxx"},
		"ends too early":   {[]*pb.TrafficEvent{ready(1)}, nil, "EOF"},
		"nothing, 9 times": {make([]*pb.TrafficEvent, 9), nil, "EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			h := &hostile{traffic: func(stream pb.Worker_ServeServer) error {
				for _, e := range c.events {
					if e == nil {
						e = new(pb.TrafficEvent)
					}
					if err := stream.Send(e); err != nil {
						return err
					}
				}
				return c.fail
			}}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			_, err := h.serve(t, ctx, nil)
			if err == nil || !strings.Contains(err.Error(), c.want) || ctx.Err() != nil {
				t.Errorf("got %.200v, want %s", err, c.want)
			}
			if err != nil && len(err.Error()) > 10_000 {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
		})
	}
}

// TestHostileNames checks that records of a place have the name that its controller gave it, and no text of unlimited length.
func TestHostileNames(t *testing.T) {
	h := &hostile{
		node:     `{"name": "another"}`,
		settings: `[{"place": "another", "path": "x"}]`,
		traffic: func(stream pb.Worker_ServeServer) error {
			long := &pb.TrafficEvent{Event: &pb.TrafficEvent_Progress{Progress: &pb.Progress{Command: strings.Repeat("x", 1<<20)}}}
			return errors.Join(stream.Send(ready(1)), stream.Send(long), stream.Send(result(`{"place": "another"}`)))
		},
		counters: func(stream pb.Worker_SampleServer) error {
			all := &pb.Counters{Devices: []byte(`[{"place": "another"}]`), Vfs: []byte(`[{"place": "another"}]`), Fastpath: []byte(`{"place": "another"}`), Daemonsets: []byte(`[{"name": "ns/other", "node": "another", "cpus": 0.5}]`)}
			return errors.Join(stream.Send(&pb.SampleEvent{Event: &pb.SampleEvent_Ready{}}), stream.Send(&pb.SampleEvent{Event: &pb.SampleEvent_Counters{Counters: all}}))
		},
	}
	if end, err := h.serve(t, t.Context(), nil); err != nil || end.Place != "server" || len(end.Command) > 10_000 {
		t.Errorf("traffic of %q with a command of %d bytes, %v", end.Place, len(end.Command), err)
	}
	c := h.attach(t)
	if node, err := c.Describe(t.Context(), place.Place{Name: "node0"}); err != nil || node.Name != "node0" {
		t.Errorf("node %q, %v", node.Name, err)
	}
	settings, err := c.Apply(t.Context(), place.Steering{Place: place.Place{Name: "node0"}})
	if err != nil || len(settings) != 1 || settings[0].Place != "node0" {
		t.Errorf("settings %+v, %v", settings, err)
	}
	observe := []place.Observed{{DaemonSet: "ns/gone", Missing: "it is gone"}, {DaemonSet: "ns/a", UID: "1"}, {DaemonSet: "ns/b", UID: "2"}}
	s, err := c.Sample(t.Context(), place.Sampling{Place: "node0", Observe: observe, Duration: time.Second}, func(uint16) (time.Time, error) { return time.Now(), nil })
	if err != nil || s.Devices[0].Place != "node0" || s.VFs[0].Place != "node0" || s.Fastpath.Place != "node0" {
		t.Errorf("sample %+v, %v", s, err)
	}
	if diff := cmp.Diff([]record.DaemonSet{
		{Name: "ns/gone", Node: "node0", Error: "it is gone"}, {Name: "ns/a", Node: "node0", CPUs: 0.5}, {Name: "ns/b", Node: "node0", Error: "its node did not report it"},
	}, s.DaemonSets); diff != "" {
		t.Errorf("DaemonSets (-want +got):\n%s", diff)
	}
	h.counters = func(stream pb.Worker_SampleServer) error {
		return stream.Send(&pb.SampleEvent{Event: &pb.SampleEvent_Counters{Counters: new(pb.Counters)}})
	}
	if _, err := c.Sample(t.Context(), place.Sampling{Place: "node0", Duration: time.Second}, nil); err == nil || !strings.Contains(err.Error(), "sent a result before it was ready") {
		t.Errorf("counters before it is ready: %v", err)
	}
}

// TestHostileSilence checks that the controller gives up on a worker that never answers or never ends when its time is up, and
// that it passes on only a little of what a worker reports endlessly.
func TestHostileSilence(t *testing.T) {
	var sent, passed atomic.Int64
	for name, traffic := range map[string]func(pb.Worker_ServeServer) error{
		"silent": func(stream pb.Worker_ServeServer) error { <-stream.Context().Done(); return nil },
		"endless": func(stream pb.Worker_ServeServer) error {
			err := stream.Send(ready(1))
			for err == nil {
				err = stream.Send(&pb.TrafficEvent{Event: &pb.TrafficEvent_Progress{Progress: &pb.Progress{Bytes: 1}}})
				sent.Add(1)
			}
			return err
		},
	} {
		passed.Store(0)
		ctx, cancel := context.WithCancel(t.Context())
		h, done := &hostile{traffic: traffic}, make(chan error, 1)
		begun := time.Now()
		go func() {
			_, err := h.serve(t, ctx, func(uint64, uint64) { passed.Add(1) })
			done <- err
		}()
		if name == "endless" {
			testenv.Await(t, time.Minute, "a thousand reports", func() bool { return sent.Load() > 1000 })
		}
		cancel()
		if err := <-done; err == nil {
			t.Errorf("%s: no error", name)
		}
		if limit := int64(time.Since(begun)/progressEvery) + 1; passed.Load() > limit {
			t.Errorf("%s: %d of %d reports were passed on in %s", name, passed.Load(), sent.Load(), time.Since(begun))
		}
	}
}
