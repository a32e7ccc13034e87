//go:build linux

package worker

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"slipstream.dev/examples"
	"slipstream.dev/internal/metrics"
	"slipstream.dev/internal/place"
	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

// startPiped starts a command, and returns its input and output.
func startPiped(t *testing.T, cmd *exec.Cmd) (io.WriteCloser, io.ReadCloser) {
	t.Helper()
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return in, out
}

// connectWine starts a worker for Windows, and returns its client and how the worker ends.
func connectWine(t *testing.T, w *testenv.Wine, argv ...string) (*Client, <-chan error) {
	t.Helper()
	cmd := w.Command(argv...)
	in, out := startPiped(t, cmd)
	c, err := Connect(t.Context(), out, in)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() { _ = c.Close() })
	return c, ended
}

// workloadOf returns a workload of a kind, with a window of 300 ms.
func workloadOf(kind, protocol string, change func(*spec.Traffic)) spec.Workload {
	t := &spec.Traffic{
		Protocol: protocol, IP: 4, Size: 64, Connections: 1, Tool: spec.ToolNative,
		Warmup: spec.Duration(50 * time.Millisecond), Duration: spec.Duration(300 * time.Millisecond),
	}
	if change != nil {
		change(t)
	}
	w := spec.Workload{Name: kind}
	switch kind {
	case "stream":
		t.Size = 1024
		w.Stream = t
	case "pingpong":
		w.PingPong = t
	case "underload":
		t.Rate = 500
		w.UnderLoad = t
	case "connect":
		w.Connect = t
	case "http":
		w.HTTP = t
	}
	return w
}

// TestWindows exchanges traffic between the Windows program, under Wine, and a worker on Linux. Each is the client once.
func TestWindows(t *testing.T) {
	wine := testenv.NeedWine(t)
	program := wine.Program(t)
	windows, ended := connectWine(t, wine, program, "worker")
	linux, _ := connect(t)
	t.Run("describe", func(t *testing.T) {
		n, err := windows.Describe(t.Context(), place.Place{Name: "w", Kind: place.Node})
		if err != nil || n.Name != "w" || len(n.Boot) != 32 || !strings.HasPrefix(n.Distribution, "Wine ") || n.MemoryByte == 0 || n.CPUs == "" || len(n.Links) == 0 || n.Arch != "x86_64" {
			t.Errorf("%v %+v", err, n)
		}
	})
	for _, w := range []spec.Workload{
		workloadOf("pingpong", "tcp", nil), workloadOf("pingpong", "udp", nil),
		workloadOf("stream", "tcp", nil), workloadOf("stream", "udp", nil),
		workloadOf("underload", "tcp", nil), workloadOf("underload", "udp", nil),
		workloadOf("connect", "tcp", nil),
		workloadOf("pingpong", "tcp", func(t *spec.Traffic) { t.Connections = 3 }),
	} {
		for client, ends := range map[string][2]*Client{"linux": {windows, linux}, "windows": {linux, windows}} {
			t.Run(w.Name+" "+w.Traffic().Protocol+" client "+client, func(t *testing.T) {
				testenv.Retry(t, 5, func() error {
					got, errs := run(t, ends[0], ends[1], w, func() {})
					if err := errors.Join(errs[:]...); err != nil {
						return err
					}
					return checkTraffic(w, got[0], got[1])
				})
			})
		}
	}
	for want, w := range map[string]spec.Workload{
		"io: epoll needs Linux": workloadOf("pingpong", "tcp", func(t *spec.Traffic) { t.IO = spec.IOEpoll }),
		"takes 1 UDP flow":      workloadOf("pingpong", "udp", func(t *spec.Traffic) { t.Connections = 2 }),
		"HTTP needs Linux":      workloadOf("http", "tcp", nil),
		"native and latte, not iperf3": workloadOf("stream", "tcp", func(t *spec.Traffic) {
			t.Tool = spec.ToolIperf3
		}),
	} {
		if _, errs := run(t, windows, linux, w, func() {}); errs[0] == nil || !strings.Contains(errs[0].Error(), want) {
			t.Errorf("%s: got %v", want, errs[0])
		}
	}
	if _, err := windows.Sample(t.Context(), place.Sampling{Place: "w", Duration: time.Millisecond}, nil); err == nil || !strings.Contains(err.Error(), "runs Windows") {
		t.Errorf("sample: %v", err)
	}
	if _, err := windows.Apply(t.Context(), place.Steering{}); err == nil || !strings.Contains(err.Error(), "runs Windows") {
		t.Errorf("apply: %v", err)
	}
	for client, ends := range map[string][2]*Client{"linux": {windows, linux}, "windows": {linux, windows}} {
		t.Run("grpc client "+client, func(t *testing.T) {
			w := application(spec.ToolGRPC)
			w.Application.Warmup, w.Application.Duration = spec.Duration(50*time.Millisecond), spec.Duration(300*time.Millisecond)
			testenv.Retry(t, 5, func() error {
				got, errs := run(t, ends[0], ends[1], w, func() {}) // which stops an application's server
				if errs[1] != nil || got[1].Place == "" {
					return errors.Join(append(errs[:], errors.New("no figures"))...)
				}
				if p50, _ := latencies(t, got[1]); got[1].Messages < 20 || p50 <= 0 || p50 > 100e6 {
					return fmt.Errorf("%d calls, p50 %g ns", got[1].Messages, p50)
				}
				return nil
			})
		})
	}
	t.Run("latte", func(t *testing.T) { testLatte(t, wine, program) })
	_ = windows.Close()
	if err := endsSoon(t, ended); err != nil {
		t.Errorf("the worker ended with %v", err)
	}
	t.Run("hold", func(t *testing.T) { testWindowsHold(t, wine, program) })
	t.Run("claim", func(t *testing.T) { testWindowsClaim(t, wine, program) })
}

func endsSoon(t *testing.T, ended <-chan error) error {
	t.Helper()
	select {
	case err := <-ended:
		return err
	case <-time.After(time.Minute):
		t.Fatal("the worker goes on")
	}
	return nil
}

// testLatte makes two Windows workers drive a stand-in for latte, twice, with a new server each time.
func testLatte(t *testing.T, wine *testenv.Wine, program string) {
	wine.Build(t, "latte.exe", "./testdata/latte")
	server, _ := connectWine(t, wine, program, "worker")
	client, _ := connectWine(t, wine, program, "worker")
	at := place.Place{Name: "w", Kind: place.Node}
	if a, err := server.Describe(t.Context(), at); err != nil {
		t.Error(err)
	} else if b, err := client.Describe(t.Context(), at); err != nil || a.Boot != b.Boot {
		t.Errorf("two workers on one machine are of the boots %s and %s (%v)", a.Boot, b.Boot, err)
	}
	w := workloadOf("pingpong", "tcp", func(t *spec.Traffic) {
		t.Tool, t.Duration = spec.ToolLatte, spec.Duration(time.Second)
	})
	preset, _ := examples.Preset("an-windows")
	exp, err := spec.Parse("an-windows.yaml", preset, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range exp.Spec.Workloads { // shortened
		w.PingPong.Duration, w.PingPong.Iterations = spec.Duration(time.Second), min(w.PingPong.Iterations, 500)
		testenv.Retry(t, 5, func() error {
			got, errs := run(t, server, client, w, func() {})
			e := got[1]
			if errs[1] != nil || e.Messages < 100 || w.PingPong.Iterations > 0 && e.Messages != 500 || e.Bytes != uint64(w.PingPong.Size)*e.Messages || e.Machine == nil {
				return fmt.Errorf("%s: %v, %+v", w.Name, errs, e)
			}
			return nil
		})
	}
	for i := range 2 {
		var e record.Endpoint
		testenv.Retry(t, 5, func() error {
			got, errs := run(t, server, client, w, func() {})
			e = got[1]
			if errs[1] != nil || e.Place == "" {
				return fmt.Errorf("%v", errs)
			}
			if e.Messages < 100 || e.Bytes != 64*e.Messages || e.Seconds < 0.9 || e.Seconds > 10 || e.Percentiles[metrics.LatencyMean] <= 0 {
				return fmt.Errorf("%+v", e)
			}
			return nil
		})
		if m := e.Machine; m == nil || m.Busy < 0.0279 || m.Busy > 0.0281 || m.Interrupts != 3.86 || m.Switches != 2.29 || m.CPUs == 0 {
			t.Errorf("%d: machine %+v", i, m)
		}
	}
}

// testWindowsHold checks that the program that keeps a container running does not end by itself while workers come and go. A
// container has no standard input.
func testWindowsHold(t *testing.T, wine *testenv.Wine, program string) {
	hold := wine.Command(program, "worker", "--hold")
	if err := hold.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- hold.Wait() }()
	for range 3 { // one that ends by itself has ended by then
		beside, left := connectWine(t, wine, program, "worker")
		if err := beside.Close(); err != nil {
			t.Error(err)
		}
		if err := endsSoon(t, left); err != nil {
			t.Error(err)
		}
	}
	select {
	case err := <-ended:
		t.Errorf("ended by itself: %v", err)
	default:
		_ = hold.Process.Kill()
		if err := <-ended; err == nil {
			t.Error("ended by itself")
		}
	}
}

// testWindowsClaim checks that the claim of another run is refused, and that a claim of the same run takes over, which ends the
// first worker although its input is open. Neither a silent holder nor a silent process that asks may keep others waiting for
// ever.
func testWindowsClaim(t *testing.T, wine *testenv.Wine, program string) {
	wine.Build(t, "pipe.exe", "./testdata/pipe")
	stop := silent(t, wine, "hold")
	if text := refused(t, wine, program); !strings.Contains(text, "ask who holds it") || !strings.Contains(text, "i/o timeout") {
		t.Errorf("a holder that says nothing: %s", text)
	}
	stop()
	first, ended := connectWine(t, wine, program, "worker", "--remote", "--claim", "one/me@here")
	stop = silent(t, wine, "ask")
	if text := refused(t, wine, program); !strings.Contains(text, "another run (me@here) is in progress on this host") {
		t.Errorf("another run, after one that asks and says nothing: %s", text)
	}
	stop()
	if err := first.Alive(t.Context()); err != nil {
		t.Errorf("after another run's claim: %v", err)
	}
	second, _ := connectWine(t, wine, program, "worker", "--remote", "--claim", "one/me@here")
	if err := endsSoon(t, ended); err == nil {
		t.Error("a worker whose run goes on elsewhere ends as if it were done")
	}
	if err := second.Alive(t.Context()); err != nil {
		t.Errorf("after the same run's claim: %v", err)
	}
}

// claimPipe is claimName of Windows.
const claimPipe = `\\.\pipe\slipstream-run`

// silent starts a process that holds the claim's pipe, or connects to it to ask, and says nothing until it is stopped.
func silent(t *testing.T, w *testenv.Wine, end string) (stop func()) {
	t.Helper()
	cmd := w.Command("pipe", end, claimPipe)
	in, out := startPiped(t, cmd)
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || strings.TrimSpace(line) != "ready" {
		t.Fatalf("pipe %s: %q %v", end, line, err)
	}
	stop = sync.OnceFunc(func() {
		in.Close()
		_ = cmd.Wait() // Wine's own exit code, if it is killed
	})
	t.Cleanup(stop)
	return stop
}

// refused returns what a worker prints when its claim fails. That takes at most 5 s, and the time that Wine takes to start.
func refused(t *testing.T, w *testenv.Wine, program string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := w.Command(program, "worker", "--claim", "two/you@there")
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })()
	if err := cmd.Wait(); err == nil {
		t.Error("a claim was not refused")
	}
	return output.String()
}

// checkTraffic returns what is wrong with the figures of both ends.
func checkTraffic(w spec.Workload, server, client record.Endpoint) error {
	for _, e := range []record.Endpoint{server, client} {
		if e.Messages == 0 || e.Seconds < 0.25 || e.Seconds > 1.5 { // on a busy machine a thread sees an edge late
			return fmt.Errorf("%s: %d messages in %g s", e.Place, e.Messages, e.Seconds)
		}
	}
	if server.Messages > 2*client.Messages || client.Messages > 2*server.Messages && w.Traffic().Protocol == "tcp" && w.Stream == nil {
		return fmt.Errorf("%d messages at the server, %d at the client", server.Messages, client.Messages)
	}
	if w.Stream != nil {
		if server.BitsPerSecond < 1e6 {
			return fmt.Errorf("%g bit/s arrived", server.BitsPerSecond)
		}
		return nil
	}
	h, err := record.DecodeHistogram(client.Latency)
	if err != nil {
		return err
	}
	if p50 := time.Duration(h.ValueAtQuantile(50)); p50 <= 0 || p50 > 100*time.Millisecond {
		return fmt.Errorf("p50 %s of %d", p50, h.TotalCount())
	}
	if w.UnderLoad != nil && (h.TotalCount() < 75 || h.TotalCount() > 150) { // 500 a second for 300 ms, of which a busy machine may miss some
		return fmt.Errorf("%d of 150 messages were answered", h.TotalCount())
	}
	return nil
}
