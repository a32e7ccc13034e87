package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"slipstream.dev/internal/collect"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
	"slipstream.dev/internal/traffic"
)

// connect serves a worker in this process. It returns its client, and a channel with the error of Serve.
func connect(t testing.TB) (*Client, <-chan error) {
	t.Helper()
	return connectTo(t, Options{})
}

func connectTo(t testing.TB, o Options) (*Client, <-chan error) {
	t.Helper()
	o.JournalDir = cmp.Or(o.JournalDir, t.TempDir())
	in, toWorker := io.Pipe()
	fromWorker, out := io.Pipe()
	served := make(chan error, 1)
	go func() { served <- Serve(context.Background(), in, out, o) }()
	c, err := Connect(t.Context(), fromWorker, toWorker)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c, served
}

func pingPong(d time.Duration) spec.Workload {
	return spec.Workload{Name: "pingpong", PingPong: &spec.Traffic{
		Protocol: "tcp", IP: 4, Size: 64, Connections: 1, Tool: spec.ToolNative,
		Warmup: spec.Duration(20 * time.Millisecond), Duration: spec.Duration(d),
	}}
}

var loopback = netip.MustParseAddr("127.0.0.1")

// run makes one worker serve and another drive a workload over loopback. It calls
// started when the traffic is to start.
func run(t testing.TB, server, driver *Client, w spec.Workload, started func()) (ends [2]record.Endpoint, errs [2]error) {
	t.Helper()
	var wg sync.WaitGroup
	port := make(chan uint16, 1)
	begin := make(chan time.Time, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	wg.Go(func() {
		ends[0], errs[0] = server.Serve(ctx, place.Traffic{Place: "server", Workload: w, Address: netip.AddrPortFrom(loopback, 0)},
			func(p uint16) (time.Time, error) {
				port <- p
				select {
				case at := <-begin:
					return at, nil
				case <-ctx.Done(): // the client failed before it was ready
					return time.Time{}, ctx.Err()
				}
			})
		if errs[0] != nil {
			cancel()
		}
	})
	wg.Go(func() {
		var at netip.AddrPort
		select {
		case p := <-port:
			at = netip.AddrPortFrom(loopback, p)
		case <-ctx.Done():
			return
		}
		ends[1], errs[1] = driver.Drive(ctx, place.Traffic{Place: "client", Workload: w, Address: at}, func(uint16) (time.Time, error) {
			start := time.Now().Add(5 * time.Millisecond)
			begin <- start
			started()
			return start, nil
		}, nil)
		if tool := w.Traffic().Tool; errs[1] != nil || tool != spec.ToolNative && tool != spec.ToolGRPC {
			cancel() // a tool's server ends with its client
		}
	})
	wg.Wait()
	return ends, errs
}

func TestTraffic(t *testing.T) {
	server, _ := connect(t)
	driver, _ := connect(t)
	var ends [2]record.Endpoint
	testenv.Retry(t, 5, func() error {
		var errs [2]error
		ends, errs = run(t, server, driver, pingPong(200*time.Millisecond), func() {})
		if err := errors.Join(errs[:]...); err != nil {
			return err
		}
		for i, place := range []string{"server", "client"} {
			if e := ends[i]; e.Place != place || e.Messages == 0 || e.Seconds < 0.15 || e.Seconds > 0.3 {
				return fmt.Errorf("%s: %+v", place, e)
			}
		}
		return nil
	})
	if h, err := record.DecodeHistogram(ends[1].Latency); err != nil || h.TotalCount() == 0 {
		t.Errorf("the client's latencies: %v", err)
	}
}

// TestStreamEnds closes the controller's end in mid-traffic: both workers must end long before the traffic would.
func TestStreamEnds(t *testing.T) {
	server, served := connect(t)
	driver, drove := connect(t)
	_, errs := run(t, server, driver, pingPong(time.Hour), func() {
		_ = server.Close()
		_ = driver.Close()
	})
	if errs[1] == nil {
		t.Error("an hour of traffic ended well")
	}
	for _, ended := range []<-chan error{served, drove} {
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("the worker ended with %v", err)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("the worker goes on without its controller")
		}
	}
	if !server.Gone() {
		t.Error("a closed stream is not gone")
	}
}

// TestGone closes the worker's end of the stream, as the death of a worker does.
func TestGone(t *testing.T) {
	in, toWorker := io.Pipe()
	fromWorker, out := io.Pipe()
	go func() { _ = Serve(context.Background(), in, out, Options{JournalDir: t.TempDir()}) }()
	c, err := Connect(t.Context(), fromWorker, toWorker)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if c.Gone() {
		t.Error("a worker that lives is gone")
	}
	_ = out.Close()
	select {
	case <-c.pipe.done:
	case <-time.After(10 * time.Second):
		t.Fatal("nobody noticed")
	}
	if _, err := c.Revert(t.Context()); !errors.Is(err, ErrGone) || !c.Gone() {
		t.Errorf("got %v, gone %t", err, c.Gone())
	}
}

func TestBadTool(t *testing.T) {
	server, _ := connect(t)
	driver, _ := connect(t)
	w := pingPong(time.Second)
	w.PingPong.Tool = "netperf"
	if _, errs := run(t, server, driver, w, func() {}); errs[0] == nil || !strings.Contains(errs[0].Error(), "netperf") {
		t.Errorf("got %v", errs[0])
	}
}

// TestToolPortsDiffer checks that tools that start at the same time get different ports before any has bound its own.
func TestToolPortsDiffer(t *testing.T) {
	seen := make(map[uint16]bool)
	for range 2000 {
		port, release, err := reservePort(netip.MustParseAddr("127.0.0.1"), false)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(release)
		if seen[port] {
			t.Fatalf("port %d was returned twice within %d", port, len(seen)+1)
		}
		seen[port] = true
	}
}

func TestClock(t *testing.T) {
	c, _ := connect(t)
	at := time.Now().Add(time.Second)
	w := c.window(at, 10*time.Millisecond, time.Minute)
	before := time.Now()
	answer, err := c.rpc.Now(t.Context(), nil)
	after := time.Now()
	if err != nil {
		t.Fatal(err)
	}
	// The worker looked at its clock at some time between the two.
	left, slack := time.Duration(w.GetStartNs()-answer.GetMonotonicNs()), 5*time.Millisecond+c.within
	if left > at.Sub(before)+slack || left < at.Sub(after)-slack {
		t.Errorf("the worker would start in %s, want %s to %s", left, at.Sub(after), at.Sub(before))
	}
	if warmup, window := w.GetFromNs()-w.GetStartNs(), w.GetToNs()-w.GetFromNs(); warmup != 10e6 || window != 60e9 {
		t.Errorf("warm-up %d ns, window %d ns", warmup, window)
	}
}

func TestSample(t *testing.T) {
	c, _ := connect(t)
	s, err := c.Sample(t.Context(), place.Sampling{Place: "here", Duration: 20 * time.Millisecond}, func(uint16) (time.Time, error) { return time.Now(), nil })
	if err != nil {
		t.Fatal(err)
	}
	if s.Host != nil || s.Fastpath != nil || len(s.Devices) == 0 || s.Devices[0].Place != "here" {
		t.Errorf("%+v", s)
	}
}

// TestSampleSeries checks that the counters are read every 100 ms within the window, and at its edges.
func TestSampleSeries(t *testing.T) {
	c, _ := connect(t)
	testenv.Retry(t, 5, func() error {
		s, err := c.Sample(t.Context(), place.Sampling{Place: "here", CPUs: true, Duration: 350 * time.Millisecond}, func(uint16) (time.Time, error) { return time.Now(), nil })
		if err != nil {
			return err
		}
		series, err := record.DecodeSeries(s.Series)
		if err != nil {
			return err
		}
		last := len(series.At) - 1
		if last < 2 || last > 4 || series.At[last] < 350_000 || len(series.CPUs) != len(s.Host.CPUs) {
			return fmt.Errorf("readings at %v µs, of %d CPUs", series.At, len(series.CPUs))
		}
		for i, at := range series.At[:last] {
			if i > 0 && at < 100_000 || at > 350_000 {
				return fmt.Errorf("reading %d came %d µs after the window's start", i, at)
			}
		}
		return nil
	})
}

// TestSampleEarly checks that a window of an hour ends on request.
func TestSampleEarly(t *testing.T) {
	c, _ := connect(t)
	early := make(chan struct{})
	s, err := c.Sample(t.Context(), place.Sampling{Place: "here", Duration: time.Hour, Early: early}, func(uint16) (time.Time, error) {
		time.AfterFunc(10*time.Millisecond, func() { close(early) })
		return time.Now(), nil
	})
	if err != nil || len(s.Devices) == 0 {
		t.Errorf("%+v, %v", s, err)
	}
	// A busy machine may receive the request late, and take readings until then.
	if series, err := record.DecodeSeries(s.Series); err != nil || len(series.At) < 2 || len(series.At) > 2 && series.At[1] < 90_000 {
		t.Errorf("series %+v, %v", series, err)
	}
}

// TestToolHangs puts a tool that never listens, or never ends, into PATH. The worker must give up, kill it and continue.
func TestToolHangs(t *testing.T) {
	for _, tt := range []struct {
		name, server, want string
		patience           time.Duration
	}{
		{"server", ":", "does not listen", time.Second},
		{"client", "echo Server listening on 1", "still running", 0}, // starting a process may take a second
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			script := "#!/bin/sh\necho $$ >>" + dir + "/pids\ncase \"$*\" in *--server*) " + tt.server + " ;; esac\nexec sleep 1000\n"
			if err := os.WriteFile(filepath.Join(dir, "iperf3"), []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
			t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
			server, _ := connectTo(t, Options{patience: tt.patience})
			driver, _ := connectTo(t, Options{patience: time.Second})
			w := spec.Workload{Name: "stream", Stream: &spec.Traffic{
				Protocol: "tcp", IP: 4, Size: 1 << 10, Connections: 1, Tool: spec.ToolIperf3,
				Warmup: spec.Duration(time.Second), Duration: spec.Duration(time.Second),
			}}
			_, errs := run(t, server, driver, w, func() {})
			if err := errors.Join(errs[:]...); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
			text, err := os.ReadFile(filepath.Join(dir, "pids"))
			if err != nil && !errors.Is(err, os.ErrNotExist) { // it may be killed before it has written its PID
				t.Fatal(err)
			}
			for _, pid := range strings.Fields(string(text)) {
				for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
					if _, err := os.Stat("/proc/" + pid); err != nil {
						break
					}
					if time.Now().After(end) {
						t.Fatalf("process %s of the tool goes on", pid)
					}
				}
			}
			if _, err := driver.rpc.Now(t.Context(), nil); err != nil {
				t.Errorf("the worker does not go on: %v", err)
			}
		})
	}
}

// TestMain serves as a worker if Spawn has started this binary as one.
func TestMain(m *testing.M) {
	if len(os.Args) != 2 || os.Args[1] != "worker" {
		os.Exit(m.Run())
	}
	signal.Ignore(syscall.SIGPIPE) // as the command does
	if err := Serve(context.Background(), os.Stdin, os.Stdout, Options{JournalDir: os.TempDir()}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// TestSpawn checks that workers that start at the same time all have this machine's clock, however long their answers take.
func TestSpawn(t *testing.T) {
	var wg sync.WaitGroup
	for range 24 {
		wg.Go(func() {
			c, err := Spawn(t.Context(), (*exec.Cmd).Start, os.Stderr)
			if err != nil {
				t.Error(err)
				return
			}
			now, mono := traffic.Instant()
			w := c.window(now, 0, time.Second)
			if off := time.Duration(w.GetStartNs() - mono); off < -time.Millisecond || off > time.Millisecond {
				t.Errorf("the worker would start %s off", off)
			}
			if _, err := c.rpc.Now(t.Context(), nil); err != nil {
				t.Error(err)
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// TestLimitsEarly checks that a window of an hour ends with the traffic, and that there is no warning without
// throttling.
func TestLimitsEarly(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		testenv.WriteFile(t, filepath.Join(dir, name), text)
	}
	write("proc/self/cgroup", "1:cpu:/\n")
	write("cgroup/cpu/cpu.stat", "nr_throttled 1\nthrottled_time 0\n")
	limits, err := collect.OpenLimits(collect.Options{Proc: filepath.Join(dir, "proc"), Cgroup: filepath.Join(dir, "cgroup")})
	if err != nil || len(limits) != 1 {
		t.Fatalf("limits %v, %v", limits, err)
	}
	defer limits.Close()
	now := traffic.Now()
	warnings := watchLimits(t.Context(), limits, traffic.Window{Start: now, From: now, To: now + int64(time.Hour)})
	told := make(chan []record.Warning)
	go func() { told <- warnings() }()
	select {
	case got := <-told:
		if len(got) != 0 {
			t.Errorf("warnings %v of a limit that did nothing", got)
		}
	case <-time.After(20 * time.Second):
		t.Error("the window lasts until its time, though the traffic is over")
	}
}

// TestCloseBeforeRun checks that a server whose client never came closes its ports, whatever the workload.
func TestCloseBeforeRun(t *testing.T) {
	for name, s := range map[string]traffic.Spec{
		"stream":    {Kind: traffic.Stream, Size: 64, Connections: 1},
		"ping-pong": {Kind: traffic.PingPong, Size: 64, Connections: 1},
		"connect":   {Kind: traffic.Connect, Size: 64, Connections: 1},
		"HTTP":      {Kind: traffic.HTTP, Size: 5, Connections: 1, EventLoop: true, Ports: 2},
	} {
		t.Run(name, func(t *testing.T) {
			var server *traffic.Server
			testenv.Retry(t, 20, func() (err error) { // another process may have the second port
				server, err = traffic.Listen(s, netip.MustParseAddrPort("127.0.0.1:0"))
				return err
			})
			(&nativeServer{Server: server}).Close()
			for i := range max(1, s.Ports) {
				at := netip.AddrPortFrom(server.Addr().Addr(), server.Addr().Port()+uint16(i))
				l, err := net.Listen("tcp", at.String())
				if err != nil {
					t.Fatal(err)
				}
				l.Close()
			}
		})
	}
}

// TestPortInUse checks that a server waits for the previous one to close its ports, but not beyond its trial.
func TestPortInUse(t *testing.T) {
	s := traffic.Spec{Kind: traffic.HTTP, Size: 5, Connections: 1, EventLoop: true}
	before, err := traffic.Listen(s, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	end, err := before.Accept(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancelCause(t.Context())
	ended := errors.New("the trial is over")
	cancel(ended)
	if _, err := listen(over, s, before.Addr()); !errors.Is(err, ended) {
		t.Errorf("%v, want %v", err, ended)
	}
	time.AfterFunc(50*time.Millisecond, end.Close)
	after, err := listen(t.Context(), s, before.Addr())
	if err != nil {
		t.Fatal(err)
	}
	if end, err = after.Accept(t.Context()); err != nil {
		t.Fatal(err)
	}
	end.Close()
}
