package worker

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"slipstream.dev/internal/record"
	"slipstream.dev/internal/spec"
	"slipstream.dev/internal/testenv"
)

// TestServerStopped stops the server's process for 200 ms of a window of 5 s, and checks that latency counts from the time when
// a message was due. Each message that was due in these 200 ms waits for the rest of them. So 4% of all messages wait for up
// to 200 ms, 1% for more than 150 ms, and 2.5% for more than 75 ms. The messages are so large that the buffers hold at most
// half of these 40. A sender that counted from the time of sending would see only a small part of the delay.
func TestServerStopped(t *testing.T) {
	const pause, rate = 200 * time.Millisecond, 200
	var processes []*os.Process
	spawn := func() *Client {
		var cmd *exec.Cmd
		c, err := Spawn(t.Context(), func(started *exec.Cmd) error { cmd = started; return cmd.Start() }, os.Stderr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		processes = append(processes, cmd.Process)
		return c
	}
	server, driver := spawn(), spawn()
	w := spec.Workload{Name: "underload", UnderLoad: &spec.Traffic{
		Protocol: "tcp", IP: 4, Size: 512 << 10, Connections: 1, Tool: spec.ToolNative, Rate: rate,
		Warmup: spec.Duration(200 * time.Millisecond), Duration: spec.Duration(5 * time.Second),
	}}
	testenv.Retry(t, 5, func() error {
		stopped := make(chan error, 1)
		ends, errs := run(t, server, driver, w, func() {
			time.AfterFunc(2*time.Second, func() {
				err := processes[0].Signal(syscall.SIGSTOP)
				time.Sleep(pause)
				stopped <- errors.Join(err, processes[0].Signal(syscall.SIGCONT))
			})
		})
		if err := errors.Join(errs[:]...); err != nil {
			return err // perhaps before the server was to be stopped
		}
		if err := <-stopped; err != nil {
			return err
		}
		h, err := record.DecodeHistogram(ends[1].Latency)
		if err != nil {
			return err
		}
		if n := h.TotalCount(); n != 5*rate {
			return fmt.Errorf("%d latencies, want all %d", n, 5*rate)
		}
		// Other work on the machine makes them longer, and none of it shorter.
		for percentile, least := range map[float64]time.Duration{97.5: 60 * time.Millisecond, 99: 140 * time.Millisecond} {
			if got := time.Duration(h.ValueAtPercentile(percentile)); got < least {
				t.Errorf("p%g is %s, want at least %s", percentile, got, least)
			}
		}
		if got := time.Duration(h.ValueAtPercentile(50)); got > pause/2 {
			return fmt.Errorf("the median is %s: it was slow without the stop", got)
		}
		if len(ends[1].Warnings) > 0 {
			return fmt.Errorf("the rate was kept in the end: %v", ends[1].Warnings)
		}
		return nil
	})
}
